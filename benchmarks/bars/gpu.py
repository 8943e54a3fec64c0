"""What devices are held to, on a GPU: copies, handles, UCX between processes, kill -9.

``--smoke`` without a GPU takes an emulated device, whose memory UCX sees as a process's own. Without
either every line is *unavailable*, with the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from benchmarks.harness import (
    ROOT,
    absolute,
    emit,
    failed,
    paired,
    section,
    unavailable,
)
from benchmarks.sizes import MIB, Sizes, parse
from tensorcast_dask.config import Settings
from tensorcast_dask.dataplane import memory
from tensorcast_dask.dataplane.devices import (
    Device,
    HostMemory,
    Memory,
    SlabHandle,
    find_devices,
    open_device,
)
from tensorcast_dask.dataplane.devices.staging import Ring, to_device, to_host
from tensorcast_dask.dataplane.framing import FrameStream
from tensorcast_dask.dataplane.transports import ucx_line
from tensorcast_dask.dataplane.transports.ucx_slabs import stretch_of
from tensorcast_dask.exceptions import (
    InvalidArgument,
    TensorCastError,
    UnsupportedPlatform,
)
from tensorcast_dask.tensors.devices import DeviceSpec

LINES = (
    "pinned to device and back",
    "device result by copy",
    "a shared slab opened by a second process",
    "UCX from device to device",
    "memory back after kill -9",
)
#: Others may use the GPU too.
SLACK_BYTES = 64 * MIB
SHARED_MS = 20.0
BACK_S = 2.0


def spec_of(sizes: Sizes) -> DeviceSpec:
    """What the settings say; emulated in a smoke run where they lead to nothing."""
    spec = Settings.read().device
    try:
        find_devices(spec)
    except UnsupportedPlatform:
        if not sizes.smoke:
            raise
        return DeviceSpec("emulated", 1, 16 * sizes.big_bytes)
    return spec


class Peer:
    """Another process with the device open; it does what a line says."""

    def __init__(self, spec: DeviceSpec, run_dir: str) -> None:
        ours, theirs = socket.socketpair()
        self.control = FrameStream(ours, peer="the other process", stall_s=30.0)
        name = "emulated:0" if spec.kind == "emulated" else "cuda:0"
        arguments = ["--peer", name, spec.kind, str(spec.nbytes), run_dir]
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.bars.gpu",
                *arguments,
                str(theirs.fileno()),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        theirs.close()

    def say(self, *words: object) -> None:
        """Tell it what to do."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def ask(self, *words: object) -> Any:
        """Tell it, and wait for its answer."""
        self.say(*words)
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.control.close()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def serve(name: str, kind: str, nbytes: str, run_dir: str, fd: str) -> None:
    """The other side of `Peer`."""
    control = FrameStream(socket.socket(fileno=int(fd)), peer="the bench", stall_s=30.0)
    held: Any = None
    line: Any = None
    spec = DeviceSpec(kind, 1, int(nbytes))
    with open_device(name, spec, run_dir) as device:
        for said in sys.stdin:
            match json.loads(said):
                case ["allocate", size]:
                    held = device.allocate(size)
                    print(json.dumps(device.export(held).encode().hex()), flush=True)
                case ["open", handle]:
                    device.open(SlabHandle.decode(bytes.fromhex(handle)))
                    print(json.dumps("open"), flush=True)
                case ["ucx", size, address]:
                    held = device.allocate(size)
                    line = device_line(device, held)
                    line.connect(bytes.fromhex(address))
                    print(json.dumps(line.address.hex()), flush=True)
                    line.greet(first=False, control=control, stall_s=30.0)
                case ["send"]:
                    line.send(stretch(device, held))
                    line.drive(control=control, stall_s=30.0)
                case unknown:
                    message = f"no peer does {unknown}"
                    raise ValueError(message)


def device_line(device: Device, held: Memory) -> ucx_line.Line:
    """A line that a slab may go over."""
    return ucx_line.Line(device=stretch(device, held).memory != "host")


def stretch(device: Device, held: Memory) -> ucx_line.Stretch:
    """A slab as UCX sees it."""
    return stretch_of(device, held.range())


def rate(nbytes: int, action: Callable[[], object]) -> float:
    """GB/s."""
    begin = time.perf_counter()
    action()
    return nbytes / 1e9 / (time.perf_counter() - begin)


@contextlib.contextmanager
def slab(device: Device, nbytes: int) -> Iterator[Any]:
    """Some memory of the device, for a block."""
    held = device.allocate(nbytes)
    try:
        yield held
    finally:
        device.free(held)


def pinned(device: Device, nbytes: int, sizes: Sizes) -> None:
    """The product's own way, sums included, against one bare copy."""
    host = memory.private(nbytes)
    memory.copy(host, host)  # makes the pages
    mapped = device.open(HostMemory(host))
    with slab(device, nbytes) as held, Ring(device) as ring:
        place = held.range()
        ways: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
            (
                "to device",
                lambda: list(to_device(ring, host, place)),
                lambda: device.copy(place, host).wait(),
            ),
            (
                "back",
                lambda: list(to_host(ring, place, host)),
                lambda: device.copy(host, place).wait(),
            ),
        ]
        for way, ours, bare in ways:
            emit(
                paired(
                    f"pinned memory, {nbytes >> 20} MiB, {way}",
                    lambda ours=ours: rate(nbytes, ours),  # type: ignore[misc]
                    lambda bare=bare: rate(nbytes, bare),  # type: ignore[misc]
                    bar=0.9,
                    better="higher",
                    unit="GB/s",
                    pairs=sizes.pairs,
                )
            )
    device.close(mapped)


def by_copy(device: Device, nbytes: int, sizes: Sizes) -> None:
    """A private result, against the framework's own copy of the same memory."""
    if device.id.family != "cuda":
        emit(unavailable(LINES[1], "an emulated device has no framework", bar=0.9))
        return
    with slab(device, nbytes) as one, slab(device, nbytes) as two:
        source: Any = device.wrap(one.range())
        target: Any = device.wrap(two.range())

        def theirs() -> None:
            target[...] = source
            device.event().wait()

        emit(
            paired(
                f"device result by copy, {nbytes >> 20} MiB",
                lambda: rate(
                    nbytes, lambda: device.copy(two.range(), one.range()).wait()
                ),
                lambda: rate(nbytes, theirs),
                bar=0.9,
                better="higher",
                unit="GB/s",
                pairs=sizes.pairs,
            )
        )


def shared(device: Device, nbytes: int, spec: DeviceSpec, run_dir: str) -> None:
    """Opened, and closed again; the device's free memory must not change."""
    with Peer(spec, run_dir) as peer:
        handle = SlabHandle.decode(bytes.fromhex(peer.ask("allocate", nbytes)))
        free = device.list().free_bytes
        grown = 0

        def once() -> float:
            nonlocal grown
            begin = time.perf_counter()
            opened = device.open(handle)
            spent = time.perf_counter() - begin
            grown = max(grown, free - device.list().free_bytes)
            device.close(opened)
            return spent * 1e3

        emit(
            absolute(
                f"a second process opens {nbytes >> 20} MiB",
                once,
                bar=SHARED_MS,
                better="lower",
                unit="ms",
            )
        )
        if grown > SLACK_BYTES:
            emit(failed("no memory for a shared slab", f"{grown >> 20} MiB are gone"))


def over_ucx(
    device: Device, nbytes: int, sizes: Sizes, spec: DeviceSpec, run_dir: str
) -> None:
    """Between two processes, against a copy inside one."""
    try:
        ucx_line.offered()
    except InvalidArgument as error:
        emit(unavailable(LINES[3], error.message, bar=0.8))
        return
    with (
        Peer(spec, run_dir) as peer,
        slab(device, nbytes) as here,
        slab(device, nbytes) as two,
    ):
        line = device_line(device, here)
        line.connect(bytes.fromhex(peer.ask("ucx", nbytes, line.address.hex())))
        line.greet(first=True, control=peer.control, stall_s=30.0)

        def pull() -> None:
            peer.say("send")
            line.receive(stretch(device, here))
            line.drive(control=peer.control, stall_s=30.0)

        emit(
            paired(
                f"UCX, {nbytes >> 20} MiB from device to device",
                lambda: rate(nbytes, pull),
                lambda: rate(
                    nbytes, lambda: device.copy(two.range(), here.range()).wait()
                ),
                bar=0.8,
                better="higher",
                unit="GB/s",
                pairs=sizes.pairs,
                notes={"lanes": line.lanes},
            )
        )
        line.close()


def killed(device: Device, nbytes: int, spec: DeviceSpec, run_dir: str) -> None:
    """An owner with memory, and a reader that has opened some of ours."""
    before = device.list().free_bytes

    def seconds(least: int) -> float:
        begin = time.perf_counter()
        while device.list().free_bytes < least - SLACK_BYTES:
            if time.perf_counter() - begin > 5 * BACK_S:
                break
            time.sleep(0.01)
        return time.perf_counter() - begin

    def owner() -> float:
        with Peer(spec, run_dir) as peer:
            peer.ask("allocate", nbytes)
            peer.kill()
            return seconds(before)

    def reader() -> float:
        with Peer(spec, run_dir) as peer:
            held = device.allocate(nbytes)
            peer.ask("open", device.export(held).encode().hex())
            peer.kill()
            device.free(held)
            return seconds(before)

    for who, strike in (("an owner", owner), ("a reader", reader)):
        emit(
            absolute(
                f"kill -9 of {who} of {nbytes >> 20} MiB, its memory back",
                strike,
                bar=BACK_S,
                better="lower",
                unit="s",
                times=3,
            )
        )


def main(sizes: Sizes) -> None:
    """All lines."""
    try:
        spec = spec_of(sizes)
    except TensorCastError as error:
        for name in LINES:
            emit(unavailable(name, error.message))
        return
    big, middle = 4 * sizes.big_bytes, sizes.big_bytes
    run_dir = tempfile.mkdtemp(prefix="tc-")
    name = "emulated:0" if spec.kind == "emulated" else "cuda:0"
    with open_device(name, spec, run_dir) as device:
        section(LINES[0], lambda: pinned(device, big, sizes))
        section(LINES[1], lambda: by_copy(device, middle, sizes))
        section(LINES[2], lambda: shared(device, big, spec, run_dir))
        section(LINES[3], lambda: over_ucx(device, middle, sizes, spec, run_dir))
        section(LINES[4], lambda: killed(device, middle, spec, run_dir))
    shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peer"]:
        serve(*sys.argv[2:])
    else:
        main(parse())
