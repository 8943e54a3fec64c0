"""Artifacts in an instance: lent, put, found and read, by way of its node.

Rules:

1. What is lent stays where it is; the store reads it, or asks for what it cannot read. What
   lies on a device is lent by handle, without a copy, or refused.
2. A read is whole and private before it is handed out: mapped, or copied and checked. So
   whoever writes it on into live memory cannot be left with half of it.
3. A put goes through the same steps as a session's; a failure gives name and room back.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.dataplane import arrays
from tensorcast_dask.dataplane.devices.own import OwnDevices
from tensorcast_dask.dataplane.remote import allow_reader
from tensorcast_dask.exceptions import (
    DeviceError,
    InvalidArgument,
    OwnerGone,
    PeerLost,
    RequestError,
    TensorCastError,
    UnsupportedPlatform,
)
from tensorcast_dask.instance.handles import Artifact, Registered
from tensorcast_dask.instance.reads import Reads, left
from tensorcast_dask.tensors.devices import parse_devices
from tensorcast_dask.tensors.ids import ArtifactId, check_name
from tensorcast_dask.tensors.messages import (
    Abort,
    AbortCreated,
    ArtifactInfo,
    BeginLending,
    Commit,
    CommitCreated,
    Create,
    Created,
    Done,
    Fault,
    Fill,
    Lend,
    Mutating,
    Owner,
    Part,
    Release,
    Reserve,
    Reserved,
    Resolve,
    Unlend,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tensorcast_dask.dataplane.arrays import LentSlabs, Source
    from tensorcast_dask.dataplane.devices import Device
    from tensorcast_dask.dataplane.framing import Frame
    from tensorcast_dask.dataplane.reading import Found
    from tensorcast_dask.instance.catalog import CatalogSession
    from tensorcast_dask.instance.line import Line
    from tensorcast_dask.tensors.ids import Generation, NodeId
    from tensorcast_dask.tensors.messages import (
        LendEnded,
        NodeCard,
        PartAsked,
    )
    from tensorcast_dask.tensors.specs import Index

__all__ = ["Artifacts"]

_CREATE_TTL_S: Final = 600.0
_RELEASE_S: Final = 10.0


class Artifacts:
    """What an instance does with artifacts.

    Parameters
    ----------
    line : Line
        To the node's store.
    session : CatalogSession
        To the catalog.
    card : callable
        Gives the node's card of this instant.
    node : NodeId
        What this process is called as a node that lends.
    """

    def __init__(
        self,
        line: Line,
        session: CatalogSession,
        card: Callable[[], NodeCard],
        node: NodeId,
    ) -> None:
        self._node = node
        #: Whose processes share emulated devices; "" is the environment's.
        self.run_dir = ""
        self._reads = Reads(line, session, card)
        #: Until when what is called now may take.
        self.until_s = float("inf")
        self._line = line
        self._session = session
        self._card = card
        self._lock = threading.Lock()
        self._lent: dict[Generation, Registered] = {}

    def _until(self, within_s: float) -> float:
        return min(time.monotonic() + within_s, self.until_s)

    # ------------------------------------------------------------ lending
    def register(
        self,
        tensors: Any,
        id: str,  # noqa: A002
        *,
        labels: Mapping[str, str] | None,
        version: int | str | None,
        copy: bool = False,
        within_s: float,
    ) -> Registered:
        """Lend tensors (rule 1)."""
        index, described = arrays.canonical(tensors)
        settle = partial(arrays.settle, described)
        sources, slabs = self._by_handle(index, described, copy=copy)
        spans, others = arrays.spans(sources, index)
        allow_reader(self._card().pid)
        until_s = self._until(within_s)
        created = self._create(
            index,
            id,
            owner=Owner.CALLER,
            labels=labels,
            version=version,
            until_s=until_s,
        )
        lend = Lend(
            rid=self._session.next_rid(),
            generation=created.generation,
            id=ArtifactId(id),
            version=created.version,
            index=index.encode(),
            spans=spans,
            whole=not others,
            labels=dict(labels or {}),
            device="" if slabs is None else slabs.device,
            slabs=() if slabs is None else slabs.handles,
            slab_spans=b"" if slabs is None else slabs.spans,
        )
        registered = Registered(self, lend, index, sources, settle=settle)
        with self._given_back(created):
            with self._lock:
                self._lent[created.generation] = registered
            self._line.ask(lend, Done, within_s=left(until_s))
            registered.info = self._commit(created, until_s)
        return registered

    def _by_handle(
        self, index: Index, sources: Sequence[Source], *, copy: bool
    ) -> tuple[Sequence[Source], LentSlabs | None]:
        """Make handles of what lies on one device; where it has none, a copy when asked."""
        with contextlib.suppress(RequestError, DeviceError):  # its library reads it
            sources = arrays.adopted(sources, self._device)
        try:
            return sources, arrays.lent_slabs(index, sources)
        except RequestError:
            if not copy:
                raise
        return arrays.staged(sources, index), None

    def _device(self, name: str) -> Device:
        try:
            spec = parse_devices(os.environ.get("TENSORCAST_DEVICE") or None)
        except ValueError as error:
            message = f"TENSORCAST_DEVICE {error}"
            raise InvalidArgument(message) from error
        return OwnDevices(spec, self.run_dir).open(name).device

    def lends(self, registered: Registered) -> bool:
        """Whether it is lent still."""
        return self._lent.get(registered.lend.generation) is registered

    def mutating(self, registered: Registered) -> None:
        """Tell the store that the content changes, or has changed."""
        word = Mutating(
            rid=self._session.next_rid(),
            generation=registered.lend.generation,
            stamp=registered.stamp,
        )
        with contextlib.suppress(PeerLost):  # it is told anew with the next attachment
            self._line.ask(word, Done, within_s=30.0)

    def release(self, registered: Registered) -> None:
        """Lend it no more: the catalog ends it, and its name is free."""
        generation = registered.lend.generation
        if not self._forget(generation):
            return
        release = Release(
            rid=self._session.next_rid(), generation=generation, deadline_s=_RELEASE_S
        )
        try:
            self._session.ask(release, type(None), within_s=_RELEASE_S, change=True)
        except TensorCastError:
            self._unlend(generation)

    def _forget(self, generation: Generation) -> bool:
        with self._lock:
            return self._lent.pop(generation, None) is not None

    def _unlend(self, generation: Generation) -> None:
        """Have the store serve it no more: for the catalog it is lost."""
        unlend = Unlend(rid=self._session.next_rid(), generation=generation)
        with contextlib.suppress(TensorCastError):
            self._line.ask(unlend, Done, within_s=_RELEASE_S)

    @contextlib.contextmanager
    def fence(self) -> Iterator[None]:
        """Be inside the fences of all that is lent."""
        with contextlib.ExitStack() as stack:
            for registered in list(self._lent.values()):
                stack.enter_context(registered.mutate())
            yield

    def end(self) -> None:
        """Release everything."""
        for generation in list(self._lent):
            if self._forget(generation):
                self._unlend(generation)

    # ------------------------------------------------------------ the line's thread
    def attached(self) -> None:
        """Tell a store that has us anew what we lend."""
        for registered in list(self._lent.values()):
            allow_reader(self._card().pid)
            self._line.ask(registered.lend, Done, within_s=30.0)
            self.mutating(registered)

    def part(self, asked: PartAsked) -> None:
        """Give bytes that the store cannot read."""
        registered = self._lent.get(asked.generation)
        part, room = Part(number=asked.number), memoryview(bytearray(asked.nbytes))
        if registered is None:
            error = OwnerGone("its owner has released it")
            part, room = Part(number=asked.number, fault=Fault.of(error)), room[:0]
        else:
            registered.read(asked.offset, room)
        with contextlib.suppress(PeerLost):  # the end of the line is seen by its thread
            self._line.tell(part, payload=room)

    def ended(self, message: LendEnded) -> None:
        """Take the catalog's word that something is lent no more."""
        with self._lock:
            self._lent.pop(message.generation, None)

    # ------------------------------------------------------------ putting
    def put(
        self,
        tensors: Any,
        id: str,  # noqa: A002
        *,
        labels: Mapping[str, str] | None,
        version: int | str | None,
        within_s: float,
    ) -> Artifact:
        """Copy tensors into the node (rule 3)."""
        index, sources = arrays.canonical(tensors)
        until_s = self._until(within_s)
        created = self._create(
            index,
            id,
            owner=Owner.SYSTEM,
            labels=labels,
            version=version,
            until_s=until_s,
        )
        with self._given_back(created):
            what = index, sources
            self._send(created, ArtifactId(id), what, dict(labels or {}), until_s)
            return Artifact(self._commit(created, until_s), self)

    def _send(
        self,
        created: Created,
        name: ArtifactId,
        what: tuple[Index, Sequence[Source]],
        labels: dict[str, str],
        until_s: float,
    ) -> None:
        index, sources = what
        small = index.nbytes <= self._line.small_bytes
        commit = Commit(
            rid=self._session.next_rid(),
            generation=created.generation,
            index=index.encode(),
            inline=small,
            id=name if small else ArtifactId(""),
            version=created.version,
            labels=labels,
        )
        if small:
            content = bytearray(index.nbytes)
            arrays.copy_into(sources, index, content, threads=1)
            self._line.ask(commit, Done, payload=content, within_s=left(until_s))
            return
        reserve = Reserve(
            rid=self._session.next_rid(),
            generation=created.generation,
            id=name,
            version=created.version,
            nbytes=index.nbytes,
            deadline_s=left(until_s),
            labels=labels,
        )
        frame = self._line.ask(reserve, Reserved, within_s=left(until_s))
        self._fill(created, frame, index, sources, until_s)
        self._line.ask(commit, Done, within_s=left(until_s))

    def _fill(
        self,
        created: Created,
        frame: Frame[Reserved],
        index: Index,
        sources: Sequence[Source],
        until_s: float,
    ) -> None:
        fd = frame.take_fd()
        try:
            spans, others = arrays.spans(sources, index)
            if frame.message.warm and not others:
                allow_reader(self._card().pid)
                fill = Fill(
                    rid=self._session.next_rid(),
                    generation=created.generation,
                    spans=spans,
                )
                with contextlib.suppress(UnsupportedPlatform):
                    self._line.ask(fill, Done, within_s=left(until_s))
                    return
            arrays.write_into(sources, index, fd)
        finally:
            os.close(fd)

    def _create(
        self,
        index: Index,
        id: str,  # noqa: A002
        *,
        owner: Owner,
        labels: Mapping[str, str] | None,
        version: int | str | None,
        until_s: float,
    ) -> Created:
        node = self._card().node
        if owner is Owner.CALLER:
            node = self._lender(until_s)
        request = Create(
            rid=self._session.next_rid(),
            id=ArtifactId(check_name(id)),
            nbytes=index.nbytes,
            index=index.encode(),
            index_digest=index.digest(),
            tensors=len(index),
            version=_number(version),
            owner=owner,
            labels=dict(labels or {}),
            node=node,
            host=self._card().host,
            ttl_s=_CREATE_TTL_S,
        )
        return self._session.ask(request, Created, within_s=left(until_s), change=True)

    def _lender(self, until_s: float) -> NodeId:
        """Have this process be a node of the catalog, which its store keeps."""
        request = BeginLending(rid=self._session.next_rid())
        self._line.ask(request, Done, within_s=left(until_s))
        return self._node

    def _commit(self, created: Created, until_s: float) -> ArtifactInfo:
        request = CommitCreated(
            rid=self._session.next_rid(),
            generation=created.generation,
            deadline_s=left(until_s),
        )
        return self._session.ask(
            request, ArtifactInfo, within_s=left(until_s), change=True
        )

    @contextlib.contextmanager
    def _given_back(self, created: Created) -> Iterator[None]:
        try:
            yield
        except BaseException:
            generation = created.generation
            with self._lock:
                lent = self._lent.pop(generation, None)
            with contextlib.suppress(TensorCastError):
                rid = self._session.next_rid()
                back = (
                    Unlend(rid=rid, generation=generation)
                    if lent is not None
                    else Abort(rid=rid, generation=generation)
                )
                self._line.ask(back, Done, within_s=5.0)
            with contextlib.suppress(TensorCastError):
                abort = AbortCreated(
                    rid=self._session.next_rid(), generation=generation
                )
                self._session.ask(abort, type(None), within_s=5.0)
            raise

    # ------------------------------------------------------------ finding and reading
    def find(self, id: str, *, version: int, within_s: float) -> Artifact:  # noqa: A002
        """Find an artifact by its id."""
        request = Resolve(
            rid=self._session.next_rid(), id=ArtifactId(id), version=version
        )
        return Artifact(
            self._session.ask(request, ArtifactInfo, within_s=within_s), self
        )

    def read(self, info: ArtifactInfo, *, within_s: float) -> Found:
        """Give an artifact's bytes, private and complete (rule 2)."""
        return self._reads.read(info, self._until(within_s))


def _number(version: int | str | None) -> int:
    if version is None:
        return 0
    if version == "next":
        return -1
    if isinstance(version, int) and not isinstance(version, bool) and version > 0:
        return version
    message = f"version must be a positive whole number or 'next', not {version!r}"
    raise InvalidArgument(message)
