"""How a request's id tells of the trace in which it was asked.

An id is SESSION:NUMBER, or SESSION:TRACE-SPAN:NUMBER with both in hex (16 and 8 bytes, as in
the W3C's Trace Context). Whoever mints ids elsewhere has no trace in them.
"""

from __future__ import annotations

from typing import Final

__all__ = ["cause_of", "rid_of"]

_CAUSE_CHARS: Final = 32 + 1 + 16


def rid_of(session: str, number: int, cause: str = "") -> str:
    """Make the id of a request; `cause` is TRACE-SPAN, or empty."""
    return f"{session}:{cause}:{number}" if cause else f"{session}:{number}"


def cause_of(rid: str) -> str:
    """Find the span in which a request was asked, as TRACE-SPAN; empty when it tells none."""
    parts = rid.split(":")
    return parts[1] if len(parts) == 3 and len(parts[1]) == _CAUSE_CHARS else ""
