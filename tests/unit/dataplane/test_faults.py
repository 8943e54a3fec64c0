from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tensorcast_dask.dataplane import faults
from tensorcast_dask.dataplane.faults import Action, Rule
from tensorcast_dask.exceptions import InvalidArgument, PeerLost
from tests.kit.eventually import eventually

if TYPE_CHECKING:
    from pathlib import Path


def run_child(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"from tensorcast_dask.dataplane import faults\n{code}"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_spec_is_read_as_its_head_says() -> None:
    assert faults.parse(
        "a.b=kill@2; copy.*[m/*]=raise:PeerLost@3-5 # why\nx=pause"
    ) == (
        Rule(name="a.b", action=Action.KILL, first=2, last=2),
        Rule(
            name="copy.*",
            action=Action.RAISE,
            argument="PeerLost",
            only="m/*",
            first=3,
            last=5,
        ),
        Rule(name="x", action=Action.PAUSE),
    )


@pytest.mark.parametrize(
    "spec",
    [
        "x",
        "x=",
        "x=explode",
        "x=raise",
        "x=raise:NoSuch",
        "x=delay",
        "x=delay:soon",
        "x=kill@",
        "x=kill@-2",
        "=kill",
        "x=exit:a",
    ],
)
def test_a_mistyped_fault_is_refused(spec: str) -> None:
    with pytest.raises(InvalidArgument):
        faults.parse(spec)


def test_an_unarmed_point_does_nothing() -> None:
    faults.point("save.before_rename")
    assert faults.take("save.before_rename") == []


def test_only_the_named_hits_raise() -> None:
    outcomes = []
    with faults.armed("copy.chunk=raise:PeerLost@2-3"):
        for _ in range(4):
            try:
                faults.point("copy.chunk")
                outcomes.append("ok")
            except PeerLost:
                outcomes.append("lost")
    faults.point("copy.chunk")
    assert outcomes == ["ok", "lost", "lost", "ok"]


def test_an_errno_name_raises_that_os_error() -> None:
    with (
        faults.armed("spill.write=raise:ENOSPC"),
        pytest.raises(OSError, match="No space left"),
    ):
        faults.point("spill.write")


def test_a_filter_looks_at_the_detail_or_the_pid() -> None:
    with faults.armed(
        f"a[m/*]=raise:Gone;b[pid:1]=raise:Gone;c[pid:{os.getpid()}]=log"
    ):
        faults.point("a", "other")
        faults.point("b")
        assert len(faults.take("a", "m/1")) == 1
        assert len(faults.take("c")) == 1


def test_a_pause_ends_when_the_rule_is_disarmed() -> None:
    faults.arm("x=pause:20")
    thread = threading.Thread(target=faults.point, args=("x",))
    thread.start()
    try:
        thread.join(0.05)
        assert thread.is_alive()
    finally:
        faults.disarm()
        thread.join(10)
    assert not thread.is_alive()


def test_a_pause_ends_by_itself() -> None:
    with faults.armed("x=pause:0.05"):
        started_s = time.monotonic()
        faults.point("x")
    assert time.monotonic() - started_s >= 0.05


def test_the_environment_arms_a_process_and_the_log_names_the_hit(
    tmp_path: Path,
) -> None:
    log = tmp_path / "hits"
    child = run_child(
        "faults.point('a', 'd 1'); faults.point('a', 'd 2'); print('alive')",
        TENSORCAST_FAULTS="a=kill@2",
        TENSORCAST_FAULTS_LOG=str(log),
    )
    assert child.returncode == -signal.SIGKILL
    assert [(h.name, h.action, h.hit, h.detail) for h in faults.read_log(log)] == [
        ("a", Action.KILL, 2, "d 2")
    ]


def test_exit_leaves_with_its_code() -> None:
    assert run_child("faults.point('a')", TENSORCAST_FAULTS="a=exit:7").returncode == 7


def test_a_bad_spec_in_the_environment_is_loud() -> None:
    child = run_child("faults.point('b')", TENSORCAST_FAULTS="a=explode")
    assert child.returncode == 1
    assert "InvalidArgument" in child.stderr


def test_a_file_arms_and_disarms_a_running_process(tmp_path: Path) -> None:
    spec, log = tmp_path / "spec", tmp_path / "log"
    code = "\n".join(
        (
            "import time",
            "for _ in range(3000):",
            "    faults.point('loop')",
            "    time.sleep(0.01)",
        )
    )
    child = subprocess.Popen(
        [sys.executable, "-c", f"from tensorcast_dask.dataplane import faults\n{code}"],
        env={
            **os.environ,
            "TENSORCAST_FAULTS_FILE": str(spec),
            "TENSORCAST_FAULTS_LOG": str(log),
        },
    )
    try:
        faults.write_spec(spec, "loop=pause:30")
        eventually(lambda: faults.read_log(log), within_s=20)
        assert [(h.pid, h.action) for h in faults.read_log(log)] == [
            (child.pid, Action.PAUSE)
        ]
        faults.write_spec(spec, "loop=exit:9")
        assert child.wait(20) == 9
    finally:
        child.kill()
        child.wait()


def test_a_point_on_an_event_loop_awaits_its_delay() -> None:
    slept: list[float] = []

    async def sleep(seconds_s: float) -> None:
        slept.append(seconds_s)

    with faults.armed("x=delay:5"), contextlib.suppress(StopIteration):
        faults.point_async("x", sleep=sleep).send(None)
    assert slept == [5.0]
