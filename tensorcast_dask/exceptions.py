"""Every error that reaches a caller, in one tree.

::

    TensorCastError
    ├── RequestError            the call itself is wrong; repeating it cannot help
    │   ├── InvalidName         an id, tensor name or label that is not legal
    │   ├── InvalidArgument     a value out of its range (also a ValueError)
    │   ├── UnsupportedDtype    a dtype or layout that cannot be stored or made here
    │   ├── UnsupportedPlatform this machine lacks what the call needs
    │   ├── Unimplemented       known, named, not offered by the peer that was asked
    │   ├── Mismatch            what was given contradicts what is there
    │   └── AlreadyExists       the name is taken by other content
    ├── AbsentError             what was asked for is not there
    │   ├── NotFound            nobody ever made it, or the name is unknown
    │   ├── Gone                it was there and was destroyed, evicted or released
    │   ├── Incomplete          it is being made
    │   └── DataLost            the catalog knows it, the last copy died
    ├── OwnershipError          a right has lapsed; get a new one before trying again
    │   ├── LeaseExpired        the caller's own lease ran out
    │   ├── StaleOwner          the message carries an old epoch or incarnation
    │   ├── OwnerGone           the process that owned the memory is gone
    │   └── Poisoned            the target holds half of an update
    ├── ResourceError           the machine or a quota has no room
    │   ├── CapacityError
    │   ├── QuotaExceeded
    │   └── DeviceError
    ├── FileError               a file is not what it claims
    │   ├── CorruptFile
    │   └── FileChanged
    └── ReachError              somebody could not be reached in time
        ├── PeerLost            a node, store or source died or stalled
        ├── WrongPeer           somebody else answered
        ├── CatalogUnavailable  the scheduler plugin or its journal does not answer
        ├── DeadlineExceeded    (also a TimeoutError)
        ├── Unknown             the outcome of a change cannot be told
        ├── PlanFailed          a step failed; the result says which
        └── CallFailed          a function of an instance raised

Rules:

1. A class is a promise to a handler: the branch says what a caller can do about it.
2. `kind` is the class name and is what crosses the wire; it never changes its meaning.
3. `retryable` says that the same call may succeed later with no other change.
4. Every message says what to do, not only what happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

__all__ = [
    "AbsentError",
    "AlreadyExists",
    "CallFailed",
    "CapacityError",
    "CatalogUnavailable",
    "CorruptFile",
    "DataLost",
    "DeadlineExceeded",
    "DeviceError",
    "FileChanged",
    "FileError",
    "Gone",
    "Incomplete",
    "InvalidArgument",
    "InvalidName",
    "LeaseExpired",
    "Mismatch",
    "NotFound",
    "OwnerGone",
    "OwnershipError",
    "PeerLost",
    "PlanFailed",
    "Poisoned",
    "QuotaExceeded",
    "ReachError",
    "RequestError",
    "ResourceError",
    "StaleOwner",
    "TensorCastError",
    "Unimplemented",
    "Unknown",
    "UnsupportedDtype",
    "UnsupportedPlatform",
    "WrongPeer",
    "error_from_wire",
]

#: What an error may carry besides its sentence: small facts that a program can act on.
Data = Mapping[str, str | int | float | bool | None]

_NOTHING: Data = MappingProxyType({})


class TensorCastError(Exception):
    """Root of every error that this package raises on purpose.

    Parameters
    ----------
    message : str
        One sentence: what happened, and what to do.
    data : mapping, optional
        Small facts for programs (ids, byte counts); no payload, no secrets.
    """

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, data: Data = _NOTHING) -> None:
        super().__init__(message)
        self.message = message
        self.data: dict[str, str | int | float | bool | None] = dict(data)

    @property
    def kind(self) -> str:
        """Stable name of this error: the class name."""
        return type(self).__name__

    def __reduce__(self) -> tuple[type[TensorCastError], tuple[str, Data]]:
        return type(self), (self.message, self.data)


class RequestError(TensorCastError):
    """The call is wrong as it stands."""


class InvalidName(RequestError):
    """An id, tensor name, alias or label that is not legal."""


class InvalidArgument(RequestError, ValueError):
    """A value outside the range that the parameter documents."""


class UnsupportedDtype(RequestError, TypeError):
    """A dtype or layout that cannot be stored, or not made with this library."""


class UnsupportedPlatform(RequestError):
    """The machine or the Python here lacks something the call needs."""


class Unimplemented(RequestError):
    """The peer knows the call by name and does not offer it."""


class Mismatch(RequestError):
    """What was given contradicts what is recorded."""


class AlreadyExists(RequestError):
    """The name holds other content; destroy it or publish a new version."""


class AbsentError(TensorCastError):
    """What was asked for is not there."""


class NotFound(AbsentError):
    """No artifact, version, alias, node or file of that name."""


class Gone(AbsentError):
    """It existed and was destroyed, evicted or released."""


class Incomplete(AbsentError):
    """It is being written and cannot be read yet."""

    retryable = True


class DataLost(AbsentError):
    """The catalog knows the artifact; its last copy is gone."""


class OwnershipError(TensorCastError):
    """A right has lapsed."""


class LeaseExpired(OwnershipError):
    """The caller's own lease ran out before the call ended."""


class StaleOwner(OwnershipError):
    """The message carries an old epoch, incarnation or generation."""


class OwnerGone(OwnershipError):
    """The process that lent its memory is gone."""


class Poisoned(OwnershipError):
    """The target holds half of an update and must be replaced."""


class ResourceError(TensorCastError):
    """The machine or a quota has no room."""

    retryable = True


class CapacityError(ResourceError):
    """No tier of the chosen node can hold the bytes."""


class QuotaExceeded(ResourceError):
    """A limit that an operator set was reached."""


class DeviceError(ResourceError):
    """A device failed or is not there."""

    retryable = False


class FileError(TensorCastError):
    """A file is not what it claims to be."""


class CorruptFile(FileError):
    """The file's own claims contradict its bytes."""


class FileChanged(FileError):
    """The file is not the one that was imported."""


class ReachError(TensorCastError):
    """Somebody could not be reached in time."""

    retryable = True


class PeerLost(ReachError):
    """A node, store or source died, stalled or closed the connection."""


class WrongPeer(ReachError):
    """Another process than the expected one answered."""


class CatalogUnavailable(ReachError):
    """The scheduler plugin or its journal does not answer."""


class DeadlineExceeded(ReachError, TimeoutError):
    """The caller's deadline passed first."""


class Unknown(ReachError):
    """The outcome of a change cannot be told; look before repeating it."""

    retryable = False


class PlanFailed(ReachError):
    """A step of a plan failed."""

    retryable = False


class CallFailed(ReachError):
    """A function of an instance raised; `data` has the name of its exception."""

    retryable = False


def _tree(root: type[TensorCastError]) -> dict[str, type[TensorCastError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


_BY_KIND = _tree(TensorCastError)


def error_from_wire(kind: str, message: str, data: Data = _NOTHING) -> TensorCastError:
    """Make the error that a peer described.

    A kind that this release does not know becomes its root, so that a newer peer's
    refusal is still a refusal.
    """
    return _BY_KIND.get(kind, TensorCastError)(message, data)
