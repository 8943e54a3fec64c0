"""Pull 1 GiB from node to node over UCX, host memory, against a bare ucxx loop on the same lanes.

Both send the store's own memory file, and receive into one whose pages are there: how CMA gets
on depends on how the pages of its source lie (pages one by one: 6 GB/s, in stretches of 60: 10,
huge ones: 11). The loop verifies nothing; what the product spends on sums, and on asking, is
its own cost.
"""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmarks import product
from benchmarks.bars.pull import Puller
from benchmarks.harness import ROOT, emit, failed, paired, section, unavailable
from benchmarks.sizes import MIB, Sizes, parse
from tensorcast_dask.dataplane.segments import MemoryFile

#: Lanes of UCX -> how the product names them.
LANES = {"tcp,self": "ucx:tcp", "tcp,cma,self": "ucx:cma"}
MESSAGE_BYTES = 8 * MIB
IN_FLIGHT = 2
BAR = 0.9


class End:
    """One end of the bare loop: ucxx as its documentation has it, 8 MiB a message, two under way."""

    def __init__(self, nbytes: int, source: str = "") -> None:
        from ucxx._lib.arr import Array

        from tensorcast_dask.dataplane.transports.ucx_library import load

        library = load()  # for its options: the same for both sides
        self.api, self.array = library.api, Array
        self.worker = self.api.UCXWorker(library.context(("self", "tcp", "cma")))
        self.worker.init_blocking_progress_mode()
        if source:
            with Path(source).open("rb") as file:
                self.map = mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ)
            self.bytes = np.frombuffer(self.map, np.uint8)
            assert self.bytes[:: mmap.PAGESIZE].all()  # maps every page
        else:
            self.file = MemoryFile(nbytes)
            self.file.prefault(0, nbytes)
            self.bytes = np.frombuffer(self.file.map_shared().view, np.uint8)
            self.bytes[:] = 1
        self.endpoint: Any = None

    def connect(self, address: bytes) -> None:
        """To the other end."""
        self.endpoint = self.worker.create_endpoint_from_worker_address(
            self.api.UCXAddress.create_from_buffer(address),
            endpoint_error_handling=True,
        )

    def all(self, *, out: bool) -> None:
        """Send or receive everything once."""
        post = self.endpoint.tag_send if out else self.endpoint.tag_recv
        going: deque[Any] = deque()
        for at in range(0, self.bytes.nbytes, MESSAGE_BYTES):
            part = self.array(self.bytes[at : at + MESSAGE_BYTES])
            going.append(post(part, self.api.UCXXTag(at)))
            self._until(going, IN_FLIGHT - 1)
        self._until(going, 0)

    def _until(self, going: deque[Any], left: int) -> None:
        while len(going) > left:
            if going[0].completed:
                going.popleft().check_error()
            else:
                self.worker.progress_worker_event(100)


class Loop:
    """The receiving end, and a process that sends when told."""

    def __init__(self, nbytes: int, lanes: str, source: str) -> None:
        self.end = End(nbytes)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.bars.ucx",
                "--send",
                str(nbytes),
                source,
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "UCX_TLS": lanes},
        )
        self._say(self.end.worker.address.tobytes().hex())
        assert self.process.stdout is not None
        self.end.connect(bytes.fromhex(self.process.stdout.readline()))

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def seconds(self) -> float:
        """All of it, once."""
        begin = time.perf_counter()
        self._say("go")
        self.end.all(out=False)
        return time.perf_counter() - begin

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def send(nbytes: int, source: str) -> None:
    """The sending process: an address in, an address out, then a line for each time."""
    end = End(nbytes, source)
    end.connect(bytes.fromhex(sys.stdin.readline()))
    print(end.worker.address.tobytes().hex(), flush=True)
    for _ in sys.stdin:
        end.all(out=True)


def against_the_loop(sizes: Sizes, lanes: str, via: str) -> None:
    """One line."""
    os.environ["UCX_TLS"] = lanes  # of the stores too: they inherit it
    big = sizes.big_bytes
    with (
        contextlib.ExitStack() as stack,
        product.cluster(
            sizes, separate_hosts=True, more={"transfer": {"ucx": "on"}}
        ) as cluster,
        product.session(cluster) as cast,
    ):
        cast.put(product.big_array(big), "bench/big", worker=product.one_node(cast))
        source = product.segment_of(big)
        puller = Puller(cast, "bench/big")
        loop = stack.enter_context(Loop(big, lanes, source))
        emit(
            paired(
                f"pull {big >> 20} MiB over {via}",
                lambda: big / puller.seconds() / 1e9,
                lambda: big / loop.seconds() / 1e9,
                unit="GB/s",
                bar=BAR,
                better="higher",
                pairs=sizes.pairs,
                warm=2,
                notes={"lanes": lanes},
            )
        )
        if puller.via != {via}:
            emit(failed(f"pull goes over {via}", f"went via {puller.via}"))


def main(sizes: Sizes) -> None:
    """A line for each kind of lane."""
    if importlib.util.find_spec("ucxx") is None:
        why = "ucxx is not installed (.ci/install-ucx)"
        emit(unavailable("pull over UCX", why, bar=BAR, better="higher"))
        return
    for lanes, via in LANES.items():
        section(
            f"pull over {via}",
            lambda lanes=lanes, via=via: against_the_loop(sizes, lanes, via),  # type: ignore[misc]
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--send"]:
        send(int(sys.argv[2]), sys.argv[3])
    else:
        main(parse())
