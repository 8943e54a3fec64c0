"""A holder of one generation: real sockets and a real memory file, and ways to break it.

Rules:

1. A holder serves what the store protocol says a store serves, no more.
2. `break_at(chunk, how)` breaks the answer for one chunk; everything else stays right.
3. Every wait of a broken holder ends when the holder is closed.
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tensorcast_dask.dataplane import hosts, memory
from tensorcast_dask.dataplane.channel import Credentials
from tensorcast_dask.dataplane.segments import MemoryFile
from tensorcast_dask.dataplane.server import Limits, Peer, Reply, Server
from tensorcast_dask.exceptions import Gone, Unimplemented
from tensorcast_dask.tensors.checksums import chunk_count, chunk_range, encode_sums
from tensorcast_dask.tensors.frames import pack_header
from tensorcast_dask.tensors.ids import (
    ClusterId,
    Epoch,
    Generation,
    HostId,
    Incarnation,
    NodeId,
)
from tensorcast_dask.tensors.messages import (
    Chunk,
    ChunkMap,
    ChunkMapAsked,
    Location,
    NodeCard,
    Open,
    Opened,
    Ranges,
    ReadChunk,
    ReadRanges,
    State,
    StateAsked,
    StoreRequest,
    Tier,
    TlsFiles,
    Welcome,
    encode,
)

if TYPE_CHECKING:
    from tensorcast_dask.dataplane.framing import Payload

__all__ = [
    "GENERATION",
    "TOKEN",
    "Break",
    "Holder",
    "Served",
    "holder_process",
    "node_card",
    "serve",
]

GENERATION = Generation(1 << 40 | 7)
TOKEN = bytes(range(32))
CLUSTER = ClusterId("cluster-of-tests")


class Break(StrEnum):
    """What goes wrong with one chunk."""

    DIE = "die"  # half of it, then the end of the connection
    STALL = "stall"  # half of it, then silence
    CORRUPT = "corrupt"  # one bit differs
    REFUSE = "refuse"  # Gone
    OTHER = "other"  # another chunk than asked


@dataclass(eq=False)
class Served:
    """A running holder, and what a test needs to reach it."""

    data: bytes
    chunk_bytes: int
    card: NodeCard
    credentials: Credentials
    server: Server
    file: MemoryFile
    closing: threading.Event
    broken: dict[int, Break]
    #: Which content this is; goes up when an owner changes its memory.
    stamp: int = 0

    @property
    def location(self) -> Location:
        return Location(card=self.card, tier=Tier.HOST)

    @property
    def chunks(self) -> int:
        return chunk_count(len(self.data), self.chunk_bytes)

    def chunk(self, number: int) -> bytes:
        offset, nbytes = chunk_range(number, len(self.data), self.chunk_bytes)
        return self.data[offset : offset + nbytes]

    def break_at(self, chunk: int, how: Break) -> None:
        """Break one chunk from now on."""
        self.broken[chunk] = how
        if how is Break.CORRUPT:  # who maps the segment must meet it too
            at = chunk * self.chunk_bytes
            self.file.map_shared().view[at : at + 1] = bytes([self.data[at] ^ 1])

    def other_card(self, **changes: object) -> Location:
        """The location with another card."""
        return Location(
            card=msgspec.structs.replace(self.card, **changes), tier=Tier.HOST
        )

    def credentials_with(self, **changes: object) -> Credentials:
        return replace(self.credentials, **changes)  # type: ignore[arg-type]


class Holder:
    """The handler of a holder."""

    def __init__(self, served: Served, *, mapped: bool) -> None:
        self._served = served
        self._mapped = mapped
        self.ended: list[Peer] = []
        data, step = served.data, served.chunk_bytes
        self._sums = [
            memory.sum_of(data[at : at + step]) for at in range(0, len(data), step)
        ]

    def handle(self, request: StoreRequest, payload: Payload, peer: Peer) -> Reply:
        served = self._served
        match request:
            case ChunkMapAsked(generation=generation):
                return Reply(message=self._map(generation))
            case ReadChunk():
                return self._chunk(request, peer)
            case ReadRanges(generation=generation, ranges=packed):
                numbers = struct.unpack(f"<{len(packed) // 8}Q", packed)
                parts = [
                    served.data[at : at + n]
                    for at, n in zip(numbers[::2], numbers[1::2], strict=True)
                ]
                whole = memory.sum_of(b"".join(parts))
                if Break.DIE in served.broken.values():
                    parts = parts[:-1]
                if Break.CORRUPT in served.broken.values():
                    whole ^= 1
                answer = Ranges(generation=generation, sum=whole, stamp=served.stamp)
                return Reply(message=answer, payload=parts)
            case Open(generation=generation):
                return self._open(generation)
            case StateAsked():
                return Reply(message=State(json=b"{}"))
            case _:
                pass
        message = f"a holder does not answer {type(request).__name__}"
        raise Unimplemented(message)

    def closed(self, peer: Peer) -> None:
        self.ended.append(peer)

    def _map(self, generation: Generation) -> ChunkMap:
        return ChunkMap(
            generation=generation,
            nbytes=len(self._served.data),
            chunk_bytes=self._served.chunk_bytes,
            index=b"",
            sums=encode_sums(self._sums),
            stamp=self._served.stamp,
        )

    def _open(self, generation: Generation) -> Reply:
        served = self._served
        if Break.REFUSE in served.broken.values():
            raise Gone("destroyed")
        if Break.STALL in served.broken.values():
            served.closing.wait(20)
        opened = Opened(
            generation=generation,
            index=b"",
            nbytes=len(served.data),
            mapped=self._mapped,
        )
        if self._mapped:
            return Reply(message=opened, fds=(served.file.read_description(),))
        return Reply(message=opened, payload=served.file.map_shared().view)

    def _chunk(self, request: ReadChunk, peer: Peer) -> Reply:
        served, number = self._served, request.chunk
        how = served.broken.get(number)
        if how is Break.REFUSE:
            raise Gone("destroyed")
        bytes_ = bytearray(served.chunk(number))
        answer = Chunk(
            generation=request.generation,
            chunk=number + (how is Break.OTHER),
            sum=self._sums[number],
            stamp=served.stamp,
        )
        if how is Break.CORRUPT:
            bytes_[0] ^= 1
        if how in (Break.DIE, Break.STALL):
            self._half(answer, bytes_, how, peer)
        return Reply(message=answer, payload=bytes_)

    def _half(self, answer: Chunk, bytes_: bytearray, how: Break, peer: Peer) -> None:
        """Send half of a chunk, and no more."""
        body = encode(answer)
        head = pack_header(len(body), len(bytes_)) + body
        peer.stream.sock.sendall(head + bytes_[: len(bytes_) // 2])
        if how is Break.STALL:
            self._served.closing.wait(20)
        peer.close()


@contextlib.contextmanager
def serve(
    data: bytes,
    *,
    chunk_bytes: int = 64 << 10,
    limits: Limits | None = None,
    mapped: bool = True,
    tls: TlsFiles | None = None,
    allow_uids: Sequence[int] = (),
    holder: type[Holder] | None = None,
) -> Iterator[Served]:
    """Run a holder of `data` for the length of a block."""
    from tensorcast_dask.dataplane.auth import server_tls

    with (
        tempfile.TemporaryDirectory(prefix="tc-") as folder,
        MemoryFile(len(data)) as file,
    ):
        Path(folder).chmod(0o700)
        run_dir = hosts.run_directory(folder)
        host = hosts.host_id(run_dir)
        file.map_shared().view[:] = data
        closing = threading.Event()
        served = Served(
            data=data,
            chunk_bytes=chunk_bytes,
            card=node_card(),
            credentials=Credentials(
                cluster=CLUSTER, token=TOKEN, host=host, stall_s=5.0, tls=tls
            ),
            server=None,  # type: ignore[arg-type]  # set below, it needs the handler
            file=file,
            closing=closing,
            broken={},
        )
        served.server = Server(
            (holder or Holder)(served, mapped=mapped),
            welcome=lambda: Welcome(
                card=served.card,
                cluster=CLUSTER,
                epoch=Epoch(1),
                chunk_bytes=chunk_bytes,
                small_bytes=1 << 20,
            ),
            token=lambda: TOKEN,
            limits=limits,
            allow_uids=allow_uids,
        )
        path = hosts.socket_path(run_dir)
        served.server.start()
        served.server.listen_unix(path)
        port = served.server.listen_tcp(
            "127.0.0.1", tls=server_tls(tls) if tls else None
        )
        served.card = node_card(
            host=host, socket=path, data_host="127.0.0.1", data_port=port
        )
        served.card = msgspec.structs.replace(served.card, tls=tls is not None)
        try:
            yield served
        finally:
            closing.set()
            assert served.server.stop(within_s=10), "the holder's threads did not end"


def node_card(
    *,
    host: str = "host",
    socket: str = "",
    data_host: str = "",
    data_port: int = 0,
) -> NodeCard:
    """A card of a node of tests."""
    return NodeCard(
        node=NodeId("0123456789abcdef" * 2),
        incarnation=Incarnation(3),
        host=HostId(host),
        socket=socket,
        data_host=data_host,
        data_port=data_port,
        name="tested",
    )


@contextlib.contextmanager
def holder_process(code: str) -> Iterator[tuple[subprocess.Popen[bytes], NodeCard]]:
    """Run a holder in a process of its own, which prints its card; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        card = msgspec.json.decode(process.stdout.readline(), type=NodeCard)
        yield process, card
    finally:
        process.kill()
        process.communicate()
