"""The command line on a cluster that `up -d` started, from `up` to `down`."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tensorcast_dask as tc
from tensorcast_dask.cli import main
from tests.kit.clusters import free_port
from tests.kit.commands import Commands
from tests.kit.eventually import eventually
from tests.kit.local import stores_in

pytestmark = pytest.mark.timeout(180)  # many commands, each a process


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    tensorcast = Commands(tmp_path_factory.mktemp("c"))
    words = ["up", "-d", "-n", "2", "-m", "64 MiB", "--disk", "disk", "--json"]
    started = json.loads(tensorcast.run(*words)[0])
    try:
        assert started["scheduler"].startswith("tcp://")
        eventually(
            lambda: len(tensorcast.json("nodes")) == 2, within_s=30, what="two nodes"
        )
        yield tensorcast
    finally:
        tensorcast.run("down")
    eventually(
        lambda: not stores_in(tensorcast.run_dir), within_s=20, what="no store is left"
    )


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Commands on a machine without a cluster."""
    tensorcast = Commands(tmp_path_factory.mktemp("c"))
    yield tensorcast
    for card in stores_in(tensorcast.run_dir):  # of a test that failed
        os.kill(card.pid, signal.SIGTERM)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    save_file(
        {
            "w": np.arange(300_000, dtype=np.float32).reshape(-1, 100),
            "b": np.ones(7, np.float16),
        },
        path,
    )
    return path


# ------------------------------------------------------------------ on a cluster
def test_a_file_goes_in_is_found_described_and_comes_out_bit_for_bit(
    up: Commands, model: Path, tmp_path: Path
) -> None:
    put = up.json("put", str(model), "round/trip", "-l", "team=a", "--publish")
    assert (put["id"], put["version"], put["tensors"]) == ("round/trip", 1, 2)
    (listed,) = up.json("ls", "round/", "-l", "team=a")
    assert listed["labels"] == {"team": "a"}
    assert up.json("ls", "round/", "-l", "team=b") == []
    shown = up.json("show", "round/trip")
    assert [t["name"] for t in shown["tensors"]] == ["w", "b"]
    assert len(shown["replicas"]) == 1
    copy = tmp_path / "copy.safetensors"
    assert up.json("get", "round/trip", str(copy))["path"] == str(copy)
    ours, theirs = load_file(copy), load_file(model)
    assert {k: v.tobytes() for k, v in ours.items()} == {
        k: v.tobytes() for k, v in theirs.items()
    }
    query = "SELECT id, version FROM versions WHERE id = 'round/trip'"
    assert up.json("sql", query) == [{"id": "round/trip", "version": 1}]
    assert up.json("rm", "round/trip")["versions"] == [1]
    assert up.json("ls", "round/") == []


def test_a_next_version_shows_once_it_is_published(up: Commands, model: Path) -> None:
    up("put", str(model), "versions/w", "--publish")
    up("put", str(model), "versions/w", "--next")
    assert [a["version"] for a in up.json("ls", "versions/")] == [1]
    both = up.json("ls", "versions/", "--all-versions")
    assert sorted(a["version"] for a in both) == [1, 2]
    assert up.json("show", "versions/w")["artifact"]["version"] == 1
    assert up.json("show", "versions/w", "-v", "2")["artifact"]["version"] == 2
    assert up.json("rm", "versions/w", "-v", "2")["versions"] == [2]
    up("rm", "versions/w")


def test_names_and_pins_are_set_and_explained(up: Commands, model: Path) -> None:
    up.run("put", str(model), "named")
    assert up.json("publish", "named")["stage"] == "published"
    assert up.json("alias", "now", "named")["info"]["id"] == "named"
    number = up.json("pin", "named", "--ttl", "60")["pin"]
    up.run("unpin", "named", str(number))
    assert "published" in "".join(up.json("explain", "named"))
    assert up.json("alias", "now")["info"] is None


def test_wrong_arguments_are_refused_before_a_cluster_that_runs(up: Commands) -> None:
    assert "'lots'" in up("up", "-d", "-m", "lots", status=1)[1]
    assert "AlreadyExists" in up("up", "-d", status=1)[1]


def test_a_store_that_waits_for_a_worker_ends_with_the_cluster(up: Commands) -> None:
    made = up.json("store", "-d", "-m", "32 MiB")
    waiting = {card.node for card in stores_in(up.run_dir)}
    assert made["node"] in waiting  # that none is left is seen after `down`


def test_putting_what_is_there_already_changes_nothing_and_is_said(
    up: Commands, model: Path
) -> None:
    first = up.json("put", str(model), "again/w")
    assert up.json("put", str(model), "again/w") == first
    assert "already" in up("put", str(model), "again/w")[1]
    up("rm", "again/w")


def test_replicas_that_one_host_cannot_hold_are_said(up: Commands, model: Path) -> None:
    assert "1 of 2 hosts" in up.run("put", str(model), "two/w", "--replicas", "2")[1]
    assert "1 of 2 hosts" in up.json("show", "two/w")["artifact"]["degraded"]
    up("rm", "two/w")


def test_json_has_every_field_and_generations_as_text(
    up: Commands, model: Path
) -> None:
    put = up.json("put", str(model), "json/w")
    assert (put["labels"], put["degraded"], put["base"]) == ({}, "", "")
    assert put["generation"].isdecimal()
    (row,) = up.json("sql", "SELECT generation FROM versions WHERE id = 'json/w'")
    assert row == {"generation": put["generation"]}
    up("rm", "json/w")


def test_a_program_of_this_machine_finds_it_without_an_address(
    up: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAST_RUN_DIR", str(up.run_dir))
    monkeypatch.delenv("TENSORCAST_SCHEDULER", raising=False)
    with tc.connect() as cast:
        assert len(cast.wait_for_workers(2, deadline=60)) == 2


def test_nodes_show_every_tier(up: Commands) -> None:
    for node in up.json("nodes"):
        assert node["attended"]
        assert node["uses"]["host"]["capacity_bytes"] == 64 << 20
        assert "disk" in node["uses"]


def test_tables_for_people_have_one_line_a_row_in_a_pipe(
    up: Commands, model: Path
) -> None:
    long = "tables/" + "x" * 200 + "[bold]"
    up("put", str(model), long)
    assert [line for line in up("ls", "tables/")[0].splitlines() if long in line]
    assert "float32" in up("show", long)[0]
    up("rm", long)


def test_a_reader_that_goes_away_is_no_error(up: Commands) -> None:
    words = [
        sys.executable,
        "-m",
        "tensorcast_dask.cli",
        "sql",
        "SELECT range FROM range(5000)",  # more than a pipe holds
    ]
    ended = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$@" | head -n 1', "-", *words],
        env=up.env,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert "Traceback" not in ended.stderr
    assert "BrokenPipe" not in ended.stderr


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("show", "nobody/made/this"), 1, "NotFound"),
        (("get", "nobody/made/this", "x"), 1, "NotFound"),
        (("ls", "-l", "no-equals-sign"), 2, "key=value"),
        (("put", "no-such-file", "a/b"), 2, "no-such-file"),
        (("put", "not-a-model", "a/b"), 1, "CorruptFile"),
        (("put", "not-a-model", ""), 1, "InvalidName"),
        (("put", "not-a-model", "a/b", "-r", "0"), 2, "replicas"),
        (("show", "a/b", "-v", "-1"), 2, "version"),
        (("sql", "SELEC nonsense"), 1, "InvalidArgument"),
        (("sql", "DROP TABLE versions"), 1, "InvalidArgument"),
        (("up",), 1, "AlreadyExists"),
        (("nonsense",), 2, "nonsense"),
    ],
)
def test_what_is_refused_is_one_sentence_and_a_status(
    up: Commands,
    words: tuple[str, ...],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(up.folder)
    Path("not-a-model").write_bytes(b"\xff" * 40)
    out, err = up(*words, status=status)
    assert out == ""
    assert said in err


def test_getting_onto_a_folder_that_is_not_there_is_refused(
    up: Commands, model: Path, tmp_path: Path
) -> None:
    up("put", str(model), "refused/get")
    _, err = up("get", "refused/get", str(tmp_path / "no" / "such" / "f"), status=1)
    assert f"no folder {tmp_path / 'no' / 'such'}" in err
    assert err.count("\n") <= 3
    up("rm", "refused/get")


def test_top_fills_the_screen_until_it_is_interrupted(up: Commands) -> None:
    screen, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (40, 120))
    words = [sys.executable, "-m", "tensorcast_dask.cli", "top", "-e", "0.1"]
    env = up.env | {"TERM": "xterm-256color"}
    process = subprocess.Popen(
        words, env=env, cwd=up.folder, stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    shown = b""
    os.set_blocking(screen, False)

    def seen(what: bytes) -> bool:
        nonlocal shown
        with contextlib.suppress(BlockingIOError, OSError):  # nothing yet; the end
            while more := os.read(screen, 1 << 16):
                shown += more
        assert what in shown, shown[-4000:]
        return True

    try:
        eventually(lambda: seen(b"nodes 2"), within_s=90, what="the first picture")
        assert b"\x1b[?1049h" in shown  # a screen of its own
        process.send_signal(signal.SIGINT)
        eventually(lambda: seen(b"\x1b[?1049l"), within_s=20, what="the old screen")
        assert process.wait(20) == 130
    finally:
        process.kill()
        process.wait()
        os.close(screen)


# ------------------------------------------------------------------ without a cluster
def test_every_command_explains_itself(alone: Commands) -> None:
    for words in ([], *([name] for name in main.commands)):
        assert "Usage" in alone(*words, "--help")[0]


def test_a_command_without_a_cluster_says_how_to_name_one(alone: Commands) -> None:
    assert "--scheduler" in alone("ls", status=2)[1]
    assert "--cluster" in alone("store", status=2)[1]
    assert "NotFound" in alone("down", status=1)[1]


def test_an_address_where_nobody_answers_ends_with_status_3(alone: Commands) -> None:
    alone.env["TENSORCAST_SESSION__REFUSED_TIMEOUT"] = "100ms"
    address = f"tcp://127.0.0.1:{free_port()}"
    said = alone("ls", "-s", address, status=3)[1]
    assert said.startswith("CatalogUnavailable: connection refused")
    unknown = "tcp://no-such-host.invalid:8786"
    assert "unknown host" in alone("ls", "-s", unknown, status=3)[1]


def test_ctrl_c_while_waiting_is_status_130(alone: Commands) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        process = alone.start("ls", "-s", f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        try:
            silent.settimeout(40)
            connection, _ = silent.accept()
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=40)
            connection.close()
        finally:
            process.kill()
    # A shell says 130 of either.
    assert process.returncode in {130, -signal.SIGINT}
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "address", ["nonsense://x", "tcp://127.0.0.1:notaport", "localhost"]
)
def test_an_address_that_is_none_is_refused(alone: Commands, address: str) -> None:
    assert alone("ls", "-s", address, status=1)[1].startswith("InvalidArgument")


def test_doctor_says_what_the_machine_can_do(alone: Commands) -> None:
    found = {each["what"]: each for each in alone.json("doctor")}
    assert {"system", "memory files", "descriptors", "UCX", "CUDA"} <= set(found)
    assert all(each["fix"] for each in found.values() if each["verdict"] != "ok")
    assert "memory files" in alone("doctor")[0]
    alone.env["TENSORCAST_NODE__HOST_MEMORY"] = "100 TiB"
    found = {each["what"]: each for each in alone.json("doctor")}
    assert found["host memory of a node"]["verdict"] == "limited"


def test_up_stays_until_it_is_interrupted_and_leaves_nothing(alone: Commands) -> None:
    process = alone.start("up", "-n", "1", "-m", "32 MiB")
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("scheduler")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=40)
        assert process.returncode == 0, err
        assert "Traceback" not in err
    finally:
        process.kill()
    eventually(lambda: not stores_in(alone.run_dir), within_s=20, what="no store left")
    assert not (alone.run_dir / "up.json").exists()


def test_up_detached_says_why_it_did_not_start(alone: Commands) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        _, err = alone.run("up", "-d", "-n", "1", "-p", port, status=3)
    assert "already in use" in err
    assert "NotFound" in alone("down", status=1)[1]


# ------------------------------------------------------------------ stores of their own
def test_a_store_of_its_own_ends_with_its_command(alone: Commands) -> None:
    process = alone.start("store", "-c", "mine", "-m", "16 MiB", "--json")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert '"cluster": "mine"' in line
        (card,) = stores_in(alone.run_dir)
        assert str(card.pid) in line
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
        assert process.returncode == 0
    finally:
        process.kill()
    assert stores_in(alone.run_dir) == []


def test_a_store_that_is_ended_ends_its_command(alone: Commands) -> None:
    process = alone.start("store", "-c", "mine", "-m", "16 MiB")
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("store")
        (card,) = stores_in(alone.run_dir)
        os.kill(card.pid, signal.SIGTERM)
        process.communicate(timeout=20)
        assert process.returncode == 0
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("words", "said"),
    [(("-m", "much"), "host-memory"), (("-m", "16 MiB", "-l", "a"), "key=value")],
)
def test_a_store_with_bad_options_is_not_started(
    alone: Commands, words: tuple[str, ...], said: str
) -> None:
    status = 2 if said == "key=value" else 1
    assert said in alone("store", "-c", "mine", *words, status=status)[1]
    assert stores_in(alone.run_dir) == []


def test_doctor_says_what_devices_need(alone: Commands) -> None:
    alone.env["TENSORCAST_DEVICE"] = "emulated:2x1MiB"
    found = {each["what"]: each for each in alone.json("doctor")}["devices"]
    assert found["found"].startswith("2 emulated")
    if Path("/proc/driver/nvidia/version").exists():
        return  # what is missing on a machine with a driver is its own affair
    alone.env["TENSORCAST_DEVICE"] = "cupy"
    found = {each["what"]: each for each in alone.json("doctor")}["devices"]
    assert found["verdict"] == "limited"
    assert "install the NVIDIA driver" in found["fix"]
