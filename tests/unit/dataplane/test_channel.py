from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from tensorcast_dask.dataplane.channel import Channel, ChannelPool, Prefer
from tensorcast_dask.dataplane.server import Limits
from tensorcast_dask.exceptions import (
    DeadlineExceeded,
    Gone,
    InvalidArgument,
    PeerLost,
    ReachError,
    StaleOwner,
    Unimplemented,
    WrongPeer,
)
from tensorcast_dask.tensors.ids import RequestId
from tensorcast_dask.tensors.messages import (
    Chunk,
    Done,
    Opened,
    ReadChunk,
    Reserved,
    State,
    StateAsked,
    SumsAsked,
)
from tests.kit.certificates import mint_certificates
from tests.kit.eventually import eventually
from tests.kit.holders import GENERATION, Break, Served, serve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ASK = StateAsked(rid=RequestId("1"))


def chunk(number: int) -> ReadChunk:
    return ReadChunk(rid=RequestId("2"), generation=GENERATION, chunk=number)


@pytest.fixture
def served() -> Iterator[Served]:
    with serve(b"0123456789" * 10_000, chunk_bytes=40_000) as served:
        yield served


def connect(served: Served, **how: object) -> Channel:
    return Channel.connect(
        served.card,
        credentials=served.credentials,
        **how,  # type: ignore[arg-type]
    )


def test_the_same_host_is_reached_by_its_socket(served: Served) -> None:
    with connect(served) as channel:
        assert channel.via == "unix"
        assert channel.welcome.card == served.card
        assert channel.call(ASK, expect=State).message == State(json=b"{}")


def test_another_host_is_reached_by_tcp(served: Served) -> None:
    with Channel.connect(
        served.card, credentials=served.credentials_with(host="elsewhere")
    ) as channel:
        assert channel.via == "tcp"
        assert "another host" in channel.why
        assert channel.call(ASK, expect=State).message == State(json=b"{}")


def test_equal_host_names_prove_nothing_without_the_socket(
    served: Served, tmp_path: Path
) -> None:
    card = msgspec.structs.replace(served.card, socket=str(tmp_path / "missing"))
    with Channel.connect(card, credentials=served.credentials) as channel:
        assert channel.via == "tcp"
        assert "did not prove" in channel.why


def test_another_node_behind_the_socket_proves_nothing(served: Served) -> None:
    with serve(b"other") as other:
        other.card = msgspec.structs.replace(other.card, node="f" * 32)
        card = msgspec.structs.replace(served.card, socket=other.card.socket)
        with Channel.connect(card, credentials=served.credentials) as channel:
            assert channel.via == "tcp"
            assert channel.welcome.card.node == served.card.node


def test_who_must_have_the_socket_gets_an_error_instead(served: Served) -> None:
    card = msgspec.structs.replace(served.card, socket="")
    with pytest.raises(PeerLost):
        Channel.connect(card, credentials=served.credentials, prefer=Prefer.UNIX)


def test_a_stale_incarnation_is_refused_on_both_ways(served: Served) -> None:
    card = msgspec.structs.replace(served.card, incarnation=99)
    for prefer in (Prefer.UNIX, Prefer.TCP):
        with pytest.raises(StaleOwner) as caught:
            Channel.connect(card, credentials=served.credentials, prefer=prefer)
        assert caught.value.data["incarnation"] == 3


def test_incarnation_zero_takes_any_life(served: Served) -> None:
    card = msgspec.structs.replace(served.card, incarnation=0)
    Channel.connect(card, credentials=served.credentials).close()


def test_a_wrong_cluster_is_refused(served: Served) -> None:
    with pytest.raises(WrongPeer, match="cluster"):
        Channel.connect(
            served.card, credentials=served.credentials_with(cluster="other")
        )


def test_nobody_at_the_address_is_peer_lost(served: Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    card = msgspec.structs.replace(served.card, data_port=port)
    with pytest.raises(PeerLost, match="cannot be reached"):
        Channel.connect(card, credentials=served.credentials, prefer=Prefer.TCP)
    without = msgspec.structs.replace(card, data_port=0)
    with pytest.raises(PeerLost, match="no data port"):
        Channel.connect(without, credentials=served.credentials, prefer=Prefer.TCP)


def test_who_accepts_and_says_nothing_meets_the_deadline(served: Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        card = msgspec.structs.replace(served.card, data_port=port)
        with pytest.raises(DeadlineExceeded):
            Channel.connect(
                card,
                credentials=served.credentials,
                prefer=Prefer.TCP,
                until_s=time.monotonic() + 0.1,
            )


def test_a_refusal_raises_the_peers_error_and_leaves_the_channel(
    served: Served,
) -> None:
    served.break_at(1, Break.REFUSE)
    with connect(served) as channel:
        with pytest.raises(Gone):
            channel.call(chunk(1), expect=Chunk, max_payload_bytes=40_000)
        with pytest.raises(Unimplemented):
            channel.call(
                SumsAsked(rid=RequestId("3"), generation=GENERATION), expect=Done
            )
        into = bytearray(40_000)
        got = channel.call(
            chunk(0), expect=Chunk, into=into, max_payload_bytes=len(into)
        )
        assert got.nbytes == 40_000
        assert into == served.chunk(0)


def test_an_answer_of_another_type_breaks_the_channel(served: Served) -> None:
    with connect(served) as channel:
        with pytest.raises(WrongPeer):
            channel.call(ASK, expect=Reserved)
        with pytest.raises(PeerLost, match="broke earlier"):
            channel.call(ASK, expect=State)


def test_a_deadline_inside_a_call_breaks_the_channel(served: Served) -> None:
    served.break_at(1, Break.STALL)
    with connect(served) as channel:
        with pytest.raises(DeadlineExceeded):
            channel.call(
                chunk(1),
                expect=Chunk,
                max_payload_bytes=40_000,
                until_s=time.monotonic() + 0.1,
            )
        assert not channel.usable


def test_a_descriptor_comes_with_the_answer(served: Served) -> None:
    from tensorcast_dask.tensors.messages import Open

    with connect(served) as channel:
        frame = channel.call(
            Open(rid=RequestId("4"), generation=GENERATION, deadline_s=5),
            expect=Opened,
        )
        fd = frame.take_fd()
        assert os.pread(fd, 10, 0) == b"0123456789"
        os.close(fd)


def test_threads_share_a_channel_one_request_at_a_time(served: Served) -> None:
    with connect(served) as channel:
        failed: list[str] = []

        def ask(number: int) -> None:
            for _ in range(30):
                into = bytearray(40_000)
                channel.call(
                    chunk(number), expect=Chunk, into=into, max_payload_bytes=40_000
                )
                if into[: len(served.chunk(number))] != served.chunk(number):
                    failed.append(f"chunk {number}")

        threads = [threading.Thread(target=ask, args=(n,)) for n in (0, 1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not failed


# ------------------------------------------------------------------ TLS
def test_under_tls_both_sides_verify_and_the_challenge_is_still_made() -> None:
    files = mint_certificates()
    with serve(b"secret" * 20_000, chunk_bytes=100_000, tls=files) as served:
        with connect(served, prefer=Prefer.TCP) as channel:
            into = bytearray(100_000)
            channel.call(chunk(0), expect=Chunk, into=into, max_payload_bytes=100_000)
            assert into == served.chunk(0)
        with pytest.raises(PeerLost):
            Channel.connect(
                served.card,
                credentials=served.credentials_with(tls=mint_certificates()),
                prefer=Prefer.TCP,
            )
        with pytest.raises(WrongPeer):
            Channel.connect(
                served.card,
                credentials=served.credentials_with(token=b"x" * 32),
                prefer=Prefer.TCP,
            )
        with pytest.raises(InvalidArgument, match="certificates"):
            Channel.connect(
                served.card,
                credentials=served.credentials_with(tls=None),
                prefer=Prefer.TCP,
            )


# ------------------------------------------------------------------ pools
def test_a_pool_lends_the_same_channel_again(served: Served) -> None:
    pool = ChannelPool(served.credentials)
    with pool.channel(served.card) as first:
        first.call(ASK, expect=State)
    with pool.channel(served.card) as second:
        assert second is first
        with pool.channel(served.card) as third:
            assert third is not second
    assert served.server.connections == 2
    pool.close()
    eventually(lambda: served.server.connections == 0, within_s=10)


def test_a_channel_whose_peer_hung_up_is_not_lent(served: Served) -> None:
    pool = ChannelPool(served.credentials)
    with pool.channel(served.card) as first:
        pass
    served.server.stop()
    eventually(lambda: not first.usable, within_s=10)
    with pytest.raises(PeerLost), pool.channel(served.card):
        pass
    pool.close()


def test_a_broken_channel_does_not_come_back(served: Served) -> None:
    pool = ChannelPool(served.credentials)
    with pytest.raises(WrongPeer):
        pool.call(served.card, ASK, expect=Reserved)
    assert pool.call(served.card, ASK, expect=State).message == State(json=b"{}")
    pool.close()


def test_idle_channels_are_closed(served: Served) -> None:
    pool = ChannelPool(served.credentials, idle_s=0.0)
    with pool.channel(served.card) as first:
        pass
    with pool.channel(served.card) as second:
        assert second is not first
    eventually(lambda: served.server.connections == 1, within_s=10)
    pool.close()


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads that change places all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_what_a_crowd_shares_is_never_closed_under_its_user_nor_left_open(
    served: Served, hasty: None
) -> None:
    """Idle channels are dropped at each look, and the pool is closed amid it all."""
    for _ in range(2):
        pool = ChannelPool(served.credentials, idle_s=0.0)
        wrong: list[BaseException] = []
        ended: list[BaseException] = []

        def use(
            pool: ChannelPool = pool,
            wrong: list[BaseException] = wrong,
            ended: list[BaseException] = ended,
        ) -> None:
            for number in itertools.count():
                try:
                    with pool.channel(served.card) as channel:
                        channel.call(ASK, expect=State)
                except PeerLost as error:
                    wrong.append(error)
                    return
                except ReachError as error:
                    ended.append(error)
                    return
                if number == 150:
                    pool.close()

        crowd = [threading.Thread(target=use) for _ in range(6)]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join(60)
        assert not wrong
        assert len(ended) == 6
        eventually(lambda: served.server.connections == 0, within_s=20)


def test_each_life_of_a_node_has_channels_of_its_own(served: Served) -> None:
    pool = ChannelPool(served.credentials)
    with pool.channel(served.card):
        pass
    later = msgspec.structs.replace(served.card, incarnation=4)
    with pytest.raises(StaleOwner), pool.channel(later):
        pass
    served.card = later
    with pool.channel(later) as channel:
        assert channel.welcome.card.incarnation == 4
    pool.close()


def test_new_credentials_are_used_from_then_on(served: Served) -> None:
    pool = ChannelPool(served.credentials)
    with pool.channel(served.card, prefer=Prefer.TCP):
        pass
    pool.renew(served.credentials_with(token=b"x" * 32))
    with pytest.raises(WrongPeer), pool.channel(served.card, prefer=Prefer.TCP):
        pass
    pool.close()


def test_a_closed_pool_says_so_and_takes_nothing_back(served: Served) -> None:
    pool = ChannelPool(served.credentials)
    with pool.channel(served.card) as lent:
        pool.close()
        pool.close()
        lent.call(ASK, expect=State)
    assert not lent.usable
    with pytest.raises(ReachError, match="closed"), pool.channel(served.card):
        pass


def test_a_forked_child_is_told_to_use_spawn(served: Served) -> None:
    code = textwrap.dedent(
        f"""
        import msgspec, os
        from tensorcast_dask.dataplane.channel import ChannelPool, Credentials
        from tensorcast_dask.exceptions import RequestError
        from tensorcast_dask.tensors.messages import NodeCard, State, StateAsked
        card = msgspec.json.decode({msgspec.json.encode(served.card)!r}, type=NodeCard)
        pool = ChannelPool(Credentials(host=card.host))
        ask = StateAsked(rid="1")
        with pool.channel(card) as channel:
            channel.call(ask, expect=State)
            pid = os.fork()
            if pid == 0:
                told = []
                for use in (
                    lambda: channel.call(ask, expect=State),
                    lambda: pool.call(card, ask, expect=State),
                ):
                    try:
                        use()
                    except RequestError as error:
                        told.append("spawn" in str(error))
                channel.close()
                pool.close()
                os._exit(0 if told == [True, True] else 1)
            assert os.waitpid(pid, 0)[1] == 0
            channel.call(ask, expect=State)  # the child took nothing away
        print("fine")
        """
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.stdout == "fine\n", child.stderr


def test_a_slow_connection_is_slow_alone() -> None:
    data = bytes(400_000)
    limits = Limits(bandwidth_bytes_per_s=1 << 20)
    with serve(data, chunk_bytes=len(data), limits=limits) as served:
        slow = connect(served)
        began_s = time.monotonic()
        thread = threading.Thread(
            target=lambda: slow.call(
                chunk(0), expect=Chunk, max_payload_bytes=len(data)
            )
        )
        thread.start()
        with connect(served) as quick:
            quick.call(ASK, expect=State)
            assert time.monotonic() - began_s < 0.3
        thread.join(20)
        slow.close()


def test_an_idle_channel_that_ends_under_the_request_costs_no_error(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ChannelPool(served.credentials)
    with pool.channel(served.card) as first:
        pass
    # The peer's end crosses the request on the wire: the look before saw nothing yet.
    monkeypatch.setattr(Channel, "usable", property(lambda c: not c._broken))
    first.stream.sock.shutdown(socket.SHUT_RDWR)
    assert pool.call(served.card, ASK, expect=State).message == State(json=b"{}")
    assert served.server.connections == 1
    pool.close()


def test_a_stall_is_not_waited_for_twice(served: Served) -> None:
    served.break_at(1, Break.STALL)
    pool = ChannelPool(served.credentials_with(stall_s=0.3))
    pool.call(served.card, ASK, expect=State)
    began_s = time.monotonic()
    with pytest.raises(PeerLost, match="stalled"):
        pool.call(served.card, chunk(1), expect=Chunk, max_payload_bytes=40_000)
    # Up to twice the silence: half a chunk came at its beginning.
    assert time.monotonic() - began_s < 1.1
    pool.close()


def test_a_client_without_linux_imports_what_it_needs_for_tcp() -> None:
    code = textwrap.dedent(
        """
        import os, random, select, socket, sys, tempfile
        sys.platform = "darwin"
        for name in ("MSG_CMSG_CLOEXEC", "CMSG_SPACE", "SO_PEERCRED", "TCP_KEEPIDLE",
                     "TCP_CONGESTION", "TCP_USER_TIMEOUT", "AF_UNIX"):
            delattr(socket, name)
        for name in ("sched_getaffinity", "register_at_fork", "pidfd_open",
                     "memfd_create", "sendfile"):
            delattr(os, name)
        sys.modules["fcntl"] = sys.modules["resource"] = None
        from tensorcast_dask.dataplane import (
            auth, channel, congestion, framing, hosts, link, maps, memory, remote,
            transports,
        )
        from tensorcast_dask.exceptions import UnsupportedPlatform
        target = bytearray(3)
        memory.copy(target, b"abc")
        for use in (lambda: maps.PrivateMap(0, 10, close_fd=False),
                    lambda: remote.read_process(1, 1, target)):
            try:
                use()
            except UnsupportedPlatform:
                print("said so")
        """
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.stdout == "said so\nsaid so\n", child.stderr
