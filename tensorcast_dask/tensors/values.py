"""Arguments and results of an instance's functions, as bytes.

Rules:

1. Plain values only: None, bool, int, float, str, bytes, lists and dicts with text keys; a
   tuple becomes a list. No pickle, so that reading never runs anything.
2. Artifacts and earlier steps stand in them as references. Whoever unpacks says what becomes
   of each.
3. Equal values are equal bytes: names of a dict are sorted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from tensorcast_dask.exceptions import InvalidArgument, WrongPeer
from tensorcast_dask.tensors.messages import ArtifactInfo, decode
from tensorcast_dask.tensors.plans import ArtifactRef, StepRef

__all__ = ["MAX_BYTES", "Reference", "pack", "references", "unpack"]

Reference: TypeAlias = ArtifactRef | StepRef | ArtifactInfo

#: What is larger belongs in an artifact.
MAX_BYTES: Final = 1 << 20
_CODES: Final[dict[type, int]] = {ArtifactRef: 1, StepRef: 2, ArtifactInfo: 3}
_KINDS: Final[dict[int, type[Reference]]] = {
    1: ArtifactRef,
    2: StepRef,
    3: ArtifactInfo,
}
_PLAIN: Final = (type(None), bool, int, float, str, bytes)


def pack(value: object, *, what: str = "an argument") -> bytes:
    """Pack a value.

    Raises
    ------
    InvalidArgument
        When it is not plain, or too large.
    """
    try:
        raw = msgspec.msgpack.encode(_lowered(value, what))
    except (OverflowError, ValueError, RecursionError) as error:
        message = f"{what} cannot be sent: {error}"
        raise InvalidArgument(message) from error
    if len(raw) > MAX_BYTES:
        message = (
            f"{what} takes {len(raw)} bytes, at most {MAX_BYTES} travel in a call; put what is "
            "large as an artifact, and give that"
        )
        raise InvalidArgument(message)
    return raw


def _lowered(value: object, what: str) -> object:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        return [_lowered(one, what) for one in value]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _lowered(value[name], what) for name in sorted(value)}
    if (code := _CODES.get(type(value))) is not None:
        return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(value))
    message = (
        f"{type(value).__name__} in {what} does not travel in a call: plain values and "
        "artifacts do; put arrays as artifacts"
    )
    raise InvalidArgument(message)


def unpack(raw: bytes, meet: Callable[[Reference], object]) -> object:
    """Unpack a value; `meet` gives what stands for each reference.

    Raises
    ------
    WrongPeer
        When it is no value that `pack` made.
    """

    def hook(code: int, data: memoryview) -> object:
        kind = _KINDS.get(code)
        if kind is None:
            message = f"a value of a kind ({code}) that this release does not know"
            raise WrongPeer(message)
        return meet(decode(data, kind))

    try:
        value: object = msgspec.msgpack.decode(raw, ext_hook=hook)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"the peer sent what is no value ({error})"
        raise WrongPeer(message) from error
    return value


def references(raw: bytes) -> list[Reference]:
    """Give every reference in a packed value, in order."""
    found: list[Reference] = []
    unpack(raw, found.append)
    return found
