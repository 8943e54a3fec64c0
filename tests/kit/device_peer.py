"""Another process that has the same device open, and does what a test tells it.

Rules:

1. One line of JSON a request, one a reply; bytes as hex. An error is its kind.
2. It ends with its stdin, so with the test's process whatever happens.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from tensorcast_dask.dataplane.devices import (
    Device,
    HostMemory,
    Memory,
    SlabHandle,
    open_device,
)
from tensorcast_dask.exceptions import TensorCastError, error_from_wire
from tensorcast_dask.tensors.devices import DeviceSpec, parse_devices

__all__ = ["Peer", "peer"]


class Peer:
    """The test's side of such a process."""

    def __init__(self, name: str, spec: DeviceSpec, run_dir: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kit.device_peer", name, str(spec), run_dir],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            },
            text=True,
        )

    def ask(self, verb: str, *arguments: object) -> Any:
        """What it answers; its errors are raised here."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([verb, *arguments]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the peer ended during {verb}"
        answer = json.loads(line)
        if "error" in answer:
            raise error_from_wire(answer["error"], answer["message"])
        return answer["value"]

    def kill(self) -> None:
        """End it without a word."""
        self.process.kill()
        self.process.wait(10)

    def end(self) -> None:
        """Let it close and go."""
        self.process.communicate(timeout=30)


@contextlib.contextmanager
def peer(name: str, spec: DeviceSpec, run_dir: str) -> Iterator[Peer]:
    """Run another process with the device open."""
    found = Peer(name, spec, run_dir)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            try:
                found.end()
            finally:
                found.process.kill()
        for pipe in (found.process.stdin, found.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class _Told:
    """The other side: one method a verb."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.memories: dict[int, Memory] = {}

    def _keep(self, memory: Memory) -> int:
        for number, known in self.memories.items():
            if known is memory:
                return number
        self.memories[len(self.memories)] = memory
        return len(self.memories) - 1

    def allocate(self, data: str) -> int:
        memory = self.device.allocate(len(data) // 2)
        self.device.copy(memory.range(), bytes.fromhex(data)).wait()
        return self._keep(memory)

    def export(self, number: int) -> str:
        return self.device.export(self.memories[number]).encode().hex()

    def open(self, handle: str) -> int:
        return self._keep(self.device.open(SlabHandle.decode(bytes.fromhex(handle))))

    def read(self, number: int) -> str:
        memory = self.memories[number]
        into = bytearray(memory.nbytes)
        self.device.copy(into, memory.range()).wait()
        return into.hex()

    def write(self, number: int, offset: int, data: str) -> None:
        source = bytes.fromhex(data)
        place = self.memories[number].range(offset, len(source))
        self.device.copy(place, source).wait()

    def free(self, number: int) -> None:
        self.device.free(self.memories[number])

    def close(self, number: int) -> None:
        self.device.close(self.memories[number])

    def fork(self) -> list[str]:
        """The kinds of error that a forked child meets, verb by verb."""
        device, memory = self.device, self.memories[0]
        verbs = (
            lambda: device.allocate(1),
            lambda: device.free(memory),
            lambda: device.copy(memory.range(0, 1), b"1"),
            lambda: device.export(memory),
            lambda: device.open(HostMemory(bytearray(1))),
            lambda: device.close(memory),
            device.event,
            lambda: device.wrap(memory.range()),
            device.list,
        )
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                os.write(writer, json.dumps([_kind(verb) for verb in verbs]).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            found = json.loads(pipe.read())
        os.waitpid(pid, 0)
        return found


def _kind(verb: Any) -> str:
    try:
        verb()
    except TensorCastError as error:
        return error.kind if "spawn" in error.message else error.message
    return "nothing"


def main(name: str, spec: str, run_dir: str) -> None:
    """Serve stdin until its end."""
    with open_device(name, parse_devices(spec), run_dir) as device:
        told = _Told(device)
        for line in sys.stdin:
            verb, *arguments = json.loads(line)
            try:
                answer = {"value": getattr(told, verb)(*arguments)}
            except TensorCastError as error:
                answer = {"error": error.kind, "message": error.message}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
