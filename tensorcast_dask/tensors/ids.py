"""Names and numbers that identify things, as types.

Rules:

1. An id is minted by a shell and handed to the core; nothing here mints one.
2. A *generation* is unique in a cluster for ever: the catalog's epoch in the high bits,
   a counter in the low 40. It names one life of one artifact version; a store keys
   replicas by it, so a re-used name can never be confused with its predecessor.
3. Legal names are checked once, at the boundary, before anything is allocated.
"""

from __future__ import annotations

from typing import Final, NewType

from tensorcast_dask.exceptions import InvalidName

__all__ = [
    "MAX_NAME_BYTES",
    "ArtifactId",
    "ClusterId",
    "Epoch",
    "Generation",
    "HostId",
    "Incarnation",
    "NodeId",
    "RequestId",
    "SessionId",
    "Version",
    "check_name",
    "epoch_of",
    "generation_of",
]

ArtifactId = NewType("ArtifactId", str)
Version = NewType("Version", int)  # > 0
Generation = NewType("Generation", int)  # epoch << 40 | counter
Epoch = NewType("Epoch", int)  # one life of the catalog
Incarnation = NewType("Incarnation", int)  # one adoption of one store
NodeId = NewType("NodeId", str)  # the store's uuid, 32 hex digits
HostId = NewType("HostId", str)
SessionId = NewType("SessionId", str)
RequestId = NewType("RequestId", str)
ClusterId = NewType("ClusterId", str)

MAX_NAME_BYTES: Final = 512
_COUNTER_BITS: Final = 40


def generation_of(epoch: Epoch, counter: int) -> Generation:
    """Compose a generation; `counter` starts again at 1 in each epoch."""
    assert 0 < counter < 1 << _COUNTER_BITS, "catalog: generation counter overflow"
    return Generation(epoch << _COUNTER_BITS | counter)


def epoch_of(generation: Generation) -> Epoch:
    """Tell in which life of the catalog a generation was minted."""
    return Epoch(generation >> _COUNTER_BITS)


def check_name(name: object, *, what: str = "artifact id") -> str:
    """Return `name` when it is legal.

    Legal is any text of 1 to 512 UTF-8 bytes without control characters, surrogates,
    or leading and trailing white space.

    Raises
    ------
    InvalidName
        When it is not; nothing has been changed.
    """
    if not isinstance(name, str):  # callers without a type checker
        message = f"{what} must be text, not {type(name).__name__}"
        raise InvalidName(message)
    try:
        size_bytes = len(name.encode())
    except UnicodeEncodeError as error:
        message = (
            f"{what} {name!r} is not valid Unicode text; remove the lone surrogates"
        )
        raise InvalidName(message) from error
    if not 0 < size_bytes <= MAX_NAME_BYTES:
        message = f"{what} must take 1 to {MAX_NAME_BYTES} UTF-8 bytes, this takes {size_bytes}"
        raise InvalidName(message)
    if name != name.strip() or not name.isprintable():
        message = (
            f"{what} {name!r} has control characters, or spaces at an end; remove them"
        )
        raise InvalidName(message)
    return name
