"""Who may ask for what.

Rules:

1. The token opens everything. Without it only a look is answered, and only on the loopback.
2. What a browser sends for a page of somebody else is refused, with a token or without: a foreign
   `Origin`, or a `Sec-Fetch-Site` that says so.
3. On the loopback the `Host` must be a name of the loopback: a page whose own name was bent to
   127.0.0.1 (DNS rebinding) says its own. Who speaks for another (a proxy) is not the loopback.
4. Tokens are compared in constant time; no refusal says how near one was.
"""

from __future__ import annotations

import hmac
from enum import StrEnum
from typing import Final

import msgspec

__all__ = ["Asker", "Need", "Refusal", "is_loopback", "refusal"]

_SCHEME: Final = "bearer"
#: What a browser says of a request that no foreign page caused.
_OWN_SITES: Final = frozenset({"", "none", "same-origin"})


class Need(StrEnum):
    """What an answer gives away."""

    LOOK = "look"
    BYTES = "bytes"
    ACT = "act"


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says of who sent it.

    Attributes
    ----------
    peer : str
        Address of the other end of the connection.
    host, origin, site, authorization : str
        The headers `Host`, `Origin`, `Sec-Fetch-Site` and `Authorization`; "" without one.
    forwarded : bool
        Whether a proxy says that it speaks for another.
    """

    peer: str
    host: str
    origin: str = ""
    site: str = ""
    authorization: str = ""
    forwarded: bool = False


class Refusal(msgspec.Struct, frozen=True):
    """Why a request is not answered."""

    status: int
    message: str


def refusal(asker: Asker, need: Need, token: str) -> Refusal | None:
    """Say why the request is refused; None when it may be answered."""
    if _is_foreign(asker):
        return Refusal(403, "a page of another origin may not ask; use no browser")
    if asker.authorization:
        if _has_token(asker.authorization, token):
            return None
        return Refusal(401, "the token is not this cluster's; see docs/http.md")
    return _without_token(asker, need)


def _has_token(header: str, token: str) -> bool:
    scheme, _, given = header.partition(" ")
    right = hmac.compare_digest(given.strip().encode(), token.encode())
    return right and scheme.lower() == _SCHEME


def _without_token(asker: Asker, need: Need) -> Refusal | None:
    if need is not Need.LOOK:
        return Refusal(
            401, f"to {_verb(need)} takes the header Authorization: Bearer TOKEN"
        )
    if not is_loopback(asker.peer) or asker.forwarded:
        return Refusal(401, "this takes the header Authorization: Bearer TOKEN")
    if not _names_loopback(asker.host):
        return Refusal(
            403, "the header Host names no loopback; ask for localhost or 127.0.0.1"
        )
    return None


def _verb(need: Need) -> str:
    return "read bytes" if need is Need.BYTES else "act"


def _is_foreign(asker: Asker) -> bool:
    if asker.site.lower() not in _OWN_SITES:
        return True
    if not asker.origin:
        return False
    scheme, _, rest = asker.origin.partition("://")
    return scheme.lower() not in {"http", "https"} or rest.lower() != asker.host.lower()


def is_loopback(address: str) -> bool:
    """Tell whether an address is of this machine's loopback."""
    plain = address.lower().removeprefix("::ffff:")
    return plain == "::1" or _is_127(plain)


def _is_127(address: str) -> bool:
    parts = address.split(".")
    return (
        len(parts) == 4
        and parts[0] == "127"
        and all(part.isascii() and part.isdecimal() for part in parts)
    )


def _names_loopback(host: str) -> bool:
    """Tell whether a `Host` header names the loopback, with a port or without."""
    name, port = host.lower(), ""
    if name.startswith("["):
        name, _, port = name[1:].partition("]")
        port = port.removeprefix(":")
    elif ":" in name:
        name, _, port = name.partition(":")
    if port and not (port.isascii() and port.isdecimal()):
        return False
    return name.rstrip(".") == "localhost" or is_loopback(name)
