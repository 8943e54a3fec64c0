"""Making artifacts: the steps that all ways share, and put.

Rules:

1. The order is fixed: name at the catalog, room at the store, bytes, freeze, commit. A
   failure in between gives the name and the room back. A small put asks for its commit
   together with its name: it takes effect when the node announces the bytes.
2. What the caller may change later is copied before a call returns.
3. A name that is taken by equal content is the caller's artifact; by other content it is
   AlreadyExists. Contents are compared by their sums, and only in that case.
4. A creation that was on no disk yet when the scheduler was killed is unknown to its
   successor: the whole put is done again, within the same deadline. The workers went with
   the scheduler, so it waits a while for one to come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from tensorcast_dask.api.actions import on_device
from tensorcast_dask.api.actions.names import check_labels
from tensorcast_dask.api.actions.same import same_content
from tensorcast_dask.api.connection.deadlines import Deadline, deadline
from tensorcast_dask.dataplane import arrays, memory
from tensorcast_dask.dataplane.remote import allow_reader
from tensorcast_dask.exceptions import (
    AbsentError,
    AlreadyExists,
    CapacityError,
    DeadlineExceeded,
    PeerLost,
    TensorCastError,
    UnsupportedPlatform,
)
from tensorcast_dask.tensors.checksums import encode_sums
from tensorcast_dask.tensors.ids import (
    ArtifactId,
    Generation,
    NodeId,
    RequestId,
    check_name,
    epoch_of,
)
from tensorcast_dask.tensors.messages import (
    Abort,
    AbortCreated,
    ArtifactInfo,
    Commit,
    CommitCreated,
    Create,
    Created,
    Done,
    Fill,
    KeepCreating,
    Owner,
    Reserve,
    Reserved,
    Tier,
    Write,
)
from tensorcast_dask.tensors.requests import check_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensorcast_dask.api.connection.core import Core
    from tensorcast_dask.api.connection.operation import Tally
    from tensorcast_dask.dataplane.arrays import Source
    from tensorcast_dask.dataplane.devices import Device
    from tensorcast_dask.dataplane.framing import Frame
    from tensorcast_dask.tensors.specs import Index

logger = logging.getLogger(__name__)

__all__ = [
    "Commitment",
    "creation",
    "finish",
    "give_back",
    "keep_alive",
    "put",
    "reserve",
    "take_name",
]

_THREADS: Final = 2
#: Tensors that are described on the event loop.
_FEW: Final = 16
#: How long to wait for the truth about a commit whose node was lost.
_DOUBT_S: Final = 5.0
_PIECE_BYTES: Final = 16 << 20
_CREATE_TTL_S: Final = 60.0
#: How long a put that is done again waits for a node that can take it, looking so often.
_RETURN_S: Final = 30.0
_AGAIN_S: Final = 0.2


class Commitment(NamedTuple):
    """The `CommitCreated` that a `Create` brings with it, word for word."""

    rid: RequestId = RequestId("")
    deadline_s: float = 0.0


LATER: Final = Commitment()


async def take_name(
    core: Core,
    artifact_id: str,
    index: Index,
    *,
    owner: Owner,
    labels: Mapping[str, str] | None,
    replicas: int,
    version: object,
    node: str,
    limit: Deadline,
    commit: Commitment = LATER,
    device: str = "",
) -> Created:
    """Take (id, version) in the catalog; `commit` as in `messages.Create`."""
    request = Create(
        rid=core.link.next_rid(),
        id=ArtifactId(check_name(artifact_id)),
        nbytes=index.nbytes,
        index=index.encode(),
        index_digest=index.digest(),
        tensors=len(index),
        version=check_version(version),
        owner=owner,
        labels=check_labels(labels),
        node=NodeId(node),
        host=core.host,
        device=device,
        replicas=replicas,
        ttl_s=_CREATE_TTL_S,
        commit=commit.rid,
        commit_deadline_s=commit.deadline_s,
    )
    created = await core.ask(request, Created, limit)
    core.stores.learn([created.node])
    return created


async def put(
    core: Core,
    tensors: Any,
    artifact_id: str,
    *,
    labels: Mapping[str, str] | None,
    replicas: int,
    version: object,
    node: str,
    limit: Deadline,
    tally: Tally,
) -> ArtifactInfo:
    """Copy tensors into the cluster; `tally` is told how far it is."""
    if isinstance(tensors, Mapping) and len(tensors) > _FEW:
        index, sources = await core.in_thread(arrays.canonical, tensors)
    else:  # describing reads no element; a thread costs more
        index, sources = arrays.canonical(tensors)
    if not all(source.flat for source in sources):
        sources = list(await core.in_thread(on_device.adopted, core, sources))
    what = _Put(
        ArtifactId(artifact_id),
        index,
        sources,
        check_labels(labels),
        replicas,
        version,
        node,
        limit,
        tally,
    )
    if index.nbytes > core.stores.small_bytes:
        device = on_device.put_device(sources)
        if device is not None:
            try:
                return await _put(core, replace(what, device=device))
            except (AbsentError, CapacityError) as error:
                logger.info("%r is put to host memory: %s", artifact_id, error)
    return await _put(core, what)


@dataclass(slots=True)
class _Put:
    """What is put, and how."""

    id: ArtifactId
    index: Index
    sources: Sequence[Source]
    labels: dict[str, str]
    replicas: int
    version: object
    node: str
    limit: Deadline
    tally: Tally
    #: On which it lies and is to lie; None for host memory.
    device: Device | None = None

    @property
    def tier(self) -> Tier:
        """Where it is put."""
        return Tier.HOST if self.device is None else Tier.DEVICE

    @property
    def uuid(self) -> str:
        """The device's; "" for host memory."""
        return "" if self.device is None else self.device.id.uuid


async def _put(core: Core, what: _Put) -> ArtifactInfo:
    """Put to host memory, or to the slab of a node that has the device."""
    index, limit = what.index, what.limit
    patient = deadline(0.0)
    what.tally.total = index.nbytes
    while True:
        what.tally.done = 0
        with contextlib.ExitStack() as stack:
            commit = LATER
            if index.nbytes <= core.stores.small_bytes and limit.left_s() > _DOUBT_S:
                rid = stack.enter_context(core.link.foreseen(CommitCreated))
                commit = Commitment(rid, limit.left_s())
            try:
                created = await take_name(
                    core,
                    what.id,
                    index,
                    owner=Owner.SYSTEM,
                    labels=what.labels,
                    replicas=what.replicas,
                    version=what.version,
                    node=what.node,
                    limit=limit,
                    commit=commit,
                    device=what.uuid,
                )
            except AlreadyExists as error:
                sums = partial(_sums, index, what.sources)
                digest = index.digest()
                same = await same_content(core, what.id, digest, sums, error, limit)
                if same is None:
                    raise
                return same
            except CapacityError:
                if not patient.left_s() or not limit.left_s():
                    raise
                await asyncio.sleep(_AGAIN_S)
                continue
            try:
                made = await _bring(core, created, what, commit)
                return msgspec.structs.replace(made, tier=what.tier)
            except AbsentError:
                if not _is_forgotten(core, created):
                    raise
                limit.check("the put was done again after a restart of the scheduler")
                patient = deadline(_RETURN_S)


async def _bring(
    core: Core, created: Created, what: _Put, commit: Commitment
) -> ArtifactInfo:
    """Send the bytes and have the commit answered."""
    try:
        async with creation(core, created):
            await _sent(core, created, what)
            return await finish(core, created, what.limit, commit)
    except PeerLost:
        if commit is LATER:
            raise
        # The node was lost, perhaps after it had announced what it had got.
        with contextlib.suppress(TensorCastError):
            return await finish(core, created, deadline(_DOUBT_S), commit)
        raise


async def _sent(core: Core, created: Created, what: _Put) -> None:
    """Send the bytes; when it ends, in whatever way, the caller's memory is read no more."""
    tally = what.tally
    sending = core.in_thread(_send, core, created, what)
    if tally.total <= core.stores.small_bytes:  # copied before anything is sent
        await sending
        return
    task = asyncio.ensure_future(sending)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        tally.why_not = tally.why_not or DeadlineExceeded("the put was cancelled")
        await asyncio.wait({task})
        task.cancelled() or task.exception()  # looked at, or the event loop complains
        raise


def _is_forgotten(core: Core, created: Created) -> bool:
    """Say whether a later catalog than that which began a creation speaks now (rule 4)."""
    greeting = core.link.greeting
    return greeting is not None and greeting.epoch > epoch_of(created.generation)


def _sums(index: Index, sources: Sequence[Source], chunk_bytes: int) -> bytes:
    content = arrays.RangeReader(sources, index)
    return encode_sums(
        [
            memory.sum_of(content.read(at, min(chunk_bytes, index.nbytes - at)).data)
            for at in range(0, index.nbytes, chunk_bytes)
        ]
    )


@contextlib.asynccontextmanager
async def creation(core: Core, created: Created) -> Any:
    """Keep a creation alive; give it back when the body fails."""
    keepers: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()
    # Most are over before they need any keeping: no task for them.
    later = loop.call_later(
        _CREATE_TTL_S / 4,
        lambda: keepers.append(
            loop.create_task(keep_alive(core, created.generation, at_once=True))
        ),
    )
    try:
        yield
    except BaseException:
        request = AbortCreated(rid=core.link.next_rid(), generation=created.generation)
        with contextlib.suppress(TensorCastError):
            await core.ask(request, type(None), deadline(5.0))
        raise
    finally:
        later.cancel()
        for keeper in keepers:
            keeper.cancel()


async def keep_alive(
    core: Core, generation: Generation, *, at_once: bool = False
) -> None:
    """Tell the catalog from time to time that a creation is alive."""
    while True:
        if not at_once:
            await asyncio.sleep(_CREATE_TTL_S / 3)
        at_once = False
        request = KeepCreating(
            rid=core.link.next_rid(), generation=generation, ttl_s=_CREATE_TTL_S
        )
        with contextlib.suppress(TensorCastError):
            await core.ask(request, type(None), deadline(_CREATE_TTL_S / 3))


async def finish(
    core: Core, created: Created, limit: Deadline, commit: Commitment = LATER
) -> ArtifactInfo:
    """Commit a creation whose bytes are at its node."""
    request = CommitCreated(
        rid=commit.rid or core.link.next_rid(),
        generation=created.generation,
        deadline_s=commit.deadline_s or limit.left_s(),
    )
    info = await core.ask(request, ArtifactInfo, limit)
    if created.node.host == core.host:
        core.stores.remember_place(created.generation, created.node.node)
    return info


# -------------------------------------------------------------------- bytes to the store
def _send(core: Core, created: Created, what: _Put) -> None:
    """Bring the bytes to the node and freeze them there. Blocks."""
    index, limit = what.index, what.limit
    if index.nbytes <= core.stores.small_bytes:
        content = bytearray(index.nbytes)
        arrays.copy_into(what.sources, index, content, threads=1)
        commit = Commit(
            rid=core.link.next_rid(),
            generation=created.generation,
            index=index.encode(),
            inline=True,
            id=what.id,
            version=created.version,
            labels=what.labels,
        )
        core.stores.ask(created.node, commit, Done, limit, payload=content)
        return
    frame = reserve(
        core, created, what.id, index.nbytes, what.labels, limit, device=what.uuid
    )
    try:
        if what.device is not None:
            on_device.fill(frame, what.device, index, what.sources)
            what.tally.add(index.nbytes)
        elif frame.message.mapped:
            _fill_here(core, created, frame, what)
        else:
            _fill_remote(core, created, what)
        commit = Commit(
            rid=core.link.next_rid(),
            generation=created.generation,
            index=index.encode(),
        )
        core.stores.ask(created.node, commit, Done, limit)
    except BaseException:
        give_back(core, created)
        raise


def reserve(
    core: Core,
    created: Created,
    artifact_id: ArtifactId,
    nbytes: int,
    labels: dict[str, str],
    limit: Deadline,
    *,
    device: str = "",
) -> Frame[Reserved]:
    """Ask the node for room, in host memory or on its device.

    The frame brings a description when the room is mapped, or the tag of a slab.
    """
    request = Reserve(
        rid=core.link.next_rid(),
        generation=created.generation,
        id=artifact_id,
        version=created.version,
        nbytes=nbytes,
        deadline_s=limit.left_s(),
        map=not device and created.node.host == core.host,
        labels=labels,
        device=device,
    )
    return core.stores.ask(created.node, request, Reserved, limit)


def give_back(core: Core, created: Created) -> None:
    """Give a reservation back, as far as the node can be reached."""
    request = Abort(rid=core.link.next_rid(), generation=created.generation)
    with contextlib.suppress(TensorCastError):
        core.stores.ask(created.node, request, Done, deadline(5.0))


def _fill_here(
    core: Core, created: Created, frame: Frame[Reserved], what: _Put
) -> None:
    """Fill a segment of this host and close its description.

    Pages that are there: the store reads this process into a map that it keeps. Else, and
    where it may not: by `pwrite`. A map of our own would have to make its page table anew,
    which costs more than the copy (`docs/facts.md`).
    """
    fd = frame.take_fd()
    try:
        spans, others = arrays.spans(what.sources, what.index)
        if frame.message.warm and not others:
            allow_reader(created.node.pid)
            request = Fill(
                rid=core.link.next_rid(), generation=created.generation, spans=spans
            )
            with contextlib.suppress(UnsupportedPlatform):
                core.stores.ask(created.node, request, Done, what.limit)
                what.tally.add(what.index.nbytes)
                return
        arrays.write_into(what.sources, what.index, fd, on_bytes=what.tally.add)
    finally:
        os.close(fd)


def _fill_remote(core: Core, created: Created, what: _Put) -> None:
    """Send the content in chunks over TCP; no more than a few of them are ever copied."""
    content, nbytes = arrays.RangeReader(what.sources, what.index), what.index.nbytes
    step = core.stores.chunk_bytes

    def send(offset: int) -> None:
        request = Write(
            rid=core.link.next_rid(), generation=created.generation, offset=offset
        )
        part = content.read(offset, min(step, nbytes - offset))
        core.stores.ask(created.node, request, Done, what.limit, payload=part.data)
        what.tally.add(part.nbytes)

    memory.run_parallel(
        [partial(send, offset) for offset in range(0, nbytes, step)],
        threads=_THREADS,
    )
