from __future__ import annotations

import socket

import pytest

from tensorcast_dask.dataplane.congestion import (
    Verdict,
    allowed_congestion,
    judge,
    probe_congestion,
    set_congestion,
)
from tensorcast_dask.exceptions import InvalidArgument


def chosen(sock: socket.socket) -> str:
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return raw.rstrip(b"\0").decode()


def test_accepted_connections_inherit_the_listeners_choice() -> None:
    name = allowed_congestion()[0]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        set_congestion(listener, name)
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                assert chosen(accepted) == name


def test_what_the_kernel_does_not_offer_is_refused() -> None:
    with (
        socket.socket() as sock,
        pytest.raises(InvalidArgument, match="tcp_allowed"),
    ):
        set_congestion(sock, "no-such-control")


def test_the_probe_finds_one_that_is_allowed(leaves_nothing: None) -> None:
    assert probe_congestion().name in {"", *allowed_congestion()}


ONES = [1.0] * 7


@pytest.mark.parametrize(
    ("turns", "found"),
    [
        ({"": ONES, "a": [0.7] * 7, "b": [0.8] * 7}, Verdict("a", sure=True)),
        ({"": ONES, "a": [0.95] * 7}, Verdict("", sure=True)),
        ({"": ONES, "a": [3.0] * 7}, Verdict("", sure=True)),
        # One turn may be disturbed, whichever way.
        ({"": ONES, "a": [0.7] * 6 + [9.0]}, Verdict("a", sure=True)),
        ({"": ONES, "a": [3.0] * 6 + [0.1]}, Verdict("", sure=True)),
        # On a busy machine nothing is chosen, and nothing is certain.
        ({"": ONES, "a": [0.5] * 5 + [2.0] * 2}, Verdict("", sure=False)),
        ({"": ONES, "a": [0.2] * 2 + [3.0] * 5}, Verdict("", sure=False)),
        ({"": ONES, "a": [0.5] * 3}, Verdict("", sure=True)),
        ({"": [], "a": [0.5] * 7}, Verdict("", sure=False)),
        ({"": [1.0] * 6, "a": [0.5] * 6}, Verdict("a", sure=True)),
    ],
)
def test_a_control_is_chosen_when_nearly_every_turn_is_for_it(
    turns: dict[str, list[float]], found: Verdict
) -> None:
    assert judge(turns) == found
