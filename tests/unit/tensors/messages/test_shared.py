from __future__ import annotations

from tensorcast_dask.exceptions import CapacityError, TensorCastError
from tensorcast_dask.tensors.messages import Fault, decode, encode


def test_a_fault_brings_the_error_across() -> None:
    error = CapacityError("no room", {"needed_bytes": 5, "tier": "host"})
    found = decode(encode(Fault.of(error)), Fault).error()
    assert type(found) is CapacityError
    assert (found.message, found.data) == (error.message, error.data)


def test_a_fault_of_an_unknown_kind_is_still_an_error() -> None:
    found = Fault(kind="FromTheFuture", message="no").error()
    assert type(found) is TensorCastError
