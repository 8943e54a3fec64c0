"""TCP congestion control: setting it, and finding the best one for the loopback.

Rules:

1. Only what the kernel allows to this process is tried.
2. The probe moves a few megabytes over the loopback, where the choice matters most and
   nobody else is harmed; for another host the kernel's default stays.
3. The default wins a tie: another one must be a tenth faster.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from pathlib import Path
from typing import Final

from tensorcast_dask.exceptions import InvalidArgument

__all__ = ["allowed_congestion", "probe_congestion", "set_congestion"]

_ALLOWED: Final = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_PROBE_BYTES: Final = 16 << 20
_ROUNDS: Final = 3
_PIECE_BYTES: Final = 1 << 20
_GAIN: Final = 1.1


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
    try:
        return tuple(_ALLOWED.read_text().split())
    except OSError:
        return ()


def probe_congestion() -> str:
    """Return the congestion control to use on the loopback; "" = the kernel's default.

    Every candidate has the same number of turns, taken in rounds, and is judged by its
    best one: a busy machine only makes turns slower.
    """
    names = ["", *allowed_congestion()]
    best_s = dict.fromkeys(names, math.inf)
    for _ in range(_ROUNDS):
        for name in names:
            with contextlib.suppress(OSError, InvalidArgument):
                best_s[name] = min(best_s[name], _seconds(name))
    best_s[""] /= _GAIN
    return min(best_s, key=best_s.__getitem__)


def _seconds(name: str) -> float:
    """How long the probe's bytes take over one loopback connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if name:
            set_congestion(listener, name)
        sender = socket.create_connection(listener.getsockname(), timeout=2.0)
        receiver, _ = listener.accept()
    with sender, receiver:
        if name:
            set_congestion(sender, name)
        receiver.settimeout(2.0)
        started_s = time.perf_counter()
        thread = threading.Thread(target=_send, args=(sender,), daemon=True)
        thread.start()
        piece = bytearray(_PIECE_BYTES)
        left = _PROBE_BYTES
        while left:
            got = receiver.recv_into(piece)
            if not got:
                break
            left -= got
        thread.join(2.0)
        return time.perf_counter() - started_s


def _send(sock: socket.socket) -> None:
    piece = bytes(_PIECE_BYTES)
    with contextlib.suppress(OSError):
        for _ in range(_PROBE_BYTES // _PIECE_BYTES):
            sock.sendall(piece)
