"""Whether the artifact that holds a name has the content that was to be put there.

Rules:

1. Equal means equal index and equal sums of every chunk, as a holder tells them.
2. What cannot be compared now (still being made, lost, no holder answers) is not equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorcast_dask.api.actions.names import locate
from tensorcast_dask.exceptions import (
    AbsentError,
    AlreadyExists,
    PeerLost,
    WrongPeer,
)
from tensorcast_dask.tensors.ids import ArtifactId, Generation
from tensorcast_dask.tensors.messages import (
    ArtifactInfo,
    ChunkMap,
    Resolve,
    SumsAsked,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.api.connection.core import Core
    from tensorcast_dask.api.connection.deadlines import Deadline

__all__ = ["same_content"]


async def same_content(
    core: Core,
    artifact_id: str,
    index_digest: str,
    sums: Callable[[int], bytes],
    taken: AlreadyExists,
    limit: Deadline,
) -> ArtifactInfo | None:
    """Give the artifact that holds the name, when its content is the caller's.

    Parameters
    ----------
    core : Core
        The session.
    artifact_id, index_digest
        What was to be made.
    sums : callable
        Gives the encoded sums of the caller's content by chunks of so many bytes. Blocks.
    taken : AlreadyExists
        The catalog's refusal.
    limit : Deadline
        For all of it.
    """
    facts = taken.data
    if facts.get("index_digest") != index_digest or "generation" not in facts:
        return None
    generation = Generation(int(facts["generation"] or 0))
    try:
        locations = await locate(core, generation, limit)
    except AbsentError:
        return None
    for location in locations:
        request = SumsAsked(rid=core.link.next_rid(), generation=generation)
        try:
            frame = await core.in_thread(
                core.stores.ask, location.card, request, ChunkMap, limit
            )
        except (AbsentError, PeerLost, WrongPeer):
            continue
        there = frame.message
        if await core.in_thread(sums, there.chunk_bytes) != there.sums:
            return None
        resolve = Resolve(
            rid=core.link.next_rid(),
            id=ArtifactId(artifact_id),
            version=int(facts.get("version") or 0),
        )
        return await core.ask(resolve, ArtifactInfo, limit)
    return None
