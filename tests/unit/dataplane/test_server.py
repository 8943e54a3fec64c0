from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tensorcast_dask.dataplane import hosts
from tensorcast_dask.dataplane.auth import Caller
from tensorcast_dask.dataplane.channel import Channel, Credentials, Prefer
from tensorcast_dask.dataplane.framing import FrameStream, pack
from tensorcast_dask.dataplane.server import Limits, Peer, Reply, Server
from tensorcast_dask.exceptions import (
    Gone,
    InvalidArgument,
    PeerLost,
    TensorCastError,
    WrongPeer,
)
from tensorcast_dask.tensors.frames import pack_header
from tensorcast_dask.tensors.ids import ClusterId, Epoch, Generation, RequestId
from tensorcast_dask.tensors.messages import (
    Abort,
    Challenge,
    Commit,
    Done,
    Hello,
    NodeCard,
    Proof,
    Refused,
    State,
    StateAsked,
    StoreRequest,
    Welcome,
    Write,
)
from tests.kit.eventually import eventually
from tests.kit.holders import TOKEN, node_card

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensorcast_dask.dataplane.framing import Payload

CLUSTER = ClusterId("c")


class Recorder:
    """A handler that keeps what it was asked and does what the request's rid says."""

    def __init__(self) -> None:
        self.asked: list[StoreRequest] = []
        self.got: list[bytes] = []
        self.ended: list[Peer] = []
        self.done = 0

    def handle(self, request: StoreRequest, payload: Payload, peer: Peer) -> Reply:
        self.asked.append(request)
        match request:
            case Write(rid="read"):
                self.got.append(bytes(payload.read()))
            case Write(rid="gone"):
                raise Gone("destroyed")
            case StateAsked(rid="defect"):
                raise ZeroDivisionError("a defect")
            case StateAsked(rid="peer"):
                return Reply(message=State(json=f"{peer.unix} {peer.pid}".encode()))
            case Abort():
                return Reply(message=Done(), payload=bytes(64 << 20), done=self._done)
            case _:
                pass
        return Reply(message=Done(nbytes=payload.nbytes), done=self._done)

    def _done(self) -> None:
        self.done += 1

    def closed(self, peer: Peer) -> None:
        self.ended.append(peer)
        if peer.hello.host == "raises":
            raise ZeroDivisionError("a defect at the end")


class Rig:
    """A server, its handler and what is needed to reach it."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        folder.chmod(0o700)
        self.handler = Recorder()
        self.card = node_card()
        self.token = TOKEN
        self.server = Server(
            self.handler,
            welcome=lambda: Welcome(
                card=self.card,
                cluster=CLUSTER,
                epoch=Epoch(1),
                chunk_bytes=1,
                small_bytes=1,
            ),
            token=lambda: self.token,
            limits=limits,
        )
        self.path = hosts.socket_path(folder)
        self.server.start()
        self.server.listen_unix(self.path)
        self.port = self.server.listen_tcp("127.0.0.1")
        self.card = node_card(
            socket=self.path, data_host="127.0.0.1", data_port=self.port
        )
        #: To be closed also when the test fails: what it leaks another test would be blamed for.
        self._mine: list[Channel | FrameStream] = []

    def close(self) -> None:
        for one in self._mine:
            one.close()

    def connect(self, prefer: Prefer = Prefer.UNIX, host: str = "host") -> Channel:
        channel = Channel.connect(
            self.card,
            credentials=Credentials(
                cluster=CLUSTER,
                token=TOKEN,
                host=host,  # type: ignore[arg-type]
                stall_s=5.0,
            ),
            prefer=prefer,
        )
        self._mine.append(channel)
        return channel

    def raw(self) -> FrameStream:
        """A bare TCP connection."""
        sock = socket.create_connection(("127.0.0.1", self.port))
        stream = FrameStream(sock, stall_s=10.0)
        self._mine.append(stream)
        return stream


@pytest.fixture
def limits() -> Limits:
    return Limits(handshake_s=5.0, stall_s=5.0, payload_bytes=1 << 20)


@pytest.fixture
def rig(tmp_path: Path, limits: Limits) -> Iterator[Rig]:
    made = Rig(tmp_path, limits)
    try:
        yield made
    finally:
        made.close()
        assert made.server.stop(within_s=10)


def write(rid: str, generation: int = 1) -> Write:
    return Write(rid=RequestId(rid), generation=Generation(generation), offset=0)


def ask(rid: str) -> StateAsked:
    return StateAsked(rid=RequestId(rid))


@pytest.mark.parametrize("prefer", [Prefer.UNIX, Prefer.TCP])
def test_requests_reach_the_handler_in_order(rig: Rig, prefer: Prefer) -> None:
    with rig.connect(prefer) as channel:
        for number in range(5):
            channel.call(write("read", number), expect=Done, payload=bytes([number]))
    assert [r.generation for r in rig.handler.asked] == [0, 1, 2, 3, 4]  # type: ignore[union-attr]
    assert rig.handler.got == [bytes([n]) for n in range(5)]
    eventually(lambda: len(rig.handler.ended) == 1, within_s=10)


def test_the_handler_knows_who_asks(rig: Rig) -> None:
    import os

    with rig.connect() as channel:
        told = channel.call(ask("peer"), expect=State).message.json
    assert told == f"True {os.getpid()}".encode()


def test_a_payload_that_nobody_read_is_skipped(rig: Rig) -> None:
    with rig.connect() as channel:
        for _ in range(3):
            frame = channel.call(write("leave"), expect=Done, payload=bytes(500_000))
            assert frame.message.nbytes == 500_000


def test_a_typed_error_is_an_answer_and_the_payload_is_skipped(rig: Rig) -> None:
    with rig.connect() as channel:
        with pytest.raises(Gone):
            channel.call(write("gone"), expect=Done, payload=bytes(500_000))
        channel.call(write("read"), expect=Done, payload=b"next")
    assert rig.handler.got == [b"next"]


def test_a_defect_is_logged_answered_and_ends_only_its_connection(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    with rig.connect() as channel, caplog.at_level(logging.ERROR):
        with pytest.raises(TensorCastError, match="ZeroDivisionError"):
            channel.call(ask("defect"), expect=State)
        eventually(lambda: not channel.usable, within_s=10)
    assert "StateAsked" in caplog.text
    with rig.connect() as channel:
        channel.call(write("leave"), expect=Done)


def test_a_defect_at_the_end_of_a_connection_is_only_logged(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.connect(host="raises").close()
    eventually(lambda: "was not handled" in caplog.text, within_s=10)
    rig.connect().close()


def test_what_was_sent_from_is_free_again_also_when_the_peer_goes(rig: Rig) -> None:
    channel = rig.connect(Prefer.TCP)
    abort = Abort(rid=RequestId("1"), generation=Generation(1))
    with channel.conversation() as stream:
        stream.send(abort)
        eventually(lambda: rig.handler.asked, within_s=10)
    channel.close()
    eventually(lambda: rig.handler.done == 1, within_s=10)


# ------------------------------------------------------------------ strangers
def hello(card: NodeCard, **changes: object) -> Hello:
    import msgspec

    made = Hello(cluster=CLUSTER, node=card.node, incarnation=card.incarnation)
    return msgspec.structs.replace(made, **changes)


def test_nobody_is_served_before_the_proof(rig: Rig) -> None:
    raw = rig.raw()
    raw.send(ask("peer"))
    assert isinstance(raw.receive(Refused).message, Refused)
    with pytest.raises(PeerLost):
        raw.receive(Refused)
    assert rig.handler.asked == []
    raw.close()


def test_a_request_in_place_of_the_proof_is_refused(rig: Rig) -> None:
    raw = rig.raw()
    caller = Caller(hello(rig.card), token=TOKEN)
    raw.send(caller.hello)
    raw.receive(Challenge)
    raw.send(ask("peer"))
    assert "no message" in raw.receive(Refused).message.fault.message
    assert rig.handler.asked == []
    raw.close()


def test_a_false_proof_is_refused(rig: Rig) -> None:
    raw = rig.raw()
    caller = Caller(hello(rig.card), token=TOKEN)
    raw.send(caller.hello)
    raw.receive(Challenge)
    raw.send(Proof(proof=b"x" * 32))
    with pytest.raises(WrongPeer):
        raise raw.receive(Refused).message.fault.error()
    raw.close()
    assert rig.handler.ended == []


def test_without_a_token_there_are_no_tcp_callers(rig: Rig) -> None:
    rig.token = b""
    with pytest.raises(WrongPeer, match="adopted"):
        rig.connect(Prefer.TCP)
    rig.connect(Prefer.UNIX).close()


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        pack_header(200 << 20),
        pack_header(16, 1 << 40),
        pack(Hello(), b"payload"),
        b"\x16\x03\x01\x02\x00" * 10,
    ],
)
def test_strangers_noise_is_refused_without_an_allocation(
    rig: Rig, noise: bytes
) -> None:
    raw = rig.raw()
    raw.sock.sendall(noise)
    with contextlib.suppress(PeerLost):
        assert raw.receive(Refused).message.fault.kind == "WrongPeer"
    raw.close()
    rig.connect(Prefer.TCP).close()


def test_a_second_handshake_ends_the_connection(rig: Rig) -> None:
    with rig.connect() as channel:
        with pytest.raises(WrongPeer, match="handshake"):
            channel.call(Proof(proof=b""), expect=Done)
        eventually(lambda: not channel.usable, within_s=10)


class TestImpatient:
    @pytest.fixture
    def limits(self) -> Limits:
        return Limits(handshake_s=0.2, strangers=3, stall_s=0.2, connections=6)

    def test_a_stranger_that_says_nothing_is_let_go(self, rig: Rig) -> None:
        raw = rig.raw()
        began_s = time.monotonic()
        told: object = None
        with contextlib.suppress(PeerLost):
            told = raw.receive(Refused).message
        assert told is None or isinstance(told, Refused)
        with pytest.raises(PeerLost):
            raw.receive(Refused)
        assert time.monotonic() - began_s < 5
        raw.close()
        eventually(lambda: rig.server.connections == 0, within_s=10)

    def test_a_stranger_that_drips_is_let_go_too(self, rig: Rig) -> None:
        raw = rig.raw()
        whole = pack(hello(rig.card))

        def drip() -> None:
            for byte in whole:
                raw.sock.sendall(bytes([byte]))
                time.sleep(0.05)  # scene: a peer that takes its time

        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            drip()
        raw.close()

    def test_strangers_do_not_crowd_out_peers(self, rig: Rig) -> None:
        strangers = [rig.raw() for _ in range(5)]
        for prefer in (Prefer.TCP, Prefer.UNIX):
            with rig.connect(prefer) as channel:
                channel.call(write("leave"), expect=Done)
        for raw in strangers:
            raw.close()

    def test_a_peer_may_be_silent_between_requests(self, rig: Rig) -> None:
        with rig.connect() as channel:
            channel.call(write("leave"), expect=Done)
            time.sleep(0.5)  # scene: longer than every limit
            channel.call(write("leave"), expect=Done)

    def test_a_peer_that_is_silent_inside_a_frame_is_dropped(self, rig: Rig) -> None:
        with rig.connect() as channel:
            channel.stream.sock.sendall(pack_header(50)[:9])
            eventually(lambda: rig.handler.ended, within_s=10)

    def test_a_slow_peer_holds_up_nobody(self, rig: Rig) -> None:
        slow, quick = rig.connect(), rig.connect()
        slow.stream.sock.sendall(pack(write("read"), bytes(1000))[:100])
        quick.call(write("leave"), expect=Done)
        quick.close()
        slow.close()


class TestOneStranger:
    @pytest.fixture
    def limits(self) -> Limits:
        return Limits(handshake_s=20, strangers=1, stall_s=20)

    def test_who_was_welcomed_is_no_stranger_any_more(self, rig: Rig) -> None:
        held = [rig.connect() for _ in range(100)]
        for channel in held:
            channel.call(write("x"), expect=Done)
            channel.close()


class TestFull:
    @pytest.fixture
    def limits(self) -> Limits:
        # Patient: on a busy machine nobody is let go but by the number.
        return Limits(handshake_s=20, strangers=3, stall_s=20, connections=6)

    def test_connections_have_a_limit(self, rig: Rig) -> None:
        held = [rig.connect() for _ in range(6)]
        with pytest.raises(PeerLost):
            rig.connect()
        held.pop().close()
        eventually(lambda: rig.server.connections == 5, within_s=10)
        rig.connect().close()
        for channel in held:
            channel.close()


def test_a_payload_above_the_limit_is_refused_unread(rig: Rig) -> None:
    with rig.connect() as channel, pytest.raises(PeerLost):
        channel.call(
            Commit(
                rid=RequestId("1"), generation=Generation(1), index=b"", inline=True
            ),
            expect=Done,
            payload=bytes(2 << 20),
        )
    assert rig.handler.asked == []


# ------------------------------------------------------------------ life
def test_stopping_ends_listeners_connections_and_threads(
    tmp_path: Path, leaves_nothing: None
) -> None:
    rig = Rig(tmp_path, Limits())
    held = [rig.connect(p) for p in (Prefer.UNIX, Prefer.TCP)]
    stranger = rig.raw()
    assert rig.server.stop(within_s=10)
    assert rig.server.connections == 0
    assert not (tmp_path / hosts.SOCKET_NAME).exists()
    with pytest.raises(PeerLost):
        held[0].call(ask("peer"), expect=State)
    for prefer in (Prefer.UNIX, Prefer.TCP):
        with pytest.raises(PeerLost):
            rig.connect(prefer)
    for channel in held:
        channel.close()
    stranger.close()
    assert rig.server.stop()


def test_a_server_that_never_started_stops(tmp_path: Path) -> None:
    rig = Server(
        Recorder(),
        welcome=lambda: pytest.fail("nobody called"),
        token=lambda: b"",
    )
    assert rig.stop()


def test_the_data_port_can_move(rig: Rig) -> None:
    with rig.connect(Prefer.TCP) as before:
        rig.port = rig.server.listen_tcp("127.0.0.1")
        rig.card = node_card(socket=rig.path, data_host="127.0.0.1", data_port=rig.port)
        before.call(write("leave"), expect=Done)  # what is open goes on
        with rig.connect(Prefer.TCP) as after:
            after.call(write("leave"), expect=Done)
    rig.server.close_tcp()
    with pytest.raises(PeerLost):
        rig.connect(Prefer.TCP)
    rig.connect(Prefer.UNIX).close()


def test_a_port_is_taken_from_the_range(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidArgument, match="data_ports"):
            rig.server.listen_tcp("127.0.0.1", ports=(port, port))
        # The former listener still listens.
        rig.connect(Prefer.TCP).close()
        found = rig.server.listen_tcp("127.0.0.1", ports=(port, port + 20))
        assert port < found <= port + 20


def test_a_dead_socket_file_is_replaced(tmp_path: Path, leaves_nothing: None) -> None:
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / hosts.SOCKET_NAME))
    dead.close()
    rig = Rig(tmp_path, Limits())
    rig.connect().close()
    assert rig.server.stop(within_s=10)


def test_the_end_may_be_asked_for_by_a_request(rig: Rig) -> None:
    stopped: list[bool] = []
    before = rig.handler.handle

    def handle(request: StoreRequest, payload: Payload, peer: Peer) -> Reply:
        if request == ask("end"):
            stopped.append(rig.server.stop(within_s=5))
        return before(request, payload, peer)

    rig.handler.handle = handle  # type: ignore[method-assign]
    with rig.connect() as channel, contextlib.suppress(PeerLost):
        channel.call(ask("end"), expect=Done)
    eventually(lambda: stopped == [True], within_s=10)
    eventually(lambda: rig.server.connections == 0, within_s=10)


def test_the_server_outlives_a_lack_of_descriptors(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    from pathlib import Path

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    with contextlib.ExitStack() as held:
        caller = held.enter_context(socket.socket(socket.AF_UNIX))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + 4, hard))
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with contextlib.suppress(OSError):
            while True:
                held.callback(os.close, os.dup(caller.fileno()))
        caller.connect(rig.path)
        eventually(lambda: "cannot accept" in caplog.text, within_s=10)
    with rig.connect() as channel:
        channel.call(write("leave"), expect=Done)


def test_other_limits_hold_for_those_who_come_later(rig: Rig) -> None:
    rig.server.configure(limits=Limits(payload_bytes=5), allow_uids=(1,))
    with rig.connect() as channel, pytest.raises(PeerLost):
        channel.call(write("read"), expect=Done, payload=b"too long")
    assert rig.handler.got == []
