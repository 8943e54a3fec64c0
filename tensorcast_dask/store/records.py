"""How a store describes its replicas, and what it did, to the catalog."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.tensors.checksums import content_digest, decode_sums
from tensorcast_dask.tensors.ids import NodeId
from tensorcast_dask.tensors.messages import ReplicaReady, ReplicaRecord

if TYPE_CHECKING:
    from tensorcast_dask.store.state.replicas import Replica
    from tensorcast_dask.tensors.messages import Tier

__all__ = ["NO_NODE", "Pulled", "digest_of_index", "ready_of", "record_of"]

NO_NODE: Final = NodeId("")


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    """What a pull did."""

    moved_bytes: int
    via: str
    sources: tuple[NodeId, ...]
    #: Bytes from each of them, and in what time; of copies over a line, or on a device.
    shares: tuple[int, ...] = ()
    seconds: float = 0.0
    #: Why a better way was left.
    left: str = ""


def digest_of_index(index: bytes) -> str:
    """Name an encoded index, as `specs.Index.digest` does."""
    return hashlib.blake2b(index, digest_size=16).hexdigest()


def record_of(
    replica: Replica, tier: Tier, *, chunk_bytes: int, with_index: bool = False
) -> ReplicaRecord:
    """Describe a committed copy.

    Parameters
    ----------
    replica : Replica
        What is described.
    tier : Tier
        Of which copy.
    chunk_bytes : int
        How the store cuts segments.
    with_index : bool
        Say the index too; a catalog without its journal needs it.
    """
    content = ""
    if replica.sums or not replica.nbytes:
        sums = decode_sums(replica.sums, nbytes=replica.nbytes, chunk_bytes=chunk_bytes)
        content = content_digest(replica.index_digest, sums, chunk_bytes)
    return ReplicaRecord(
        generation=replica.generation,
        id=replica.id,
        version=replica.version,
        tier=tier,
        nbytes=replica.nbytes,
        index_digest=replica.index_digest,
        content_digest=content,
        published=replica.published,
        labels=replica.labels,
        index=replica.index if with_index else b"",
    )


def ready_of(
    replica: Replica, tier: Tier, *, chunk_bytes: int, shared_with: NodeId = NO_NODE
) -> ReplicaReady:
    """Say that a copy is complete; again when its content has got its name."""
    record = record_of(replica, tier, chunk_bytes=chunk_bytes)
    return ReplicaReady(record=record, shared_with=shared_with)
