"""Artifacts and Dask tasks: puts of Futures, tasks beside the bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distributed import Future

from tensorcast_dask.api.actions import names
from tensorcast_dask.api.artifact import Artifact
from tensorcast_dask.exceptions import UnsupportedPlatform

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.api.connection.core import Core
    from tensorcast_dask.api.connection.deadlines import Deadline
    from tensorcast_dask.tensors.messages import ArtifactInfo

__all__ = ["holds_future", "put_here", "put_where_it_lies", "submit"]


def holds_future(tensors: Any) -> bool:
    """Whether a tensor, or one of a mapping of tensors, is a Dask Future."""
    if isinstance(tensors, Future):
        return True
    # Not by `hasattr`: a dense torch tensor has a `values` that raises.
    return isinstance(tensors, Mapping) and any(
        isinstance(v, Future) for v in tensors.values()
    )


def put_here(
    tensors: Any, artifact_id: str, options: Mapping[str, Any]
) -> ArtifactInfo:
    """Put, as a task on the worker that has the tensors."""
    from tensorcast_dask.api.current import current_session

    info: ArtifactInfo = current_session().put(tensors, artifact_id, **options).info
    return info


async def put_where_it_lies(
    core: Core, tensors: Any, artifact_id: str, options: dict[str, Any], limit: Deadline
) -> ArtifactInfo:
    """Send the put to a worker that holds the Future's result."""
    client = _client(core)
    values = [tensors] if isinstance(tensors, Future) else list(tensors.values())
    futures = [value for value in values if isinstance(value, Future)]
    for future in futures:
        await future  # the task's own error is the caller's
    holders = await client.who_has(futures)
    places = Counter(address for addresses in holders.values() for address in addresses)
    task = client.submit(
        put_here,
        tensors,
        artifact_id,
        {**options, "deadline": limit.left_s()},
        workers=[address for address, _ in places.most_common(1)],
        pure=False,
    )
    info: ArtifactInfo = await task
    return info


def _client(core: Core) -> Any:
    if core.client is None:
        message = "this needs a Dask client; call it from the program, not from a task"
        raise UnsupportedPlatform(message)
    return core.client


def submit(
    core: Core,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """`client.submit` to a worker whose node holds the artifacts among the arguments."""
    client = _client(core)
    found = [
        value for value in (*args, *kwargs.values()) if isinstance(value, Artifact)
    ]

    async def work() -> Any:
        options = dict(kwargs)
        if found and "workers" not in kwargs:
            holders = await _holders(core, found)
            if holders:
                options |= {"workers": sorted(holders), "allow_other_workers": True}
        return client.submit(function, *args, **options)

    return core.call(work)


async def _holders(core: Core, found: list[Artifact]) -> set[str]:
    """Workers beside a replica: of all artifacts if there are such, else of the first ones."""
    holders: set[str] = set()
    for artifact in found:
        places = await names.locate(core, artifact.generation, core.deadline(None))
        workers = {at.card.worker for at in places if at.card.worker}
        holders = holders & workers or holders or workers
    return holders
