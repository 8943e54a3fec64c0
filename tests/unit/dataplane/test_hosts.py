from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from tensorcast_dask.dataplane import hosts
from tensorcast_dask.dataplane.hosts import PidWatch
from tensorcast_dask.exceptions import InvalidArgument, OwnershipError
from tests.kit.eventually import eventually
from tests.kit.holders import node_card

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tensorcast_dask.tensors.messages import NodeCard


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits until it is ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def card_of(pid: int) -> NodeCard:
    return msgspec.structs.replace(
        node_card(), pid=pid, pid_start=hosts.process_start(pid)
    )


def test_the_run_directory_is_made_for_this_user_alone(tmp_path: Path) -> None:
    made = hosts.run_directory(str(tmp_path / "a" / "b"))
    assert made == tmp_path / "a" / "b"
    assert made.stat().st_mode & 0o777 == 0o700
    assert hosts.run_directory(str(made)) == made


def test_the_environment_names_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    monkeypatch.delenv("TENSORCAST_RUN_DIR", raising=False)
    assert hosts.run_directory() == tmp_path / "xdg" / "tensorcast"
    monkeypatch.setenv("TENSORCAST_RUN_DIR", str(tmp_path / "own"))
    assert hosts.run_directory() == tmp_path / "own"


def test_without_either_the_temporary_folder_has_one_a_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TENSORCAST_RUN_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert str(hosts.run_directory()) == f"/tmp/tensorcast-{os.getuid()}"


def test_a_link_is_no_run_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OwnershipError, match="link"):
        hosts.run_directory(str(tmp_path / "link"))


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    with pytest.raises(OwnershipError, match="chmod 700"):
        hosts.run_directory(str(open_to_all))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make such a directory")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o700)
    os.chown(foreign, 65534, 65534)
    with pytest.raises(OwnershipError, match="another user"):
        hosts.run_directory(str(foreign))


def test_a_cluster_has_a_short_folder_whatever_its_name(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    one = hosts.cluster_folder(tmp_path, "tcp://10.0.0.1:8786")
    assert one == hosts.cluster_folder(tmp_path, "tcp://10.0.0.1:8786")
    assert one != hosts.cluster_folder(tmp_path, "tcp://10.0.0.2:8786")
    assert len(one.name) == 12


def test_a_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="TENSORCAST_RUN_DIR"):
        hosts.socket_path(tmp_path / ("d" * 90))
    assert hosts.socket_path(tmp_path).endswith("/sock")


def test_a_host_is_its_boot_and_its_run_directory(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    one.mkdir()
    two.mkdir()
    assert hosts.host_id(one) == hosts.host_id(one)
    assert hosts.host_id(one) != hosts.host_id(two)
    assert hosts.host_id(one, "chosen") == "chosen"


def test_a_card_is_read_as_it_was_written(tmp_path: Path) -> None:
    card = card_of(os.getpid())
    hosts.write_card(tmp_path, card)
    assert hosts.read_card(tmp_path) == card
    assert (tmp_path / hosts.CARD_NAME).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [hosts.CARD_NAME]


def test_a_card_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert hosts.read_card(tmp_path) is None
    (tmp_path / hosts.CARD_NAME).write_text('{"node": ')
    assert hosts.read_card(tmp_path) is None


def test_only_the_very_process_of_a_card_counts_as_alive(
    child: subprocess.Popen[bytes],
) -> None:
    card = card_of(child.pid)
    assert hosts.is_alive(card)
    later = msgspec.structs.replace(card, pid_start=card.pid_start + 1)
    assert not hosts.is_alive(later), "the pid was given to another process"
    child.kill()
    eventually(lambda: not hosts.is_alive(card), within_s=10)


def test_budgets_are_those_of_stores_that_live_of_every_cluster(
    tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    tmp_path.chmod(0o700)
    for name, pid, budget in (("a", os.getpid(), 5), ("b", child.pid, 7)):
        folder = hosts.node_folder(hosts.cluster_folder(tmp_path, name), name)
        card = msgspec.structs.replace(card_of(pid), host_memory_bytes=budget)
        hosts.write_card(folder, card)
    lender = hosts.node_folder(hosts.cluster_folder(tmp_path, "a"), "lender")
    hosts.write_card(lender, card_of(os.getpid()))
    assert sorted(hosts.budgets(tmp_path)) == [5, 7]
    child.kill()
    eventually(lambda: hosts.budgets(tmp_path) == [5], within_s=10)


def test_stores_that_live_are_listed_and_dead_ones_cleaned(
    tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    tmp_path.chmod(0o700)
    live, dead, starting = (
        hosts.node_folder(tmp_path, name) for name in ("live", "dead", "starting")
    )
    hosts.write_card(live, card_of(os.getpid()))
    hosts.write_card(dead, card_of(child.pid))
    assert len(hosts.cards(tmp_path)) == 2
    child.kill()
    child.wait()
    assert [card.pid for card in hosts.cards(tmp_path)] == [os.getpid()]
    assert hosts.clean_dead(tmp_path) == ["dead"]
    assert live.exists()
    assert starting.exists()
    assert hosts.cards(tmp_path / "missing") == []


def test_the_end_of_a_process_is_seen(child: subprocess.Popen[bytes]) -> None:
    watch = PidWatch(child.pid, hosts.process_start(child.pid))
    assert not watch.is_gone()
    assert watch.fileno() >= 0
    child.send_signal(signal.SIGKILL)
    eventually(watch.is_gone, within_s=10)
    watch.close()


def test_a_pid_in_other_hands_counts_as_gone(child: subprocess.Popen[bytes]) -> None:
    assert PidWatch(child.pid, hosts.process_start(child.pid) + 1).is_gone()


def test_a_process_that_ended_before_is_gone(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    assert PidWatch(child.pid).is_gone()
    assert hosts.process_start(child.pid) == 0


def test_a_zombie_is_gone(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert hosts.process_start(child.pid) == 0
    assert PidWatch(child.pid).is_gone()


def test_the_peer_of_a_unix_socket_is_known(tmp_path: Path) -> None:
    here, there = socket.socketpair()
    with here, there:
        assert hosts.peer_credentials(here) == (os.getpid(), os.getuid(), os.getgid())
        watch = PidWatch.of_peer(here)
        assert watch.pid == os.getpid()
        assert not watch.is_gone()
        watch.close()
        assert watch.is_gone()


def test_a_process_hidden_by_a_container_is_never_known_to_have_ended() -> None:
    watch = PidWatch(0)
    assert watch.fileno() == -1
    assert not watch.is_gone()
    watch.close()
    assert watch.is_gone()


def test_a_store_whose_pid_is_hidden_lives_while_somebody_listens(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o700)
    folder = hosts.node_folder(tmp_path, "hidden")
    card = msgspec.structs.replace(
        node_card(socket=hosts.socket_path(folder)), pid=1 << 22, pid_start=1
    )
    hosts.write_card(folder, card)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(card.socket)
        listener.listen(0)
        assert hosts.cards(tmp_path) == [card]
        with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
            for sock in (one, two):  # a full queue is a listener too
                sock.settimeout(0)
                with contextlib.suppress(BlockingIOError):
                    sock.connect(card.socket)
            assert hosts.is_alive(card)
        assert hosts.clean_dead(tmp_path) == []
    assert not hosts.is_alive(card)
    assert hosts.clean_dead(tmp_path) == ["hidden"]
