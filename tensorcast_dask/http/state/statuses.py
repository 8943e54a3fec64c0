"""Which HTTP status an error has, by its branch or kind.

Rule: the status tells a caller who knows HTTP only what to do; the kind in the answer tells the rest.
"""

from __future__ import annotations

from typing import Final

import tensorcast_dask.exceptions as errors
from tensorcast_dask.http.state.shapes import Error, Failed

__all__ = ["RefusedError", "answer_of", "status_of"]

#: The first that fits counts: kinds before their branches.
_STATUSES: Final[tuple[tuple[type[errors.TensorCastError], int], ...]] = (
    (errors.Unimplemented, 501),
    (errors.UnsupportedPlatform, 501),
    (errors.Mismatch, 409),
    (errors.AlreadyExists, 409),
    (errors.RequestError, 400),
    (errors.Gone, 410),
    (errors.DataLost, 410),
    (errors.Incomplete, 409),
    (errors.AbsentError, 404),
    (errors.OwnerGone, 410),
    (errors.OwnershipError, 409),
    (errors.QuotaExceeded, 429),
    (errors.CapacityError, 507),
    (errors.ResourceError, 503),
    (errors.FileError, 422),
    (errors.CatalogUnavailable, 503),
    (errors.DeadlineExceeded, 504),
    (errors.PeerLost, 502),
    (errors.WrongPeer, 502),
    (errors.ReachError, 500),
    (errors.TensorCastError, 500),
)


class RefusedError(errors.RequestError):
    """A request that is refused by its form or its sender.

    Parameters
    ----------
    status : int
        Its HTTP status.
    message : str
        What to do.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def kind(self) -> str:
        """The branch: HTTP has more reasons to refuse than the tree has names."""
        return "RequestError"


def status_of(error: errors.TensorCastError) -> int:
    """Give the status of an error."""
    if isinstance(error, RefusedError):
        return error.status
    return next(status for kind, status in _STATUSES if isinstance(error, kind))


def answer_of(error: errors.TensorCastError) -> Failed:
    """Describe an error as answers do."""
    branch = next(
        (
            cls.__name__
            for cls in type(error).__mro__
            if cls.__base__ is errors.TensorCastError
        ),
        error.kind,
    )
    said = Error(
        kind=error.kind,
        branch=branch,
        message=error.message,
        retryable=error.retryable,
        data=error.data,
    )
    return Failed(error=said)
