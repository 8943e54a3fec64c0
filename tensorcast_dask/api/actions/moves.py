"""Actions that move bytes between nodes and files; the stores do the moving."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorcast_dask.api.actions.names import check_labels
from tensorcast_dask.api.actions.same import same_content
from tensorcast_dask.dataplane.files.model import open_model
from tensorcast_dask.dataplane.files.reading import segment_sums
from tensorcast_dask.exceptions import (
    AbsentError,
    AlreadyExists,
    FileError,
    InvalidArgument,
)
from tensorcast_dask.tensors.devices import is_uuid
from tensorcast_dask.tensors.ids import ArtifactId, Generation, NodeId, check_name
from tensorcast_dask.tensors.messages import (
    ArtifactInfo,
    Drained,
    DrainNode,
    Ensure,
    LoadFile,
    Migrate,
    Moved,
    Release,
    SaveFile,
    Tier,
)
from tensorcast_dask.tensors.quantities import parse_bytes
from tensorcast_dask.tensors.requests import check_version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tensorcast_dask.api.connection.core import Core
    from tensorcast_dask.api.connection.deadlines import Deadline
    from tensorcast_dask.api.connection.operation import Operation

__all__ = [
    "Where",
    "absolute",
    "check_shard",
    "drain",
    "ensure",
    "load",
    "migrate",
    "release",
    "same_file",
    "save",
    "where",
]


class Where(NamedTuple):
    """What `device=` names: a tier, and where it names one device that."""

    tier: Tier = Tier.HOST
    #: UUID; "" = any.
    device: str = ""


def where(core: Core, device: object) -> Where:
    """Read `device=`: a tier, or one device of this process.

    Raises
    ------
    InvalidArgument
        When it names neither.
    UnsupportedPlatform, DeviceError
        When this process has no such device; it says what is missing.
    """
    tiers = [str(tier) for tier in Tier]
    name = str(device)
    if name in tiers:
        return Where(Tier(name))
    if not isinstance(device, str) or not (is_uuid(name) or ":" in name):
        message = (
            f"device must be one of {', '.join(tiers)}, or a device such as "
            f"cuda:0, not {device!r}"
        )
        raise InvalidArgument(message)
    return Where(Tier.DEVICE, core.devices.uuid(name))


def check_shard(max_shard_bytes: object) -> int:
    """Give the length of a shard; text such as "5 GB" is read.

    Raises
    ------
    InvalidArgument
        When it is none.
    """
    if type(max_shard_bytes) is int and max_shard_bytes >= 0:
        return max_shard_bytes
    with contextlib.suppress(ValueError):
        if isinstance(max_shard_bytes, str):
            return parse_bytes(max_shard_bytes)
    message = (
        "max_shard_bytes must be bytes such as 1024 or '5 GB', or 0 for one file, "
        f"not {max_shard_bytes!r}"
    )
    raise InvalidArgument(message)


def absolute(path: str | Path) -> str:
    """Give the path as another process finds it; its last slash says that it is a folder."""
    text = os.fspath(path)
    if text == "":
        message = "an empty path names no file; give the path of a file or folder"
        raise InvalidArgument(message)
    return text if Path(text).is_absolute() else f"{Path.cwd()}/{text}"


async def ensure(
    core: Core,
    operation: Operation[Any],
    generation: int,
    *,
    node: str,
    where: Where,
    why: str,
    limit: Deadline,
) -> Moved:
    """Bring a replica to a node ("" = one of this host, else any)."""
    request = Ensure(
        rid=core.link.next_rid(),
        generation=Generation(generation),
        node=NodeId(node),
        deadline_s=limit.left_s(),
        tier=where.tier,
        host=core.host,
        why=why,
        device=where.device,
    )
    return await core.ask(request, Moved, limit, operation=operation)


async def migrate(
    core: Core,
    operation: Operation[Any],
    generation: int,
    *,
    source: str,
    node: str,
    where: Where,
    limit: Deadline,
) -> Moved:
    """Copy, verify, switch the catalog, free the source."""
    request = Migrate(
        rid=core.link.next_rid(),
        generation=Generation(generation),
        source=NodeId(source),
        node=NodeId(node),
        deadline_s=limit.left_s(),
        tier=where.tier,
        device=where.device,
    )
    return await core.ask(request, Moved, limit, operation=operation)


async def release(
    core: Core,
    operation: Operation[Any],
    generation: int,
    *,
    node: str,
    limit: Deadline,
) -> None:
    """Drop one node's replica, or end a caller's lease."""
    request = Release(
        rid=core.link.next_rid(),
        generation=Generation(generation),
        node=NodeId(node),
        deadline_s=limit.left_s(),
    )
    await core.ask(request, type(None), limit, operation=operation)


async def load(
    core: Core,
    operation: Operation[Any],
    path: str | Path,
    artifact_id: str,
    *,
    version: object,
    node: str,
    labels: Mapping[str, str] | None,
    replicas: int,
    limit: Deadline,
) -> ArtifactInfo:
    """Import a model file (or directory, or index of shards)."""
    request = LoadFile(
        rid=core.link.next_rid(),
        id=ArtifactId(check_name(artifact_id)),
        path=absolute(path),
        deadline_s=limit.left_s(),
        version=check_version(version),
        node=NodeId(node),
        host=core.host,
        labels=check_labels(labels),
        replicas=replicas,
    )
    try:
        return await core.ask(request, ArtifactInfo, limit, operation=operation)
    except AlreadyExists as error:
        same = await same_file(core, request, error, limit)
        if same is None:
            raise
        operation.note = "it was there already, with the same content"
        return same


async def same_file(
    core: Core, request: LoadFile, taken: AlreadyExists, limit: Deadline
) -> ArtifactInfo | None:
    """Give the artifact that holds the name, when a file that is here has its content."""
    try:
        model = await core.in_thread(open_model, request.path)
    except (AbsentError, FileError):
        return None  # only the node has it
    with model:
        digest = model.index.digest()
        sums = partial(segment_sums, model)
        return await same_content(core, request.id, digest, sums, taken, limit)


async def save(
    core: Core,
    operation: Operation[Any],
    generation: int,
    path: str | Path,
    *,
    node: str,
    metadata: Mapping[str, str] | None,
    max_shard_bytes: int,
    limit: Deadline,
) -> Moved:
    """Write a version as safetensors."""
    request = SaveFile(
        rid=core.link.next_rid(),
        generation=Generation(generation),
        path=absolute(path),
        deadline_s=limit.left_s(),
        node=NodeId(node),
        host=core.host,
        metadata=check_labels(metadata),
        max_shard_bytes=max_shard_bytes,
    )
    return await core.ask(request, Moved, limit, operation=operation)


async def drain(
    core: Core, operation: Operation[Any], node: str, *, end: bool, limit: Deadline
) -> Drained:
    """Move what a node alone holds to others."""
    request = DrainNode(
        rid=core.link.next_rid(), node=NodeId(node), deadline_s=limit.left_s(), end=end
    )
    return await core.ask(request, Drained, limit, operation=operation)
