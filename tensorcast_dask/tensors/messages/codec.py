"""Messages as bytes, and errors as values."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from tensorcast_dask.exceptions import WrongPeer
from tensorcast_dask.tensors.messages.shared import Wire

__all__ = ["T", "decode", "encode"]

T = TypeVar("T")

_ENCODER: Final = msgspec.msgpack.Encoder()
#: By the identity of their kind, which they keep: to hash a union of many takes longer than to
#: decode most of them.
_DECODERS: Final[dict[int, tuple[object, msgspec.msgpack.Decoder[object]]]] = {}


def encode(message: Wire) -> bytes:
    """Pack one message or value."""
    return _ENCODER.encode(message)


def decode(raw: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Unpack and check one message of a union, or one value.

    Parameters
    ----------
    raw : bytes-like
        What `encode` made.
    kind : type
        A struct, or one of the unions of this module.

    Raises
    ------
    WrongPeer
        When the bytes are no such message.
    """
    known = _DECODERS.get(id(kind))
    if known is None:
        known = _DECODERS[id(kind)] = (kind, msgspec.msgpack.Decoder(kind))
    try:
        value = known[1].decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = (
            f"the peer sent what is no message of this protocol ({error}); closing"
        )
        raise WrongPeer(message) from error
    return value  # type: ignore[return-value]
