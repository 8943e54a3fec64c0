from __future__ import annotations

import socket

import pytest

from tensorcast_dask.dataplane.congestion import (
    allowed_congestion,
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
    assert probe_congestion() in {"", *allowed_congestion()}
