from __future__ import annotations

from tensorcast_dask.exceptions import CapacityError, TensorCastError
from tensorcast_dask.tensors.ids import HostId, Incarnation, NodeId
from tensorcast_dask.tensors.messages import (
    Fault,
    Location,
    NodeCard,
    Tier,
    TierUse,
    decode,
    encode,
)


def test_a_fault_brings_the_error_across() -> None:
    error = CapacityError("no room", {"needed_bytes": 5, "tier": "host"})
    found = decode(encode(Fault.of(error)), Fault).error()
    assert type(found) is CapacityError
    assert (found.message, found.data) == (error.message, error.data)


def test_a_fault_of_an_unknown_kind_is_still_an_error() -> None:
    found = Fault(kind="FromTheFuture", message="no").error()
    assert type(found) is TensorCastError


def test_people_read_where_a_replica_is_and_only_what_is_not_zero() -> None:
    card = NodeCard(
        node=NodeId("0123456789abcdef"),
        incarnation=Incarnation(1),
        host=HostId("h"),
        socket="",
        name="w1",
    )
    at = Location(card=card, tier=Tier.HOST)
    assert repr(at) == "<host of <node 'w1' 01234567>>"
    assert repr(TierUse(used_bytes=5)) == "TierUse(used_bytes=5)"
