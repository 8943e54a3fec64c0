from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorcast_dask.dataplane import memory
from tensorcast_dask.dataplane.auth import client_tls, server_tls
from tensorcast_dask.dataplane.framing import FrameStream, pack, read_message
from tensorcast_dask.dataplane.segments import MemoryFile
from tensorcast_dask.exceptions import DeadlineExceeded, PeerLost, WrongPeer
from tensorcast_dask.tensors.frames import MAX_BODY_BYTES, pack_header
from tensorcast_dask.tensors.messages import Done, Refused, State
from tests.kit.certificates import mint_certificates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


KINDS = ["unix", "tcp", "tls"]


def connected(kind: str) -> tuple[FrameStream, FrameStream]:
    if kind == "unix":
        here, there = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            here = socket.create_connection(listener.getsockname())
            there, _ = listener.accept()
    if kind == "tls":
        files = mint_certificates()
        thread = threading.Thread(
            target=lambda: made.append(
                server_tls(files).wrap_socket(there, server_side=True)
            )
        )
        made: list[socket.socket] = []
        thread.start()
        here = client_tls(files).wrap_socket(here)
        thread.join(10)
        there = made[0]
    return FrameStream(here, stall_s=5.0), FrameStream(there, stall_s=5.0)


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[FrameStream, FrameStream]]:
    here, there = connected(request.param)
    yield here, there
    here.close()
    there.close()


@pytest.fixture
def unix() -> Iterator[tuple[FrameStream, FrameStream]]:
    here, there = connected("unix")
    yield here, there
    here.close()
    there.close()


@contextlib.contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[None]:
    """Run `work` in a thread beside the block; its error is raised at the end."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # raised again below
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(20)
        assert not thread.is_alive()
    if failed:
        raise failed[0]


def test_a_message_arrives(pair: tuple[FrameStream, FrameStream]) -> None:
    here, there = pair
    here.send(Done(nbytes=7))
    frame = there.receive(Done)
    assert (frame.message, frame.payload, frame.nbytes, frame.fds) == (
        Done(nbytes=7),
        None,
        0,
        (),
    )


@pytest.mark.parametrize("nbytes", [1, 100_000, (9 << 20) + 1])
def test_a_payload_goes_straight_to_its_destination(
    pair: tuple[FrameStream, FrameStream], nbytes: int
) -> None:
    here, there = pair
    data, target = os.urandom(nbytes), bytearray(nbytes + 3)
    with meanwhile(lambda: here.send(Done(), payload=data)):
        frame = there.receive(Done, into=target, max_payload_bytes=nbytes)
    assert frame.nbytes == nbytes
    assert frame.payload is None
    assert target[:nbytes] == data
    assert target[nbytes:] == b"\0\0\0"


def test_many_buffers_are_one_payload(pair: tuple[FrameStream, FrameStream]) -> None:
    here, there = pair
    parts: list[Any] = [bytes([i % 251]) * (i % 7) for i in range(1500)]
    parts.append(memoryview(b"abcdefgh").cast("Q"))
    with meanwhile(lambda: here.send(Done(), payload=parts)):
        frame = there.receive(Done, max_payload_bytes=1 << 20)
    assert bytes(frame.payload or b"") == b"".join(bytes(p) for p in parts)


@pytest.mark.parametrize("by_reference", [True, False])
def test_a_payload_from_a_file_never_needs_a_map(
    pair: tuple[FrameStream, FrameStream],
    by_reference: bool,
) -> None:
    here, there = pair
    with MemoryFile(3 << 20) as file:
        data = os.urandom(3 << 20)
        file.map_shared().view[:] = data
        file.unmap()
        part = (file.fd, 5, (2 << 20) + 1)
        target = bytearray(part[2])

        def send() -> None:
            here.send(Done(), payload_file=part, by_reference=by_reference)

        with meanwhile(send):
            there.receive(Done, into=target, max_payload_bytes=part[2])
    assert target == data[5 : 5 + part[2]]


def test_a_file_that_is_shorter_than_announced_is_peer_lost(
    pair: tuple[FrameStream, FrameStream],
) -> None:
    here, _ = pair
    with MemoryFile(10) as file:
        for by_reference in (True, False):
            with pytest.raises(PeerLost, match="ended early"):
                here.send(
                    Done(), payload_file=(file.fd, 0, 11), by_reference=by_reference
                )


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_what_was_copied_cannot_change_on_the_way_and_no_lease_tells_of_the_rest(
    kind: str,
) -> None:
    """Why bytes go by reference only with a sum."""
    here, there = connected(kind)
    with (
        contextlib.closing(here),
        contextlib.closing(there),
        MemoryFile(50_000) as file,
    ):
        file.map_shared().view[:] = bytes(50_000)
        whole = (file.fd, 0, 50_000)
        here.send(Done(), payload_file=whole)
        here.send(Done(), payload_file=whole, by_reference=True)
        assert file.sole_owner()
        file.map_shared().view[:] = b"x" * 50_000
        copied = there.receive(Done, max_payload_bytes=50_000)
        assert bytes(copied.payload or b"") == bytes(50_000)
        referred = there.receive(Done, max_payload_bytes=50_000)
        assert bytes(referred.payload or b"") == b"x" * 50_000


def test_a_digest_sees_exactly_the_payload(
    pair: tuple[FrameStream, FrameStream],
) -> None:
    here, there = pair
    data, digest = os.urandom(3 << 20), memory.new_digest()
    target = bytearray(len(data))
    with meanwhile(lambda: here.send(Done(), payload=data)):
        there.receive(Done, into=target, digest=digest, max_payload_bytes=len(data))
    assert digest.intdigest() == memory.sum_of(data)
    assert target == data


def test_the_destination_may_depend_on_the_message(
    pair: tuple[FrameStream, FrameStream],
) -> None:
    here, there = pair
    asked: list[tuple[Done, int]] = []
    target = bytearray(3)

    def into(message: Done, nbytes: int) -> bytearray | None:
        asked.append((message, nbytes))
        return target if message.nbytes else None

    here.send(Done(nbytes=1), payload=b"abc")
    here.send(Done(nbytes=0), payload=b"forget")
    here.send(Done(nbytes=2))
    for _ in range(3):
        there.receive(Done, into=into, max_payload_bytes=10)
    assert asked == [(Done(nbytes=1), 3), (Done(nbytes=0), 6)]
    assert target == b"abc"


def test_a_payload_can_be_read_later_skipped_or_written_to_a_file(
    pair: tuple[FrameStream, FrameStream],
) -> None:
    here, there = pair
    data = os.urandom(700_000)

    def send_three() -> None:
        for _ in range(3):
            here.send(Done(), payload=data)

    with meanwhile(send_three):
        _, first, _ = there.receive_head(Done, max_payload_bytes=len(data))
        with MemoryFile(len(data) + 9) as file:
            assert first.read_to_file(file.fd, 9) == len(data)
            assert bytes(file.map_shared().view[9:]) == data
        _, second, _ = there.receive_head(Done, max_payload_bytes=len(data))
        second.skip()
        assert second.left == 0
        _, third, _ = there.receive_head(Done, max_payload_bytes=len(data))
        assert third.read() == data


def test_a_payload_longer_than_its_place_is_refused_unread(
    pair: tuple[FrameStream, FrameStream],
) -> None:
    here, there = pair
    target = bytearray(2)
    here.send(Done(), payload=b"abc")
    with pytest.raises(WrongPeer):
        there.receive(Done, into=target, max_payload_bytes=10)
    assert target == b"\0\0"


@pytest.mark.parametrize(
    "header",
    [
        b"GET / HTTP/1.1\r\n",
        pack_header(MAX_BODY_BYTES + 1),
        pack_header(1, 11),
        struct.pack("!IIQ", 0x54434431, 1, 1 << 63),
    ],
)
def test_lengths_are_checked_before_anything_is_allocated(
    unix: tuple[FrameStream, FrameStream], header: bytes
) -> None:
    here, there = unix
    here.sock.sendall(header)
    with pytest.raises(WrongPeer):
        there.receive(Done, max_payload_bytes=10)


@given(st.binary(min_size=16, max_size=200))
def test_noise_is_refused_and_never_hangs(noise: bytes) -> None:
    here, there = connected("unix")
    with contextlib.closing(here), contextlib.closing(there):
        here.sock.sendall(noise)
        here.sock.shutdown(socket.SHUT_WR)
        with pytest.raises((WrongPeer, PeerLost)):
            there.receive(Done, max_payload_bytes=100)


def test_another_message_than_expected_is_refused(
    pair: tuple[FrameStream, FrameStream],
) -> None:
    here, there = pair
    here.send(State(json=b"{}"))
    with pytest.raises(WrongPeer):
        there.receive(Done)


def test_the_end_of_the_peer_is_peer_lost(
    pair: tuple[FrameStream, FrameStream],
) -> None:
    here, there = pair
    here.close()
    with pytest.raises(PeerLost):
        there.receive(Done)


@pytest.mark.parametrize("kept", [3, 20, 60])
def test_a_peer_that_ends_inside_a_frame_is_lost(
    unix: tuple[FrameStream, FrameStream], kept: int
) -> None:
    here, there = unix
    whole = pack(Done(nbytes=1), b"p" * 100)
    here.sock.sendall(whole[:kept])
    here.close()
    with pytest.raises(PeerLost):
        there.receive(Done, max_payload_bytes=100)


def test_sending_to_who_has_gone_is_peer_lost(
    pair: tuple[FrameStream, FrameStream],
) -> None:
    here, there = pair
    there.close()

    def send_on() -> None:
        for _ in range(100):
            here.send(Done(), payload=bytes(1 << 16))

    with pytest.raises(PeerLost):
        send_on()


def test_silence_inside_a_frame_is_peer_lost(
    pair: tuple[FrameStream, FrameStream],
) -> None:
    _, there = pair
    there.stall_s = 0.05
    with pytest.raises(PeerLost, match="stalled"):
        there.receive(Done)


def test_who_takes_nothing_is_peer_lost(pair: tuple[FrameStream, FrameStream]) -> None:
    here, _ = pair
    here.stall_s = 0.05
    with pytest.raises(PeerLost, match="stalled"):
        here.send(Done(), payload=bytes(64 << 20))


def test_the_deadline_is_another_error_than_silence(
    pair: tuple[FrameStream, FrameStream],
) -> None:
    here, there = pair
    began_s = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        there.receive(Done, until_s=began_s + 0.05)
    with pytest.raises(DeadlineExceeded):
        there.receive(Done, until_s=began_s - 1)
    with pytest.raises(DeadlineExceeded):
        here.send(Done(), payload=bytes(64 << 20), until_s=time.monotonic() + 0.05)
    assert time.monotonic() - began_s < 3


def test_a_server_may_wait_longer_than_the_silence_between_frames(
    pair: tuple[FrameStream, FrameStream],
) -> None:
    here, there = pair
    there.stall_s = 0.01
    timer = threading.Timer(0.1, lambda: here.send(Done(nbytes=3)))
    timer.start()
    assert there.receive(Done, idle=True).message.nbytes == 3
    timer.join()


def test_closing_wakes_who_waits(pair: tuple[FrameStream, FrameStream]) -> None:
    _, there = pair
    timer = threading.Timer(0.05, there.shutdown)
    timer.start()
    with pytest.raises(PeerLost):
        there.receive(Done, idle=True)
    timer.join()


def test_a_cap_on_the_rate_is_kept(unix: tuple[FrameStream, FrameStream]) -> None:
    here, there = unix
    slow = FrameStream(here.sock, bandwidth_bytes_per_s=1 << 20)
    began_s = time.monotonic()
    with meanwhile(lambda: slow.send(Done(), payload=bytes(200 << 10))):
        there.receive(Done, max_payload_bytes=1 << 20)
    assert time.monotonic() - began_s > 0.15


# ------------------------------------------------------------------ descriptors
def test_descriptors_travel_beside_the_first_byte(
    unix: tuple[FrameStream, FrameStream], leaves_nothing: None
) -> None:
    here, there = unix
    with MemoryFile(5) as file:
        file.map_shared().view[:] = b"bytes"
        fd = file.read_description()
        here.send(Done(nbytes=1), fds=(fd,), payload=b"abc")
        here.send(Done(nbytes=2))
        os.close(fd)
        frame = there.receive(Done, max_payload_bytes=3)
        assert bytes(frame.payload or b"") == b"abc"
        taken = frame.take_fd()
        assert not os.get_inheritable(taken)
        assert os.pread(taken, 5, 0) == b"bytes"
        os.close(taken)
        second = there.receive(Done)
        assert (second.message.nbytes, second.fds) == (2, ())


def test_descriptors_that_nobody_takes_are_closed(
    unix: tuple[FrameStream, FrameStream], leaves_nothing: None
) -> None:
    here, there = unix
    for _ in range(3):
        here.send(Done(), fds=(0, 0))
    there.receive(Done).close()
    with pytest.raises(WrongPeer, match="2 descriptors"):
        there.receive(Done).take_fd()
    there.receive(Done)  # thrown away


def test_descriptors_of_a_broken_frame_are_closed(
    unix: tuple[FrameStream, FrameStream], leaves_nothing: None
) -> None:
    here, there = unix
    here.send(State(json=b"{}"), fds=(0,))
    with pytest.raises(WrongPeer):
        there.receive(Done)
    here.send(Done(), fds=(0,), payload=b"abc")
    with pytest.raises(WrongPeer):
        there.receive(Done, into=bytearray(1), max_payload_bytes=3)


def test_a_frame_without_a_descriptor_says_so(
    unix: tuple[FrameStream, FrameStream],
) -> None:
    here, there = unix
    here.send(Done())
    with pytest.raises(WrongPeer, match="0 descriptors"):
        there.receive(Done).take_fd()


def test_more_descriptors_than_fit_are_refused_without_a_leak(
    unix: tuple[FrameStream, FrameStream], leaves_nothing: None
) -> None:
    here, there = unix
    here.send(Done(), fds=(0,) * 20)
    with pytest.raises(PeerLost, match="did not fit"):
        there.receive(Done)


# ------------------------------------------------------------------ event loops
def test_an_event_loop_reads_what_a_stream_sends_and_the_reverse() -> None:
    here, there = connected("unix")

    async def echo() -> None:
        reader, writer = await asyncio.open_connection(sock=there.sock)
        got = await read_message(reader, Done)
        writer.write(pack(Done(nbytes=got.nbytes + 1)))
        await writer.drain()
        with pytest.raises(PeerLost):
            await read_message(reader, Done)
        writer.close()

    def call() -> None:
        here.send(Done(nbytes=41))
        assert here.receive(Done).message.nbytes == 42
        here.close()

    with meanwhile(call):
        asyncio.run(echo())


def test_an_event_loop_refuses_what_is_no_message_of_its_kind() -> None:
    async def read(raw: bytes) -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(raw)
        reader.feed_eof()
        await read_message(reader, Done, max_body_bytes=100)

    for raw in (
        pack(State(json=b"")),
        pack(Done(), b"payload"),
        pack_header(101),
        b"x" * 40,
    ):
        with pytest.raises(WrongPeer):
            asyncio.run(read(raw))
    with pytest.raises(PeerLost):
        asyncio.run(read(pack(Done())[:-1]))


def test_a_refusal_is_a_message_like_any_other(
    pair: tuple[FrameStream, FrameStream],
) -> None:
    from tensorcast_dask.exceptions import Gone
    from tensorcast_dask.tensors.messages import Fault

    here, there = pair
    here.send(Refused(fault=Fault.of(Gone("destroyed", {"generation": 5}))))
    error = there.receive(Refused).message.fault.error()
    assert isinstance(error, Gone)
    assert error.data == {"generation": 5}


@given(
    st.lists(st.tuples(st.integers(0, 2**40), st.binary(max_size=300)), max_size=5),
    st.lists(st.integers(1, 120), min_size=1, max_size=30),
)
def test_frames_are_found_however_the_wire_cuts_them(
    sent: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    wire = b"".join(pack(Done(nbytes=n), data) for n, data in sent)
    here, there = connected("unix")
    with contextlib.closing(here), contextlib.closing(there):

        def drip() -> None:
            at = 0
            for number in range(len(wire)):
                step = cuts[number % len(cuts)]
                here.sock.sendall(wire[at : at + step])
                at += step
                if at >= len(wire):
                    return

        with meanwhile(drip):
            for nbytes, data in sent:
                frame = there.receive(Done, max_payload_bytes=300)
                assert frame.message.nbytes == nbytes
                assert bytes(frame.payload or b"") == data
