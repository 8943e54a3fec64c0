"""TCP congestion control: setting it, and finding the best one for the loopback.

Rules:

1. Only what the kernel allows to this process is tried.
2. The probe moves a few megabytes over the loopback, where the choice matters most and
   nobody else is harmed; for another host the kernel's default stays.
3. The default wins a tie: another one must be a tenth faster.
4. Turns are compared with the turn of the default beside them, and nearly all of them must
   agree: on a busy machine a wrong choice would cost more than none.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Final, NamedTuple

from tensorcast_dask.exceptions import InvalidArgument

__all__ = [
    "Verdict",
    "allowed_congestion",
    "judge",
    "probe_congestion",
    "set_congestion",
]

_ALLOWED: Final = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_PROBE_BYTES: Final = 16 << 20
_ROUNDS: Final = 7
_DISSENTERS: Final = 1
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


class Verdict(NamedTuple):
    """What a probe found.

    Attributes
    ----------
    name : str
        The control to use; "" = the kernel's default.
    sure : bool
        Whether the turns agreed: else it is worth asking again at another time.
    """

    name: str
    sure: bool


def probe_congestion() -> Verdict:
    """Find the congestion control to use on the loopback."""
    turns: dict[str, list[float]] = {name: [] for name in ("", *allowed_congestion())}
    for _ in range(_ROUNDS):
        for name, seconds in turns.items():
            with contextlib.suppress(OSError, InvalidArgument):
                seconds.append(_seconds(name))
    return judge(turns)


def judge(turns: dict[str, list[float]]) -> Verdict:
    """Compare the turns of each control with those of the default (rule 4).

    Parameters
    ----------
    turns : dict of str to list of float
        Seconds of each turn, in the order of the rounds; "" is the default. A control
        whose turns are not complete is out.
    """
    default = turns[""]
    best, best_gain, sure = "", 1.0, len(default) == _ROUNDS
    for name, seconds in turns.items():
        if not name or len(seconds) != len(default) or not default:
            continue
        gains = [theirs / own for theirs, own in zip(default, seconds, strict=True)]
        winners = sum(gain >= _GAIN for gain in gains)
        if winners >= len(gains) - _DISSENTERS:
            gain = _median(gains)
            if gain > best_gain:
                best, best_gain = name, gain
        elif winners > _DISSENTERS:
            sure = False
    return Verdict(best, sure or bool(best))


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


def _median(values: list[float]) -> float:
    """Take the middle; the module for it loads three others."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2
