"""Replicas on another node of this host: shared, not copied.

Rules:

1. The other node's unix socket must answer as that node: same host is proven.
2. Its read-only description becomes ours; no byte is copied, none is counted as used here.
3. The memory lives as long as any of the two holds it, whatever the other does.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from tensorcast_dask.dataplane.transports.base import Context, open_source
from tensorcast_dask.exceptions import TensorCastError
from tensorcast_dask.store.core import check_filled, now_s
from tensorcast_dask.store.records import Pulled, digest_of_index
from tensorcast_dask.tensors.ids import Generation, Incarnation
from tensorcast_dask.tensors.messages import Location

if TYPE_CHECKING:
    from tensorcast_dask.store.core import Core
    from tensorcast_dask.store.state.replicas import Wanted

__all__ = ["anyone", "share"]


def anyone(location: Location) -> Location:
    """Take the node in whatever incarnation: bytes are named by their generation."""
    card = msgspec.structs.replace(location.card, incarnation=Incarnation(0))
    return Location(card=card, tier=location.tier)


def share(
    core: Core,
    wanted: Wanted,
    location: Location,
    *,
    source_generation: Generation,
    context: Context,
) -> Pulled | None:
    """Take the memory of another node of this host in; None where it is not mapped.

    Raises
    ------
    TensorCastError
        When the node does not answer, or has not got it; nothing has changed.
    """
    source = open_source(
        anyone(location), source_generation, scheme="shm", context=context
    )
    try:
        chunk_map = source.chunk_map()
        fd = source.take_fd()
    finally:
        source.close()
    if fd is None:
        return None
    try:
        until_s = context.until_s or now_s() + 1.0
        filling = core.reserve(
            msgspec.structs.replace(wanted, shared=True), until_s=until_s
        )
    except TensorCastError:
        os.close(fd)
        raise
    try:
        with core.lock:  # from here on a drop finds it
            core.shelf.lend(filling.copy.segment, fd, wanted.nbytes)
            check_filled(core.table, wanted.generation, filling.copy)
        core.commit(
            wanted.generation,
            wanted.tier,
            index=chunk_map.index,
            index_digest=digest_of_index(chunk_map.index),
            sums=chunk_map.sums,
            cut_bytes=chunk_map.chunk_bytes,
            shared_with=location.card.node,
        )
    except TensorCastError:
        core.abort(wanted.generation, wanted.tier)
        core.shelf.close(filling.copy.segment)
        raise
    return Pulled(moved_bytes=0, via="shm", sources=(location.card.node,))
