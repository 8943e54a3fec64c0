"""Real store processes for tests, and the two who talk to them: a client and a catalog.

Rules:

1. A store is started by the package's own starter and ended by the test; `Stores.close`
   ends all that still live and checks that their folders are gone.
2. `StoreClient` speaks the store protocol over real sockets, as the session does.
3. `CatalogStub` is the other end of links: it proves, greets, records what nodes say, and
   gives the orders that a test asks for. It has no opinion of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import numpy as np

from tensorcast_dask.dataplane import hosts
from tensorcast_dask.dataplane.auth import LINK, Answerer, server_tls
from tensorcast_dask.dataplane.channel import Channel, Credentials, Prefer
from tensorcast_dask.dataplane.framing import FrameStream
from tensorcast_dask.dataplane.maps import PrivateMap, WritableMap
from tensorcast_dask.exceptions import TensorCastError
from tensorcast_dask.store.launch import start
from tensorcast_dask.tensors.dtypes import dtype
from tensorcast_dask.tensors.ids import (
    ArtifactId,
    ClusterId,
    Epoch,
    Generation,
    HostId,
    Incarnation,
    NodeId,
    RequestId,
    Version,
    generation_of,
)
from tensorcast_dask.tensors.messages import (
    Abort,
    Adopt,
    Adopted,
    Commit,
    DoDrop,
    Done,
    DoPull,
    End,
    Fill,
    FromNode,
    Hello,
    Inventory,
    LetGo,
    LinkTarget,
    Location,
    NodeCard,
    NodeHello,
    NodeWelcome,
    Open,
    Opened,
    Proof,
    Renew,
    Renewed,
    Reserve,
    Reserved,
    Role,
    State,
    StateAsked,
    StoreSettings,
    TaskDone,
    TaskSeen,
    Tier,
    TlsFiles,
    ToNode,
    Write,
)
from tensorcast_dask.tensors.specs import Index, TensorSpec
from tests.kit.eventually import eventually

__all__ = [
    "CLUSTER",
    "TOKEN",
    "CatalogStub",
    "StoreClient",
    "Stores",
    "generation",
    "index_of",
]

MIB = 1 << 20
CLUSTER = ClusterId("test-cluster")
TOKEN = bytes(range(32))
_numbers = itertools.count(1)
M = TypeVar("M")


def generation() -> Generation:
    """Mint a generation that no other test of this run has."""
    return generation_of(Epoch(1), next(_numbers))


def index_of(nbytes: int) -> bytes:
    """Make the encoded index of one uint8 tensor, packed to that many bytes."""
    return Index.of([TensorSpec("t", dtype("uint8"), (nbytes,))]).encode()


def content(nbytes: int, seed: int = 1) -> bytes:
    """Make bytes that no other seed makes."""
    return np.random.default_rng(seed).bytes(nbytes)


# ------------------------------------------------------------------ stores
class Stores:
    """Stores of one cluster in one run directory."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.cards: list[NodeCard] = []

    def settings(self, **changes: Any) -> StoreSettings:
        """Make settings for a small store; `changes` win."""
        base = StoreSettings(
            run_dir=str(self.run_dir),
            cluster_name="test",
            host_memory_bytes=64 * MIB,
            reserve_min_bytes=16 * MIB,
            reserve_fraction=0.001,
            slab_bytes=1 * MIB,
            own_segment_bytes=64 << 10,
            chunk_bytes=64 << 10,
            stall_s=1.0,
            lease_ttl_s=2.0,
        )
        return msgspec.structs.replace(base, **changes)

    def start(
        self,
        *,
        link: LinkTarget | None = None,
        free_ttl_s: float = 120.0,
        **changes: Any,
    ) -> NodeCard:
        """Start a store; it ends by itself should the test die."""
        card = start(
            self.settings(**changes), link=link, free_ttl_s=free_ttl_s, timeout_s=20.0
        )
        self.cards.append(card)
        return card

    def separate(self, number: int) -> HostId:
        """Name a host that no other store of the test is on."""
        return HostId(f"host-{number}")

    def folder(self, card: NodeCard) -> Path:
        """Return a store's folder."""
        return Path(card.socket).parent

    def kill(self, card: NodeCard) -> None:
        """Kill -9."""
        if hosts.is_alive(card):
            os.kill(card.pid, signal.SIGKILL)
        self.await_end(card)

    def await_end(self, card: NodeCard, *, within_s: float = 10.0) -> None:
        """Wait until the process is gone."""
        eventually(
            lambda: not hosts.is_alive(card), within_s=within_s, what="store ended"
        )

    def close(self) -> None:
        """End every store that still lives."""
        for card in self.cards:
            if hosts.is_alive(card):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(card.pid, signal.SIGCONT)
                    os.kill(card.pid, signal.SIGTERM)
        for card in self.cards:
            self.await_end(card)
        for folder in self.run_dir.glob("*/"):
            hosts.clean_dead(folder)  # those that were killed could not do it


# ------------------------------------------------------------------ the client
@dataclass
class Read:
    """What an `Open` gave."""

    data: memoryview
    mapped: bool
    index: bytes


class StoreClient:
    """One connection to one store."""

    def __init__(
        self,
        card: NodeCard,
        *,
        prefer: Prefer = Prefer.UNIX,
        role: Role = Role.CLIENT,
        host: HostId | None = None,
        token: bytes = TOKEN,
        tls: TlsFiles | None = None,
        incarnation: int = 0,
    ) -> None:
        self.card = msgspec.structs.replace(card, incarnation=Incarnation(incarnation))
        self.channel = Channel.connect(
            self.card,
            credentials=Credentials(
                cluster=ClusterId(""),
                token=token,
                tls=tls,
                role=role,
                host=card.host if host is None else host,
            ),
            prefer=prefer,
            until_s=time.monotonic() + 10.0,
        )
        self._rids = itertools.count(1)
        self._name = f"{os.getpid()}-{next(_numbers)}"

    def rid(self) -> RequestId:
        """Mint a request id."""
        return RequestId(f"{self._name}-{next(self._rids)}")

    def call(self, request: Any, expect: type[M], **how: Any) -> Any:
        """Call with a bound of 20 s."""
        return self.channel.call(
            request, expect=expect, until_s=time.monotonic() + 20.0, **how
        )

    def reserve(
        self, gen: Generation, nbytes: int, *, deadline_s: float = 10.0, **more: Any
    ) -> tuple[Reserved, int]:
        """Reserve; the answer and the write description (-1 without one)."""
        request = Reserve(
            rid=more.pop("rid", None) or self.rid(),
            generation=gen,
            id=ArtifactId(more.pop("id", f"a/{gen}")),
            version=Version(1),
            nbytes=nbytes,
            deadline_s=deadline_s,
            **more,
        )
        frame = self.call(request, Reserved)
        fd = frame.take_fd() if frame.message.mapped else -1
        return frame.message, fd

    def fill(self, fd: int, data: bytes) -> None:
        """Write through a description and close it."""
        try:
            os.pwrite(fd, data, 0)
        finally:
            os.close(fd)

    def write(self, gen: Generation, offset: int, data: bytes) -> None:
        """Send bytes for a reservation."""
        self.call(
            Write(rid=self.rid(), generation=gen, offset=offset), Done, payload=data
        )

    def fill_from(self, gen: Generation, spans: list[tuple[int, int, int]]) -> None:
        """Have the store read (offset, address, length) of this process's memory."""
        packed = b"".join(struct.pack("<QQQ", *span) for span in spans)
        self.call(Fill(rid=self.rid(), generation=gen, spans=packed), Done)

    def commit(
        self, gen: Generation, nbytes: int, *, rid: RequestId | None = None
    ) -> Done:
        """Commit a reservation that was filled."""
        request = Commit(rid=rid or self.rid(), generation=gen, index=index_of(nbytes))
        done: Done = self.call(request, Done).message
        return done

    def abort(self, gen: Generation) -> None:
        """Give a reservation back."""
        self.call(Abort(rid=self.rid(), generation=gen), Done)

    def put(
        self, data: bytes, gen: Generation | None = None, **more: Any
    ) -> Generation:
        """Put bytes, by whichever way fits their length."""
        gen = generation() if gen is None else gen
        if len(data) <= self.channel.welcome.small_bytes:
            return self.put_inline(data, gen, **more)
        reserved, fd = self.reserve(gen, len(data), **more)
        if reserved.mapped:
            self.fill(fd, data)
        else:
            step = 256 << 10
            for at in range(0, len(data), step):
                self.write(gen, at, data[at : at + step])
        self.commit(gen, len(data))
        return gen

    def put_inline(
        self,
        data: bytes,
        gen: Generation | None = None,
        *,
        rid: RequestId | None = None,
        **more: Any,
    ) -> Generation:
        """Put in one message."""
        gen = generation() if gen is None else gen
        request = Commit(
            rid=rid or self.rid(),
            generation=gen,
            index=index_of(len(data)),
            inline=True,
            id=ArtifactId(more.get("id", f"a/{gen}")),
            version=Version(1),
        )
        self.call(request, Done, payload=data)
        return gen

    def open(self, gen: Generation, *, map: bool = True) -> Read:  # noqa: A002
        """Read a replica: a private map, or a copy."""
        frame = self.call(
            Open(rid=self.rid(), generation=gen, deadline_s=10.0, map=map),
            Opened,
            max_payload_bytes=1 << 30,
        )
        opened = frame.message
        if opened.mapped:
            data = PrivateMap(frame.take_fd(), opened.nbytes).view
        else:
            data = memoryview(frame.payload or b"")
        return Read(data, opened.mapped, opened.index)

    def read(self, gen: Generation) -> bytes:
        """Read a replica as bytes of our own."""
        return bytes(self.open(gen).data)

    def state(self) -> dict[str, Any]:
        """Ask for `debug_state()`."""
        found: dict[str, Any] = json.loads(
            self.call(StateAsked(rid=self.rid()), State).message.json
        )
        return found

    def idle(self) -> dict[str, Any]:
        """Wait until nothing is under way but reservations; the state then."""
        quiet: dict[str, Any] = {}

        def look() -> bool:
            nonlocal quiet
            quiet = self.state()
            quiet.pop("ends_in_s")  # a clock
            busy = quiet["busy"]
            return not (busy["leases"] or busy["transfers"] or busy["requests"])

        eventually(look, within_s=20.0, what="the store is idle")
        return quiet

    def host(self) -> dict[str, int]:
        """Return the host tier's counts."""
        counts: dict[str, int] = self.state()["tiers"]["host"]
        return counts

    def adopt(
        self,
        settings: StoreSettings,
        *,
        worker: str = "tcp://w1",
        link: LinkTarget | None = None,
        pid: int | None = None,
        grant: bytes = b"",
    ) -> Adopted:
        """Adopt the store on this connection."""
        request = Adopt(
            rid=self.rid(),
            worker=worker,
            name=worker,
            pid=os.getpid() if pid is None else pid,
            settings=settings,
            link=link or nowhere(),
            grant=grant,
        )
        adopted: Adopted = self.call(request, Adopted).message
        return adopted

    def let_go(self, ttl_s: float) -> None:
        """Release the store."""
        self.call(LetGo(rid=self.rid(), ttl_s=ttl_s, why="test"), Done)

    def end(self) -> None:
        """End the store."""
        self.call(End(rid=self.rid(), why="test"), Done)

    def close(self) -> None:
        """Close the connection."""
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def writable(fd: int, nbytes: int) -> WritableMap:
    """Map a write description as a producer does."""
    return WritableMap(fd, nbytes)


def nowhere() -> LinkTarget:
    """Aim at a catalog that does not listen."""
    return LinkTarget(
        host="127.0.0.1", port=1, cluster=CLUSTER, token=TOKEN, epoch=Epoch(1)
    )


# ------------------------------------------------------------------ the catalog
@dataclass
class NodeLink:
    """One node's link, as the stub sees it."""

    hello: NodeHello
    stream: FrameStream
    said: list[FromNode] = field(default_factory=list)
    up: bool = True


class CatalogStub:
    """The scheduler plugin's end of links, without a catalog behind it."""

    def __init__(
        self,
        *,
        lease_ttl_s: float = 5.0,
        epoch: int = 1,
        port: int = 0,
        tls: TlsFiles | None = None,
    ) -> None:
        self.tls = tls
        self.lease_ttl_s = lease_ttl_s
        self.epoch = Epoch(epoch)
        self.renewing = True
        self.answer_may_drop = True
        self.need_index = False
        self._listener = socket.create_server(("127.0.0.1", port), reuse_port=False)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self.links: list[NodeLink] = []
        self._tasks = itertools.count(1)
        self._stopping = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def target(self) -> LinkTarget:
        """Where nodes find us."""
        return LinkTarget(
            host="127.0.0.1",
            port=self.port,
            cluster=CLUSTER,
            token=TOKEN,
            epoch=self.epoch,
            tls=self.tls,
        )

    def close(self) -> None:
        """End every link and stop listening."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in list(self.links):
            link.stream.close()
        for thread in self._threads:
            thread.join(5.0)

    def link(self, node: NodeId, *, within_s: float = 10.0) -> NodeLink:
        """Return the newest link of a node that is up and has said its inventory."""
        found = eventually(
            lambda: self._find(node), within_s=within_s, what=f"link of {node}"
        )
        assert found is not None
        return found

    def _find(self, node: NodeId) -> NodeLink | None:
        with self._lock:
            for link in reversed(self.links):
                if link.hello.card.node != node or not link.up:
                    continue
                said = any(isinstance(m, Inventory) and not m.more for m in link.said)
                return link if said else None
        return None

    def order(self, node: NodeId, make: Callable[[int], ToNode]) -> int:
        """Give an order that carries a task number."""
        task = next(self._tasks)
        self.link(node).stream.send(make(task))
        return task

    def done(self, node: NodeId, task: int, *, within_s: float = 20.0) -> TaskDone:
        """Wait for a task's end, acknowledge it, and raise its fault."""

        def find() -> TaskDone | None:
            for message in self.heard(node, TaskDone):
                if message.task == task:
                    return message
            return None

        found = eventually(find, within_s=within_s, what=f"task {task} done")
        assert found is not None
        self.link(node).stream.send(TaskSeen(task=task))
        if found.fault is not None:
            raise found.fault.error()
        return found

    def drop(self, node: NodeId, gen: Generation, **more: Any) -> TaskDone:
        """Have a node drop a generation."""
        task = self.order(node, lambda t: DoDrop(task=t, generation=gen, **more))
        return self.done(node, task)

    def start_pull(
        self,
        target: NodeCard,
        gen: Generation,
        nbytes: int,
        *sources: NodeCard,
        deadline_s: float = 20.0,
        tier: Tier = Tier.HOST,
        held_in: Tier = Tier.HOST,
    ) -> int:
        """Have a node begin to pull a generation from others; the task."""
        known = [self.link(card.node).hello.card for card in sources]
        return self.order(
            target.node,
            lambda task: DoPull(
                task=task,
                generation=gen,
                id=ArtifactId(f"a/{gen}"),
                version=Version(1),
                nbytes=nbytes,
                tier=tier,
                sources=tuple(Location(card=card, tier=held_in) for card in known),
                deadline_s=deadline_s,
            ),
        )

    def pull(
        self,
        target: NodeCard,
        gen: Generation,
        nbytes: int,
        *sources: NodeCard,
        **how: Any,
    ) -> TaskDone:
        """Have a node pull a generation from others, and wait for it."""
        task = self.start_pull(target, gen, nbytes, *sources, **how)
        return self.done(target.node, task, within_s=40.0)

    def heard(self, node: NodeId, kind: type[M]) -> list[M]:
        """Return all messages of a kind that a node has ever sent."""
        with self._lock:
            return [
                message
                for link in self.links
                if link.hello.card.node == node
                for message in link.said
                if isinstance(message, kind)
            ]

    # -------------------------------------------------------------- threads
    def _accept(self) -> None:
        while not self._stopping:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        if self.tls is not None:
            sock = server_tls(self.tls).wrap_socket(sock, server_side=True)
        stream = FrameStream(sock, peer="a node", stall_s=10.0)
        link: NodeLink | None = None
        try:
            answerer = Answerer(token=TOKEN, purpose=LINK)
            stream.send(answerer.challenge(stream.receive(Hello).message))
            answerer.check(stream.receive(Proof).message)
            hello = stream.receive(NodeHello).message
            link = NodeLink(hello, stream)
            with self._lock:
                self.links.append(link)
            stream.send(
                NodeWelcome(
                    cluster=CLUSTER,
                    epoch=self.epoch,
                    lease_ttl_s=self.lease_ttl_s,
                    need_index=self.need_index,
                )
            )
            self._hear(link)
        except TensorCastError:
            return
        finally:
            if link is not None:
                link.up = False
            stream.close()

    def _hear(self, link: NodeLink) -> None:
        while not self._stopping:
            message: FromNode = link.stream.receive(FromNode, idle=True).message  # type: ignore[arg-type]
            with self._lock:
                link.said.append(message)
            if isinstance(message, Renew) and self.renewing:
                link.stream.send(Renewed(seq=message.seq, lease_ttl_s=self.lease_ttl_s))


@contextlib.contextmanager
def catalog(**how: Any) -> Iterator[CatalogStub]:
    """Run a catalog stub for the length of a block."""
    stub = CatalogStub(**how)
    try:
        yield stub
    finally:
        stub.close()
