"""Each kind of step that does something of its own, and whoever has to do with it killed at each point.

A call is made at most once, a copy is there at most once; a function may run again, as in Dask. The plan
ends, in time and typed, and nothing of it is left: catalog, pins, leases, memory.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.exceptions import TensorCastError
from tests.kit import engine_process, plan_process
from tests.kit.baseline import idle_state
from tests.kit.clusters import Cluster
from tests.kit.eventually import eventually
from tests.kit.faulty import Faults, faulty_cluster, kill_node, whole
from tests.kit.plan_process import effects, submitted

CONTENT = np.random.default_rng(7).integers(0, 255, 1 << 20, np.uint8)
NUMBERS = itertools.count()


class Cell(NamedTuple):
    """Who is killed when what happens."""

    executor: str
    point: str
    #: Of all hits, those with this detail; "" for every one.
    only: str = ""
    #: "" for whoever comes to the point, or who is killed while it stands there.
    victim: str = ""


#: Of these one in each row of the table runs always: each point, kind, executor and victim.
SAMPLE = (
    Cell("graph", "plan.step_begun", "call"),
    Cell("graph", "plan.step_changed", "copy"),
    Cell("graph", "plan.step_recorded", "submit"),
    Cell("graph", "instance.called", "note"),
    Cell("graph", "copy.chunk"),
    Cell("rpc", "instance.asked", "note"),
    Cell("rpc", "instance.call", "note", "node"),
    Cell("rpc", "plan.heard"),
)
GRAPH_POINTS = ("plan.step_begun", "plan.step_changed", "plan.step_recorded")
ALL = (
    *(
        Cell("graph", at, step)
        for at in GRAPH_POINTS
        for step in ("call", "copy", "submit")
    ),
    *(
        Cell(executor, at, "note", victim)
        for executor in ("graph", "rpc")
        for at in ("instance.call", "instance.called")
        for victim in ("", "node", "client")
    ),
    Cell("graph", "copy.chunk"),
    Cell("graph", "copy.arrived"),
    Cell("rpc", "instance.asked", "note"),
    Cell("rpc", "plan.said", "BeginStep"),
    Cell("rpc", "plan.said", "EndPlan"),
    Cell("rpc", "plan.heard"),
)
CELLS = [
    *(pytest.param(cell, id="-".join(filter(None, cell))) for cell in SAMPLE),
    *(
        pytest.param(cell, id="-".join(filter(None, cell)), marks=pytest.mark.slow)
        for cell in ALL
        if cell not in SAMPLE
    ),
]


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[tc.LocalCluster, Faults, Path]]:
    run = tmp_path_factory.mktemp("run")
    settings = {"lease": {"ttl": "2s"}}
    with faulty_cluster(run, 2, separate_hosts=True, settings=settings) as made:
        yield (*made, run)


@contextmanager
def process(*argv: str, says: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program of the kit until it is killed."""
    path = os.pathsep.join(part for part in sys.path if part)
    started = subprocess.Popen(
        [sys.executable, *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ) | {"PYTHONPATH": path} | env,
    )
    try:
        assert started.stdout is not None
        assert started.stdout.readline() == f"{says}\n"
        yield started
    finally:
        started.kill()
        started.communicate()


def nothing_is_left(cast: tc.Session) -> bool:
    """Catalog, pins, leases and memory are as in an empty cluster."""
    state = idle_state(cast)
    catalog = {
        key: value
        for key, value in state["catalog"].items()
        if key not in {"nodes", "sessions"}
    }
    assert not any(catalog.values()), catalog
    assert not cast.instances()
    for node, told in state["stores"].items():
        held = [told["busy"], *told["tiers"].values()]
        assert not any(value for one in held for value in one.values()), (node, held)
        assert not told["generations"], node
    return True


@pytest.mark.parametrize("cell", CELLS)
def test_p26_a_plan_ends_and_leaves_nothing_whoever_is_killed_at_whatever_point(
    place: tuple[tc.LocalCluster, Faults, Path], tmp_path: Path, cell: Cell
) -> None:
    cluster, faults, run_dir = place
    key = f"killed-{next(NUMBERS)}"
    with tc.connect(cluster) as cast, ExitStack() as stack:
        whole(cast, 2)
        # The store that drives is the first by name: the instance is beside the other one.
        first, second = sorted(cast.workers(), key=lambda one: one.name)
        stack.enter_context(
            process(
                engine_process.__file__,
                "e",
                str(run_dir),
                says="attached",
                TENSORCAST_NODE=second.node,
            )
        )
        eventually(cast.instances, within_s=30, what="the instance is listed")
        artifact = cast.put({"x": CONTENT}, "x", worker=first)
        action = "pause:60" if cell.victim else "kill@1"
        stack.enter_context(
            faults.armed(
                f"{cell.point}{f'[{cell.only}]' if cell.only else ''}={action}"
            )
        )
        program: subprocess.Popen[str] | None = None
        what: dict[str, Any] = {"worker": second, "artifact": artifact}
        if cell.victim == "client":
            argv = cluster.scheduler_address, key, cell.executor, second.node, "x"
            program = stack.enter_context(
                process(plan_process.__file__, *argv, str(tmp_path), says="submitted")
            )
        else:
            submitted(cast, key, cell.executor, folder=tmp_path, **what)
        faults.wait(cell.point, within_s=60)
        if program is not None:
            program.send_signal(signal.SIGKILL)
            program.wait(20)
        elif cell.victim == "node":
            kill_node(cast, second.node)
        faults.disarm()
        result = cast.plan_run(key).outcome(timeout=90)
        assert result.status in {"done", "failed"}
        made = effects(cast, key, tmp_path)
        assert made["call"] <= 1
        assert made["copy"] <= 1
        for name in (
            ("call", "copy", "submit") if cell.executor == "graph" else ("call",)
        ):
            if result[name].status == "done":
                assert made[name] >= 1
            else:
                assert isinstance(result[name].error, TensorCastError), result[name]
        if cell.victim == "client":  # nobody needs it
            assert result.status == "done"
        if made["copy"] and cell.victim != "node":  # whose memory it was in
            (copied,) = [one for one in cast.list() if one.id == f"{key}/copy"]
            read = copied.tensor_dict(framework="numpy")
            np.testing.assert_array_equal(read.pop("x"), CONTENT)
    with tc.connect(cluster) as cast:
        whole(cast, 2)
        for one in cast.list(all_versions=True):
            cast.destroy(one.id)
        eventually(lambda: nothing_is_left(cast), within_s=60)


@pytest.mark.parametrize(
    "executor", ["rpc", pytest.param("graph", marks=pytest.mark.slow)]
)
def test_a_scheduler_that_is_killed_while_an_instance_is_called_leaves_one_call(
    executor: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("c")
    folder.chmod(0o700)
    log, go = tmp_path / "log", tmp_path / "go"
    settings = {
        "JOURNAL": str(folder / "journal.duckdb"),
        "CLUSTER": "one",
        "LEASE__TTL": "2s",
    }
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(folder, settings))
        cluster.start_scheduler()
        worker = cluster.start_worker(name="a")
        cluster.wait_for_stores(1)
        cluster.wait_for_nodes(1)
        where = str(cluster.run_dir)
        called = stack.enter_context(
            process(engine_process.__file__, "e", where, says="attached")
        )
        with tc.connect(cluster.address) as cast:
            eventually(cast.instances, within_s=30)
            plan = cast.plan(tc.context(key="through", ddl=600))
            call = plan.on_instance("e").call("note", str(log), str(go), name="call")
            plan.on_instance("e").call("total", name="after", after=[call])
            plan.submit(executor=executor)
            eventually(log.exists, within_s=60)
            cluster.scheduler.kill()
            cluster.scheduler.wait()
            worker.end()
        cluster.start_scheduler()
        cluster.start_worker(name="a")
        cluster.wait_for_nodes(1, attended=1)
        go.touch()
        with tc.connect(cluster.address) as cast:
            run = cast.plan_run("through")
            if run.outcome(timeout=90).status == "interrupted":  # Dask's tasks are gone
                run = run.resume()
            result = run.outcome(timeout=90)
            assert result.status == "done", result["call"].error
            assert result["call"].value == called.pid
            assert log.read_text().split() == [str(called.pid)]
            called.kill()
            eventually(lambda: nothing_is_left(cast), within_s=60)
