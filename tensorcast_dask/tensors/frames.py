"""The one frame that every socket of ours carries.

::

    0        4         8                16
    | magic  | body    | payload bytes  | body (msgpack) | payload (raw bytes) |

Rules:

1. `body` is one message of `tensorcast_dask.tensors.messages`; `payload` is bulk: it is
   never packed, never copied into a message, and is received where it belongs.
2. Both lengths are checked against the reader's limits before anything is allocated.
3. File descriptors travel beside the first byte of a frame (unix sockets only).
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from tensorcast_dask.exceptions import WrongPeer

__all__ = [
    "HEADER_BYTES",
    "MAX_BODY_BYTES",
    "FrameHeader",
    "pack_header",
    "parse_header",
]

_MAGIC: Final = 0x54434431  # "TCD1"
_HEADER: Final = struct.Struct("!IIQ")
HEADER_BYTES: Final = _HEADER.size
MAX_BODY_BYTES: Final = 256 << 20


class FrameHeader(NamedTuple):
    """Lengths of the two parts that follow."""

    body_bytes: int
    payload_bytes: int


def pack_header(body_bytes: int, payload_bytes: int = 0) -> bytes:
    """Pack the 16 bytes that precede a message."""
    return _HEADER.pack(_MAGIC, body_bytes, payload_bytes)


def parse_header(
    header: bytes | bytearray | memoryview,
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    max_payload_bytes: int = 0,
) -> FrameHeader:
    """Check and unpack a header.

    Raises
    ------
    WrongPeer
        When the magic or a length cannot be ours; the connection is of no more use.
    """
    magic, body_bytes, payload_bytes = _HEADER.unpack(header)
    if magic != _MAGIC:
        message = "the peer does not speak this protocol; check the address"
        raise WrongPeer(message)
    if body_bytes > max_body_bytes or payload_bytes > max_payload_bytes:
        message = (
            f"the peer announced {body_bytes} + {payload_bytes} bytes, more than the "
            f"{max_body_bytes} + {max_payload_bytes} allowed here; closing"
        )
        raise WrongPeer(message)
    return FrameHeader(body_bytes, payload_bytes)
