from __future__ import annotations

import socket
import threading
import time

import pytest

from tensorcast_dask.dataplane.direct import Direct
from tensorcast_dask.exceptions import DeadlineExceeded, PeerLost, WrongPeer
from tensorcast_dask.tensors.ids import RequestId
from tensorcast_dask.tensors.messages import CallAnswered, CallInstance


def pair() -> tuple[Direct, Direct]:
    one, other = socket.socketpair()
    return Direct(one), Direct(other)


def ask(args: bytes = b"x") -> CallInstance:
    return CallInstance(
        rid=RequestId("r"), instance="e", function="f", args=args, deadline_s=1.0
    )


def test_a_message_arrives_as_it_was_and_several_in_their_order() -> None:
    one, other = pair()
    one.send(ask())
    assert other.receive(CallInstance) == ask()
    other.send(CallAnswered(value=b"v"))
    assert one.receive(CallAnswered) == CallAnswered(value=b"v")
    one.close()
    other.close()


def test_a_message_that_is_longer_than_the_room_arrives_whole() -> None:
    one, other = pair()
    long = ask(bytes(range(256)) * 4096)
    sender = threading.Thread(target=one.send, args=(long,))
    sender.start()
    assert other.receive(CallInstance) == long
    sender.join()
    one.close()
    other.close()


def test_the_end_of_the_other_side_is_told() -> None:
    one, other = pair()
    other.close()
    with pytest.raises(PeerLost):
        one.receive(CallAnswered)
    with pytest.raises(PeerLost):
        one.send(ask())
    one.close()


def test_who_waits_too_long_is_told_so() -> None:
    one, other = pair()
    begun_s = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        one.receive(CallAnswered, until_s=begun_s + 0.02)
    with pytest.raises(DeadlineExceeded):
        one.receive(CallAnswered, until_s=begun_s - 1)
    one.close()
    other.close()


def test_what_is_no_message_of_ours_is_refused() -> None:
    one, other = socket.socketpair()
    direct = Direct(one)
    other.sendall(bytes(64))
    with pytest.raises(WrongPeer):
        direct.receive(CallAnswered)
    direct.close()
    other.close()
