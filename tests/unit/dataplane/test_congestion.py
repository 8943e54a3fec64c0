from __future__ import annotations

import socket

import pytest

from tensorcast_dask.dataplane.congestion import (
    allowed_congestion,
    congestion_for,
    pick,
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


@pytest.mark.parametrize(
    ("default", "allowed", "found"),
    [
        ("cubic", ("reno", "cubic", "bbr"), ""),
        ("reno", ("reno",), ""),
        ("bbr", ("reno", "bbr"), "reno"),
        ("bbr", ("bbr", "cubic"), "cubic"),
        ("bbr2", ("bbr", "bbr2"), ""),
        ("bbr", (), ""),
    ],
)
def test_on_the_loopback_nothing_is_paced(
    default: str, allowed: tuple[str, ...], found: str
) -> None:
    assert pick(default, allowed) == found


def test_what_is_chosen_for_the_loopback_is_allowed() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.3.2.1"):
        assert congestion_for(host) in {"", *allowed_congestion()}


@pytest.mark.parametrize("host", ["10.1.2.3", "node-7", "::ffff:10.0.0.1", ""])
def test_for_another_host_the_kernels_default_stays(host: str) -> None:
    assert congestion_for(host) == ""
