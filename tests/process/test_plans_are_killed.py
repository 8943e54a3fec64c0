"""Plans whose workers, nodes and scheduler are killed at each instant: effects happen once."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.api.connection.deadlines import deadline
from tensorcast_dask.api.plans.run import opening
from tensorcast_dask.exceptions import NotFound, PeerLost, TensorCastError
from tensorcast_dask.tensors.messages import PlanState
from tests.kit.clusters import Cluster
from tests.kit.eventually import eventually
from tests.kit.faulty import Faults, faulty_cluster, kill_node, store_pid, whole
from tests.kit.tasks import note, wait_for

CONTENT = np.random.default_rng(5).integers(0, 255, 1 << 20, np.uint8)
NUMBERS = itertools.count()
INSTANTS = ("plan.step_begun", "plan.step_changed", "plan.step_recorded")


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[tc.LocalCluster, Faults]]:
    with faulty_cluster(
        tmp_path_factory.mktemp("run"),
        2,
        separate_hosts=True,
        settings={"lease": {"ttl": "2s"}},
    ) as made:
        yield made


@pytest.fixture
def cast(place: tuple[tc.LocalCluster, Faults]) -> Iterator[tc.Session]:
    with tc.connect(place[0]) as session:
        whole(session, 2)
        yield session
        whole(session, 2)
        for artifact in session.list(all_versions=True):
            session.destroy(artifact.id)


Step = Callable[[Any, tc.Artifact, Any], Any]
#: What a step does once or not at all, and how one sees that it was once.
KINDS: dict[str, Step] = {
    "pin": lambda at, artifact, _: at.pin(artifact, ttl=600.0, name="it"),
    "publish": lambda at, artifact, _: at.publish(artifact, name="it"),
    "replicate": lambda at, artifact, _: at.replicate(artifact, name="it"),
    "destroy": lambda at, artifact, _: at.destroy(artifact, name="it"),
    "alias": lambda at, artifact, now: at.alias(
        "moving", artifact, expect=now, name="it"
    ),
}


def moves(cast: tc.Session) -> int:
    """How often the alias was moved."""
    (row,) = cast.sql(
        "SELECT coalesce(max(alias_generation), 0) FROM aliases WHERE name='moving'"
    ).rows
    return int(row[0])


@pytest.mark.parametrize("instant", INSTANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_p26_a_worker_that_is_killed_in_a_step_leaves_one_effect_and_its_first_answer(
    cast: tc.Session,
    place: tuple[tc.LocalCluster, Faults],
    kind: str,
    instant: str,
) -> None:
    _, faults = place
    number = next(NUMBERS)
    artifact = cast.put({"x": CONTENT}, f"m{number}")
    if kind != "destroy":
        artifact.publish()
    (holder,) = [one.card.node for one in artifact.locations()]
    away = kind != "pin"  # a pin holds where the bytes are
    worker = next(one for one in cast.workers() if (one.node != holder) == away)
    pins = cast.debug_state()["catalog"]["pins"]
    before = moves(cast)
    plan = cast.plan(tc.context(key=f"killed-{number}", ddl=100))
    it = KINDS[kind](plan.on_worker(worker), artifact, before)
    last = plan.on_worker(worker).noop(it, name="last")
    with faults.armed(f"{instant}[it]=kill@1"):
        run = plan.submit()
        faults.wait(instant, within_s=60)
    result = run.result(timeout=100)
    assert result[last].status == "done"
    value = result[it].value
    catalog = cast.debug_state()["catalog"]
    match kind:
        case "pin":
            assert catalog["pins"] == pins + 1
            cast.unpin(artifact, value.pin)
        case "publish":
            assert cast.latest(artifact.id) == artifact == value
        case "replicate":
            held = {one.card.node for one in artifact.locations()}
            assert held == {holder, worker.node}
        case "destroy":
            assert value.versions == (artifact.version,)
            assert not cast.exists(artifact.id)
        case _:
            assert moves(cast) == value.alias_generation == before + 1
    assert catalog["plans"] == catalog["operations"] == 0


def test_a_worker_that_is_killed_while_its_effect_is_under_way_finds_it_again(
    cast: tc.Session, place: tuple[tc.LocalCluster, Faults]
) -> None:
    _, faults = place
    artifact = cast.put({"x": CONTENT}, f"m{next(NUMBERS)}")
    (holder,) = [one.card.node for one in artifact.locations()]
    worker = next(one for one in cast.workers() if one.node != holder)
    store = store_pid(cast, worker.node)
    (pid,) = cast.client.run(os.getpid, workers=[worker.address]).values()
    plan = cast.plan(tc.context(ddl=100))
    it = plan.on_worker(worker).replicate(artifact)
    with faults.armed(f"put.reserved[pid:{store}]=pause:60"):
        run = plan.submit()
        faults.wait("put.reserved")
        assert cast.debug_state()["catalog"]["moves"] == 1
        os.kill(pid, signal.SIGKILL)
        eventually(
            lambda: "".join(run.explain()).count("execute:") == 2,
            within_s=60,
            what="the step is run again",
        )
        assert cast.debug_state()["catalog"]["moves"] == 1
        assert not run.done()
    result = run.result(timeout=100)
    assert result[it].value == artifact
    assert result[it].bytes == artifact.nbytes  # the first answer, not that of a repeat
    assert {one.card.node for one in artifact.locations()} == {holder, worker.node}
    catalog = cast.debug_state()["catalog"]
    assert catalog["moves"] == catalog["operations"] == catalog["plans"] == 0


@pytest.mark.parametrize("word", ["StepEffect", "EndPlan"])
def test_a_store_that_is_killed_while_it_drives_a_plan_leaves_one_effect(
    cast: tc.Session, place: tuple[tc.LocalCluster, Faults], word: str
) -> None:
    _, faults = place
    _, other = sorted(cast.workers(), key=lambda one: one.name)
    artifact = cast.put({"x": CONTENT}, f"r{next(NUMBERS)}", worker=other)
    before = moves(cast)
    plan = cast.plan(tc.context(ddl=100, key=f"driven-{next(NUMBERS)}"))
    it = plan.on_any().alias("moving", artifact)
    with faults.armed(f"plan.said[{word}]=kill@1"):
        run = plan.submit(executor="rpc")
        faults.wait("plan.said", within_s=60)
    # Dead before it asked, and after the effect before it told: another one goes on.
    result = run.result(timeout=100)
    assert result[it].status == "done"
    assert moves(cast) == before + 1
    catalog = cast.debug_state()["catalog"]
    assert catalog["operations"] == catalog["plans"] == 0


def test_a_function_is_run_again_and_one_that_is_marked_once_is_not(
    cast: tc.Session, place: tuple[tc.LocalCluster, Faults], tmp_path: Path
) -> None:
    _, faults = place
    worker = cast.workers()[0]
    words = {}
    for once in (False, True):
        log = tmp_path / str(once)
        plan = cast.plan(tc.context(ddl=100))
        it = plan.on_worker(worker).submit(note, str(log), "ran", name="it", once=once)
        with faults.armed("plan.step_changed[it]=kill@1"):
            run = plan.submit()
            faults.wait("plan.step_changed", within_s=60)
        words[once] = run.outcome(timeout=100)[it]
        assert log.read_text().split() == ["ran"] * (1 if once else 2)
    assert words[False].value == "ran"
    assert words[True].error is not None
    assert getattr(words[True].error, "kind", "") == "Unknown"


def test_a_worker_that_is_killed_before_the_report_leaves_a_run_that_ends(
    cast: tc.Session, place: tuple[tc.LocalCluster, Faults], tmp_path: Path
) -> None:
    _, faults = place
    log = tmp_path / "log"
    plan = cast.plan(tc.context(ddl=100))
    plan.on_any().submit(note, str(log), "ran")
    with faults.armed(f"plan.report[{plan.key}]=kill@1"):
        run = plan.submit()
        faults.wait("plan.report", within_s=60)
    assert run.result(timeout=100).status == "done"
    assert log.read_text().split() == ["ran"]


def test_a_program_that_dies_before_it_has_handed_its_plan_over_leaves_one_to_resume(
    cast: tc.Session, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    plan = cast.plan(tc.context(key=f"left-{next(NUMBERS)}", ddl=100))
    it = plan.on_any().submit(note, str(log), "ran")
    core = cast._core
    opened = opening(core, plan.spec, plan._payloads, plan.key)
    core.bridge(core.ask, opened, PlanState, deadline(60.0))
    run = cast.plan_run(plan.key)
    assert run.outcome(timeout=60).status == "interrupted"
    assert not log.exists()
    assert run.resume().result(timeout=60)[it].value == "ran"
    assert log.read_text().split() == ["ran"]


def test_steps_of_a_node_that_is_gone_fail_typed_and_the_others_are_done(
    cast: tc.Session, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    w1, w2 = cast.workers()
    artifact = cast.put({"x": CONTENT}, "left")
    plan = cast.plan(tc.context(ddl=100))
    first = plan.on_worker(w1).submit(wait_for, str(gate))
    moved = plan.on_worker(w2).replicate(artifact, after=[first], retries=0)
    called = plan.on_worker(w2).submit(len, [first], retries=0)
    other = plan.on_worker(w1).noop(first)
    run = plan.submit()
    kill_node(cast, w2.node)
    eventually(
        lambda: w2.node not in [one.card.node for one in cast.nodes()],
        within_s=60,
        what="the node's lease has run out",
    )
    gate.touch()
    result = run.outcome(timeout=90)
    assert result.status == "failed"
    assert isinstance(result[moved].error, NotFound | PeerLost)
    assert isinstance(result[called].error, PeerLost)
    assert result[other].status == "done"
    catalog = cast.debug_state()["catalog"]
    assert catalog["plans"] == catalog["operations"] == catalog["moves"] == 0


def test_a_scheduler_that_is_killed_leaves_a_plan_that_is_resumed_by_its_key(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("c")
    folder.chmod(0o700)
    gate, log = tmp_path / "gate", tmp_path / "log"
    settings = {"JOURNAL": str(folder / "journal.duckdb"), "CLUSTER": "one"}
    with Cluster(folder, settings) as cluster:
        cluster.start_scheduler()
        worker = cluster.start_worker(name="a")
        cluster.wait_for_stores(1)
        cluster.wait_for_nodes(1)
        with tc.connect(cluster.address) as cast:
            artifact = cast.put({"x": CONTENT}, "kept")
            plan = cast.plan(tc.context(key="through", ddl=600))
            one = plan.on_worker("a").pin(artifact, ttl=600.0, name="one")
            two = plan.on_worker("a").submit(note, str(log), "two", after=[one])
            three = plan.on_worker("a").submit(wait_for, str(gate), after=[two])
            run = plan.submit()
            eventually(lambda: len(run.state()) == 2, within_s=60, what="two steps")
            pinned = run.state()[one].value
            cluster.scheduler.kill()
            cluster.scheduler.wait()
            worker.end()
        cluster.start_scheduler()
        cluster.start_worker(name="a")
        cluster.wait_for_nodes(1, attended=1)
        with tc.connect(cluster.address) as cast:
            run = cast.plan_run("through")
            failed = run.exception(timeout=60)
            assert isinstance(failed, TensorCastError)
            assert "resume it" in failed.message
            gate.touch()
            result = run.resume().result(timeout=60)
            assert result.status == "done"
            assert result[one].value == pinned
            assert result[three].value == str(gate)
            assert log.read_text().split() == ["two"]
            assert cast.debug_state()["catalog"]["pins"] == 1
