"""Artifacts that are built where they will live.

Rules:

1. The caller writes into the segment itself; `commit` copies nothing. At the same addresses
   its writable map gives way to a private one, so its arrays stay valid and become its own.
2. A draft that is not committed is given back: by `abort`, at the end of a `with` block that
   raised, or when its session ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

from tensorcast_dask.api.connection.deadlines import Deadline, deadline
from tensorcast_dask.dataplane import arrays
from tensorcast_dask.dataplane.maps import WritableMap
from tensorcast_dask.exceptions import (
    InvalidArgument,
    TensorCastError,
    UnsupportedPlatform,
)
from tensorcast_dask.tensors.dtypes import dtype as dtype_named
from tensorcast_dask.tensors.ids import (
    ArtifactId,
    RequestId,
)
from tensorcast_dask.tensors.messages import (
    AbortCreated,
    Commit,
    Created,
    Done,
    Open,
    Opened,
    Owner,
)
from tensorcast_dask.tensors.specs import Index, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tensorcast_dask.api.connection.core import Core

from tensorcast_dask.api.actions.names import check_labels, warn_of_shortfall
from tensorcast_dask.api.actions.puts import (
    finish,
    give_back,
    keep_alive,
    reserve,
    take_name,
)

__all__ = ["Draft", "create", "index_of"]


def index_of(spec: Any) -> Index:
    """Give the index that a caller's `spec` describes.

    Raises
    ------
    InvalidArgument, UnsupportedDtype, InvalidName
    """
    if not hasattr(spec, "items"):
        message = "spec must map tensor names to (shape, dtype) or to arrays like them"
        raise InvalidArgument(message)
    specs: list[TensorSpec] = []
    for name, value in spec.items():
        if isinstance(value, TensorSpec):
            specs.append(TensorSpec(name, value.dtype, value.shape))
        elif isinstance(value, tuple) and len(value) == 2:
            shape, kind = value
            text = (
                str(kind).removeprefix("torch.")
                if not isinstance(kind, type)
                else kind.__name__
            )
            specs.append(TensorSpec(name, dtype_named(text), _sizes(name, shape)))
        else:
            (source,) = arrays.describe({name: value})
            specs.append(TensorSpec(name, source.dtype, source.shape))
    return Index.of(specs)


def _sizes(name: str, shape: Any) -> tuple[int, ...]:
    try:
        sizes = shape if isinstance(shape, Iterable) else (shape,)
        return tuple(map(operator.index, sizes))
    except TypeError as error:
        message = f"the shape of {name!r} must be integers, not {shape!r}"
        raise InvalidArgument(message) from error


class Draft:
    """Tensors of the caller's own that become an artifact without a copy.

    After `commit` the tensors stay valid and are the caller's private ones.
    """

    def __init__(
        self,
        session: Any,
        created: Created,
        index: Index,
        *,
        area: WritableMap | None,
        inline: Commit,
    ) -> None:
        self._session = session
        self._created = created
        self._index = index
        #: Small ones have none: they are built in memory of the caller's and sent whole.
        self._area = area
        self._buffer = (
            area.buffer if area is not None else memoryview(bytearray(index.nbytes))
        )
        self._inline = inline
        self._keeper: asyncio.Task[None] | None = None
        self.state = "open"

    @property
    def generation(self) -> int:
        """Identity of the version that is being made."""
        return self._created.generation

    def tensors(self, *, framework: str | None = None) -> dict[str, Any]:
        """Give writable arrays inside the segment, by name, with whatever bytes it has."""
        return arrays.materialise(self._buffer, self._index, framework=framework)

    def commit(self, *, deadline: float | None = None) -> Any:
        """Freeze the content and make the version exist; copies nothing.

        Returns
        -------
        Artifact
        """
        core = self._session._core  # noqa: SLF001 - a part of the session
        return core.call(lambda: self._commit(core.deadline(deadline)))

    async def _commit(self, limit: Deadline) -> Any:
        from tensorcast_dask.api.artifact import Artifact

        if self.state != "open":
            message = f"this draft is {self.state}; create another"
            raise InvalidArgument(message)
        core = self._session._core  # noqa: SLF001
        self.state = "committing"
        try:
            await core.in_thread(self._freeze, limit)
            info = await finish(core, self._created, limit)
        except BaseException:
            await self._abort()
            raise
        self.state = "committed"
        self._stop()
        warn_of_shortfall(info)
        return Artifact(info, self._session)

    def _freeze(self, limit: Deadline) -> None:
        core = self._session._core  # noqa: SLF001
        card, generation = self._created.node, self._created.generation
        arrays.zero_gaps(self._buffer, self._index)
        if self._area is None:
            core.stores.ask(
                card, self._inline, Done, limit, payload=bytes(self._buffer)
            )
            return
        self._area.reserve()
        rid: RequestId = core.link.next_rid()
        commit = Commit(rid=rid, generation=generation, index=self._index.encode())
        core.stores.ask(card, commit, Done, limit)
        request = Open(
            rid=core.link.next_rid(), generation=generation, deadline_s=limit.left_s()
        )
        self._area.attach_private(
            core.stores.ask(card, request, Opened, limit).take_fd()
        )

    def abort(self) -> Any:
        """Give the name and the room back; the arrays become empty memory of the caller's."""
        return self._session._core.call(self._abort)  # noqa: SLF001

    async def _abort(self) -> None:
        if self.state in ("committed", "aborted"):
            return
        self.state = "aborted"
        self._stop()
        core = self._session._core  # noqa: SLF001
        if self._area is not None:
            self._area.abandon()
        await core.in_thread(give_back, core, self._created)
        request = AbortCreated(
            rid=core.link.next_rid(), generation=self._created.generation
        )
        with contextlib.suppress(TensorCastError):
            await core.ask(request, type(None), deadline(5.0))

    def __repr__(self) -> str:
        made, index = self._created, self._index
        what = f"{self._inline.id!r} v{made.version} {self.state}"
        return f"<Draft {what}, {len(index)} tensors, {index.nbytes:,} bytes>"

    def _stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.commit() if kind is None and self.state == "open" else self.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        await (self.commit() if kind is None and self.state == "open" else self.abort())


async def create(
    session: Any,
    spec: Any,
    artifact_id: str,
    *,
    labels: Mapping[str, str] | None,
    replicas: int,
    version: object,
    node: str,
    limit: Deadline,
) -> Draft:
    """Make room for tensors that the caller builds in place."""
    core = session._core  # noqa: SLF001 - a part of the session
    index = index_of(spec)
    created = await take_name(
        core,
        artifact_id,
        index,
        owner=Owner.SYSTEM,
        labels=labels,
        replicas=replicas,
        version=version,
        node=node,
        limit=limit,
    )
    inline = Commit(
        rid=core.link.next_rid(),
        generation=created.generation,
        index=index.encode(),
        inline=True,
        id=ArtifactId(artifact_id),
        version=created.version,
        labels=check_labels(labels),
    )
    small = index.nbytes <= core.stores.small_bytes
    try:
        if created.node.host != core.host and not small:
            message = (
                "create needs a node on this host; use put, or create where a node is"
            )
            raise UnsupportedPlatform(message)  # noqa: TRY301 - given back below
        area = (
            None
            if small
            else await core.in_thread(_map_reservation, core, created, inline, limit)
        )
    except BaseException:
        request = AbortCreated(rid=core.link.next_rid(), generation=created.generation)
        with contextlib.suppress(TensorCastError):
            await core.ask(request, type(None), deadline(5.0))
        raise
    draft = Draft(session, created, index, area=area, inline=inline)
    draft._keeper = asyncio.create_task(keep_alive(core, created.generation))  # noqa: SLF001
    return draft


def _map_reservation(
    core: Core, created: Created, what: Commit, limit: Deadline
) -> WritableMap:
    nbytes = Index.decode(what.index).nbytes
    frame = reserve(core, created, what.id, nbytes, what.labels, limit)
    if not frame.message.mapped:
        give_back(core, created)
        message = "the store gave no memory that can be mapped; use put"
        raise UnsupportedPlatform(message)
    return WritableMap(frame.take_fd(), nbytes)
