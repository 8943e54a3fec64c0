"""Artifacts whose memory stays the caller's."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tensorcast_dask.api.actions import on_device
from tensorcast_dask.api.actions.names import check_labels
from tensorcast_dask.api.actions.puts import creation, finish, take_name
from tensorcast_dask.dataplane import arrays
from tensorcast_dask.exceptions import RequestError
from tensorcast_dask.tensors.ids import (
    ArtifactId,
)
from tensorcast_dask.tensors.messages import (
    ArtifactInfo,
    Owner,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tensorcast_dask.api.connection.core import Core
    from tensorcast_dask.api.connection.deadlines import Deadline
    from tensorcast_dask.instance.register import Registration

__all__ = ["register"]


async def register(
    core: Core,
    tensors: Any,
    artifact_id: str,
    *,
    labels: Mapping[str, str] | None,
    version: object,
    verify: bool,
    copy: bool,
    limit: Deadline,
) -> tuple[ArtifactInfo, Any]:
    """Lend tensors: this process serves them.

    Raises
    ------
    UnsupportedPlatform, Unimplemented
        When they lie on a device and cannot be lent by handle, and are not to be copied.
    """
    index, sources = await core.in_thread(arrays.canonical, tensors)
    settle = partial(arrays.settle, sources)
    sources = list(await core.in_thread(on_device.adopted, core, sources))
    slabs = None
    try:
        slabs = await core.in_thread(arrays.lent_slabs, index, sources)
    except RequestError:
        if not copy:
            raise
        sources = await core.in_thread(arrays.staged, sources, index)
    server = await core.in_thread(core.lender)
    created = await take_name(
        core,
        artifact_id,
        index,
        owner=Owner.CALLER,
        labels=labels,
        replicas=1,
        version=version,
        node=server.card.node,
        limit=limit,
    )
    async with creation(core, created):
        registration: Registration = await core.in_thread(
            server.lend,
            generation=created.generation,
            id=ArtifactId(artifact_id),
            version=created.version,
            index=index,
            sources=sources,
            labels=check_labels(labels),
            verify=verify,
            slabs=slabs,
            settle=settle,
        )
        try:
            info = await finish(core, created, limit)
        except BaseException:
            await core.in_thread(registration.close)
            raise
    return info, registration
