"""TCP congestion control: setting it, and the one to use where nothing can be congested.

Rules:

1. Only what the kernel allows to this process is chosen.
2. On the loopback nothing is lost, so a control that paces what it sends (BBR) only costs:
   twice the processor time and half the rate of one that does not (docs/facts.md). There
   the first of the others is used; they do not differ.
3. On a way to another host the kernel's default stays: its administrator chose it.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
from pathlib import Path
from typing import Final

from tensorcast_dask.exceptions import InvalidArgument

__all__ = ["allowed_congestion", "congestion_for", "pick", "set_congestion"]

_DEFAULT: Final = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_ALLOWED: Final = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


def set_congestion(sock: socket.socket, name: str) -> None:
    """Choose a congestion control; connections that a listener accepts inherit it.

    Raises
    ------
    InvalidArgument
        When the kernel does not offer it to this process.
    """
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except (OSError, AttributeError) as error:
        message = f"TCP congestion control {name!r} is not allowed here ({error}); see {_ALLOWED}"
        raise InvalidArgument(message) from error


def allowed_congestion() -> tuple[str, ...]:
    """Return what the kernel allows; empty where it does not say."""
    return _words(_ALLOWED)


def congestion_for(host: str) -> str:
    """Return what connections with `host` shall use; "" = the kernel's default.

    Parameters
    ----------
    host : str
        Name or address of the other end, or of the listener.
    """
    return _for_loopback() if _is_loopback(host) else ""


def pick(default: str, allowed: tuple[str, ...]) -> str:
    """Return what to use on the loopback (rule 2); "" = the default."""
    if not _paces(default):
        return ""
    return next((name for name in allowed if not _paces(name)), "")


@functools.cache
def _for_loopback() -> str:
    default = _words(_DEFAULT)
    return pick(default[0], allowed_congestion()) if default else ""


def _paces(name: str) -> bool:
    return name.startswith("bbr")


def _words(path: Path) -> tuple[str, ...]:
    try:
        return tuple(path.read_text().split())
    except OSError:
        return ()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
