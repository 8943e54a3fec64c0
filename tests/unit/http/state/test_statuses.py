"""Which HTTP status an error has."""

from __future__ import annotations

import pytest

from tensorcast_dask import exceptions as errors
from tensorcast_dask.http.state.shapes import Error, Failed
from tensorcast_dask.http.state.statuses import RefusedError, answer_of, status_of

KINDS = [getattr(errors, name) for name in errors.__all__ if name[0].isupper()]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_status_that_says_whose_fault_it_is(
    kind: type[errors.TensorCastError],
) -> None:
    status = status_of(kind("why"))
    mine = (
        issubclass(
            kind,
            errors.RequestError
            | errors.AbsentError
            | errors.OwnershipError
            | errors.FileError,
        )
        or kind is errors.QuotaExceeded
    )
    unable = issubclass(kind, errors.Unimplemented | errors.UnsupportedPlatform)
    assert status // 100 == (4 if mine and not unable else 5)


def test_statuses_that_programs_rely_on() -> None:
    assert {
        kind.__name__: status_of(kind("why"))
        for kind in (
            errors.InvalidArgument,
            errors.NotFound,
            errors.Mismatch,
            errors.Gone,
            errors.QuotaExceeded,
            errors.CapacityError,
            errors.CatalogUnavailable,
            errors.DeadlineExceeded,
        )
    } == {
        "InvalidArgument": 400,
        "NotFound": 404,
        "Mismatch": 409,
        "Gone": 410,
        "QuotaExceeded": 429,
        "CapacityError": 507,
        "CatalogUnavailable": 503,
        "DeadlineExceeded": 504,
    }


def test_an_error_is_described_with_its_branch() -> None:
    error = errors.CapacityError("no room", {"needed_bytes": 7})
    assert answer_of(error) == Failed(
        error=Error(
            kind="CapacityError",
            branch="ResourceError",
            message="no room",
            retryable=True,
            data={"needed_bytes": 7},
        )
    )
    assert answer_of(errors.RequestError("no")).error.branch == "RequestError"
    assert answer_of(errors.TensorCastError("no")).error.branch == "TensorCastError"


def test_a_refusal_keeps_its_own_status_and_a_kind_of_the_tree() -> None:
    refused = RefusedError(413, "too long")
    assert status_of(refused) == 413
    assert answer_of(refused).error.kind == "RequestError"
