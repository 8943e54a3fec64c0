"""Plans on real workers: what they do, what they give, and what they refuse."""

from __future__ import annotations

import asyncio
import itertools
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Future, as_completed, wait

import tensorcast_dask as tc
from tensorcast_dask.api.current import current_session
from tensorcast_dask.exceptions import (
    CapacityError,
    DeadlineExceeded,
    InvalidArgument,
    Mismatch,
    NotFound,
    PeerLost,
    PlanFailed,
    Unimplemented,
)
from tests.kit.baseline import baseline
from tests.kit.eventually import eventually
from tests.kit.tasks import note, wait_for

CONTENT = {"embed": np.arange(600, dtype=np.float32), "bias": np.ones(5)}
KEYS = (f"key-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tc.LocalCluster]:
    run = tmp_path_factory.mktemp("run")
    run.chmod(0o700)
    with (
        pytest.MonkeyPatch.context() as patch,
        tc.LocalCluster(
            2,
            threads_per_worker=2,
            host_memory="256 MiB",
            separate_hosts=True,
            settings={"run-dir": str(run)},
        ) as made,
    ):
        patch.setenv("TENSORCAST_RUN_DIR", str(run))
        with tc.connect(made) as session:
            # The catalog counts a name's moves for ever: so does the baseline, from here.
            session.alias("now", session.put({"x": np.zeros(1)}, "first"))
            session.alias("now", None)
            session.destroy("first")
        yield made


def drive_one() -> str:
    """Run a plan by rpc from a task: a store of its host drives it."""
    with current_session().plan() as plan:
        plan.on_any().noop()
    return str(plan.run(executor="rpc").status)


def driven(session: tc.Session) -> int:
    """How many runs stores drive now: who waits may be told before they know."""
    stores = session.debug_state()["stores"].values()
    return sum(one["busy"]["plans"] for one in stores)


@pytest.fixture
def cast(cluster: tc.LocalCluster) -> Iterator[tc.Session]:
    with tc.connect(cluster) as session:
        eventually(lambda: len(session.workers()) == 2, within_s=60)
        first = session.plan()
        for worker in session.workers():
            first.on_worker(worker).noop()  # a worker's own session stays with it
        first.run()
        for worker in session.workers():  # and that of a store that drives
            task = session.client.submit(
                drive_one, workers=[worker.address], pure=False
            )
            assert task.result() == "done"
        eventually(lambda: not driven(session), within_s=60)
        with baseline(session):
            yield session
            for artifact in session.list(all_versions=True):
                session.destroy(artifact.id)


@pytest.fixture
def weights(cast: tc.Session) -> tc.Artifact:
    made: tc.Artifact = cast.put(CONTENT, "w")
    return made


def total(artifact: tc.Artifact, scale: float = 1.0) -> float:
    tensors = artifact.tensor_dict(framework="numpy")
    return float(sum(tensor.sum() for tensor in tensors.values())) * scale


def refuse(kind: str) -> None:
    if kind == "value":
        message = "no such thing"
        raise ValueError(message)
    message = "full, perhaps not for long"
    raise CapacityError(message)


def noted(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def overlap(path: str, seconds: float) -> None:
    note(path, "in")
    time.sleep(seconds)  # scene: a step that takes a while
    note(path, "out")


# ---------------------------------------------------------------- what it does
def test_the_papers_plan_runs_and_gives_values_places_and_bytes(
    cast: tc.Session, weights: tc.Artifact
) -> None:
    w1, w2 = cast.workers()
    w1.publish(weights, version=weights.version)
    with cast.plan(tc.context(id="roll-out", ddl=60, key=next(KEYS))) as plan:
        newest = plan.on_worker(w1).latest("w")
        ready = plan.on_worker(w1).prefetch(newest, device="host")
        copy = plan.on_worker(w2).replicate(ready)
        sums = plan.on_worker(w2).submit(total, copy, scale=2.0)
    result = plan.run(concurrency=4)
    assert (result.status, result.error) == ("done", None)
    assert result[sums].value == 2 * total(weights)
    assert result[copy].value == weights
    assert {place.card.node for place in weights.locations()} == {w1.node, w2.node}
    assert (result[ready].node, result[sums].node) == (w1.node, w2.node)
    moved = sum(result[step].bytes for step in (ready, copy))
    assert moved >= weights.nbytes
    assert all(result[name].attempts == 1 for name in result)


@pytest.mark.parametrize("executor", ["graph", "rpc"])
def test_every_kind_of_step_does_what_the_call_of_its_name_does(
    cast: tc.Session, weights: tc.Artifact, tmp_path: Path, executor: str
) -> None:
    w1, w2 = cast.workers()
    (holder,) = [p.card.node for p in weights.locations()]
    here, there = (w1, w2) if holder == w1.node else (w2, w1)
    plan = cast.plan()
    published = plan.on_any().publish(weights)
    alias = plan.on_any().alias("now", published)
    pinned = plan.on_worker(here).pin(published, ttl=60.0)
    unpinned = plan.on_worker(here).unpin(published, pinned)
    view = plan.on_any().view(weights, {"embed": tc.s_[:10]}, "head")
    cut = plan.on_any().view(weights, tc.s_[:3], "embed")
    saved = plan.on_worker(here).save(weights, tmp_path / "w.safetensors")
    loaded = plan.on_worker(here).load(
        tmp_path / "w.safetensors", "again", after=[saved]
    )
    own = same_again = None
    if executor == "graph":  # a store does not read and put
        own = plan.on_worker(there).copy(weights, "own")
        same_again = plan.on_worker(here).copy(weights, "own", after=[own])
        plan.on_worker(here).copy(cut, "shown", version=3)
    moved = plan.on_worker(here).migrate(loaded, there)
    copied = plan.on_worker(there).replicate(weights)
    dropped = plan.on_worker(there).release(copied)
    ended = plan.on_any().destroy(moved)
    same = plan.on_any().noop(view, after=[ended])
    result = plan.run(executor=executor)
    assert cast.latest("w") == weights
    assert cast.artifact("now") == weights
    assert result[alias].value.alias_generation
    cast.alias("now", None)
    assert result[pinned].value.pin
    assert result[unpinned].value is None
    assert result[same].value.id == "head"
    assert result[same].value.tensor(framework="numpy").shape == (10,)
    assert result[cut].value.tensor(framework="numpy").shape == (3,)
    if own is not None:
        assert result[own].value.id == "own"
        assert result[same_again].value == result[own].value  # a repeat makes no other
        assert [p.card.node for p in result[own].value.locations()] == [there.node]
        (same_bytes,) = {
            one.tensor_dict(framework="numpy")["embed"].tobytes()
            for one in (weights, cast.artifact("own"))
        }
        shown_bytes = (
            cast.artifact("shown", version=3).tensor(framework="numpy").tobytes()
        )
        assert shown_bytes == same_bytes[: len(shown_bytes)]
        assert len(shown_bytes) == 12
    assert result[dropped].value == weights
    assert [p.card.node for p in weights.locations()] == [here.node]
    assert result[ended].value.versions == (result[moved].value.version,)
    assert not cast.exists("again")


def test_a_drain_gives_its_receipt_to_the_steps_after_it(
    cast: tc.Session, weights: tc.Artifact
) -> None:
    (holder,) = [p.card.node for p in weights.locations()]
    plan = cast.plan()
    receipt = plan.on_worker(holder).drain()
    plan.on_any().submit(_moved_of, receipt, name="moved")
    result = plan.run()
    told = result[receipt].value
    assert weights.generation in told.moved
    assert told.moved_bytes >= weights.nbytes
    assert not told.stayed
    assert result["moved"].value == list(told.moved)
    assert {p.card.node for p in weights.locations()} - {holder}


def _moved_of(receipt: Any) -> list[int]:
    return list(receipt.moved)


def test_artifacts_and_steps_deep_in_arguments_come_as_what_they_are(
    cast: tc.Session, weights: tc.Artifact
) -> None:
    plan = cast.plan()
    one = plan.on_any().submit(total, weights)
    two = plan.on_any().submit(_sum_up, {"parts": [one, (one, 1.0)]}, more=one)
    assert plan.run()[two].value == 3 * total(weights) + 1.0


def _sum_up(given: dict[str, Any], more: float) -> float:
    first, (second, third) = given["parts"]
    return float(first + second + third + more)


def test_concurrency_bounds_the_steps_under_way(
    cast: tc.Session, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    plan = cast.plan()
    for _ in range(4):
        plan.on_any().submit(overlap, str(log), 0.05)
    plan.run(concurrency=1)
    assert noted(log) == ["in", "out"] * 4


# ---------------------------------------------------------------- keys
def test_a_plan_runs_once_under_its_key_from_wherever_it_is_asked(
    cast: tc.Session, cluster: tc.LocalCluster, tmp_path: Path
) -> None:
    key, log = next(KEYS), tmp_path / "log"

    def build(session: tc.Session) -> tuple[tc.Plan, Any]:
        plan = session.plan(tc.context(key=key))
        return plan, plan.on_any().submit(note, str(log), "ran")

    plan, step = build(cast)
    first = plan.run()
    with tc.connect(cluster) as other:
        same, step_there = build(other)
        assert same.run()[step_there].value == first[step].value == "ran"
        assert other.plan_run(key).result()["submit-0"].value == "ran"
        changed = other.plan(tc.context(key=key))
        changed.on_any().submit(note, str(log), "another")
        with pytest.raises(Mismatch, match="another plan"):
            changed.run()
    assert noted(log) == ["ran"]


def test_a_run_outlives_its_program_and_is_found_by_its_key(
    cast: tc.Session, cluster: tc.LocalCluster, tmp_path: Path
) -> None:
    key, gate, log = next(KEYS), tmp_path / "gate", tmp_path / "log"
    program = f"""
import os, sys
sys.path[:0] = {[p for p in sys.path if p]!r}
import tensorcast_dask as tc
from tests.kit.tasks import note, wait_for
session = tc.connect({cluster.scheduler_address!r})
plan = session.plan(tc.context(key={key!r}, ddl=120))
first = plan.on_any().submit(wait_for, {str(gate)!r})
plan.on_any().submit(note, {str(log)!r}, "ran", after=[first])
plan.submit()
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    run = cast.plan_run(key)
    assert not run.done()
    gate.touch()
    assert run.result(timeout=60).status == "done"
    assert noted(log) == ["ran"]


def test_nobody_knows_a_key_that_was_never_used(cast: tc.Session) -> None:
    with pytest.raises(NotFound):
        cast.plan_run("never")


def test_a_plan_waits_for_one_whose_work_it_would_undo(
    cast: tc.Session, weights: tc.Artifact, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    keeping, taking = cast.plan(), cast.plan()
    copy = keeping.on_worker(cast.workers()[0]).prefetch(weights)
    keeping.on_any().submit(wait_for, str(gate), after=[copy])
    taking.on_any().destroy(weights)
    hasty = cast.plan(tc.context(ddl=0))
    hasty.on_any().destroy(weights)
    first = keeping.submit()
    with pytest.raises(DeadlineExceeded, match=f"waits for plan '{keeping.key}'"):
        hasty.submit()
    second = cast.client.compute(taking)
    eventually(lambda: cast.debug_state()["catalog"]["plans_waiting"], within_s=60)
    assert "waits for plan" in cast.explain(f"plan:{taking.key}")[-1]
    assert cast.exists("w")
    gate.touch()
    assert first.result(timeout=60).status == "done"
    assert second.result(timeout=60).status == "done"
    assert not cast.exists("w")


# ---------------------------------------------------------------- failure
def test_a_failure_skips_what_needs_it_undoes_in_reverse_and_says_what_ran(
    cast: tc.Session, tmp_path: Path
) -> None:
    log = str(tmp_path / "log")
    plan = cast.plan(tc.context(key=next(KEYS)))
    one = plan.on_any().submit(note, log, "one", name="one")
    two = plan.on_any().submit(note, log, "two", name="two", after=[one])
    plan.compensate(one).submit(note, log, "undo-one", name="undo one")
    plan.compensate(two).submit(note, log, "undo-two", name="undo two")
    bad = plan.on_any().submit(refuse, "value", name="bad", after=[two])
    later = plan.on_any().submit(note, log, "later", name="later", after=[bad])
    plan.compensate(later).submit(note, log, "never", name="undo later")
    with pytest.raises(PlanFailed) as failed:
        plan.run()
    assert "step 'bad' failed because ValueError: no such thing" in str(failed.value)
    assert "done: 'one', 'two'; skipped: 'later'" in str(failed.value)
    assert failed.value.data["step"] == "bad"
    assert noted(Path(log)) == ["one", "two", "undo-two", "undo-one"]
    result = plan.run(raise_on_error=False)
    assert result[later].status == "skipped"
    assert isinstance(result[bad].error, ValueError)
    assert result[bad].attempts == 1
    assert result[one].value == "one"


def test_only_errors_that_may_pass_are_tried_again(cast: tc.Session) -> None:
    plan = cast.plan()
    passing = plan.on_any().submit(refuse, "capacity", retries=2)
    lasting = plan.on_any().publish("no such artifact")
    result = plan.run(raise_on_error=False)
    assert result[passing].attempts == 3
    assert isinstance(result[passing].error, CapacityError)
    assert result[lasting].attempts == 1
    assert isinstance(result[lasting].error, NotFound)


def test_p34_the_deadline_of_a_plan_is_one_for_all_its_steps_and_retries(
    cast: tc.Session, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    plan = cast.plan(tc.context(ddl=1.5))
    for _ in range(3):
        plan.on_any().submit(refuse, "capacity", retries=100)
    plan.on_any().submit(wait_for, str(gate))
    started_s = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="deadline"):
        plan.run()
    assert time.monotonic() - started_s < 30.0  # a bound against hanging, not a speed
    gate.touch()


@pytest.mark.parametrize("ddl", [0, 1e-9, 0.5])
def test_p34_a_plan_on_what_is_not_there_ends_at_once(
    cast: tc.Session, ddl: float
) -> None:
    plan = cast.plan(tc.context(ddl=ddl))
    plan.on_any().prefetch("not there")
    with pytest.raises((PlanFailed, DeadlineExceeded)):
        plan.run()


def test_a_plan_that_is_cancelled_begins_nothing_more_and_can_go_on(
    cast: tc.Session, tmp_path: Path
) -> None:
    gate, log = tmp_path / "gate", tmp_path / "log"
    plan = cast.plan(tc.context(key=next(KEYS)))
    first = plan.on_any().submit(wait_for, str(gate))
    last = plan.on_any().submit(note, str(log), "ran", after=[first])
    run = plan.submit()
    run.cancel()
    result = run.outcome(timeout=60)
    assert result.status == "cancelled"
    assert result[last].status == "cancelled"
    assert not noted(log)
    gate.touch()
    assert run.resume().result(timeout=60)[last].value == "ran"
    assert noted(log) == ["ran"]


def test_a_plan_that_is_cancelled_undoes_what_says_how(
    cast: tc.Session, tmp_path: Path
) -> None:
    log, gate = str(tmp_path / "log"), tmp_path / "gate"
    plan = cast.plan()
    one = plan.on_any().submit(note, log, "one")
    undo = plan.compensate(one).submit(note, log, "undone")
    two = plan.on_any().submit(wait_for, str(gate), after=[one])
    three = plan.on_any().submit(note, log, "three", after=[two])
    run = plan.submit()
    eventually(lambda: one in run.state(), within_s=60, what="the first step")
    run.cancel()
    gate.touch()
    result = run.outcome(timeout=60)
    assert result.status == "cancelled"
    assert (result[one].status, result[undo].status) == ("done", "done")
    # What was under way and came to its end was done; nothing began after it.
    assert result[three].status == "cancelled"
    assert noted(Path(log)) == ["one", "undone"]


def test_a_plan_by_rpc_fails_undoes_and_is_resumed_as_one_by_dask(
    cast: tc.Session, weights: tc.Artifact
) -> None:
    (holder,) = [one.card.node for one in weights.locations()]
    plan = cast.plan(tc.context(key="by-rpc"))
    pinned = plan.on_worker(holder).pin(weights, ttl=60.0)
    undo = plan.compensate(pinned).unpin(weights, pinned)
    late = plan.on_any().latest("made later", after=[pinned])
    needs = plan.on_any().alias("now", late)
    failed = plan.run(executor="rpc", raise_on_error=False)
    assert failed.status == "failed"
    assert isinstance(failed[late].error, NotFound)
    assert (failed[undo].status, failed[needs].status) == ("done", "skipped")
    assert cast.debug_state()["catalog"]["pins"] == 0
    cast.put({"x": np.zeros(3)}, "made later")
    cast.publish("made later")
    result = cast.plan_run("by-rpc").resume().result(timeout=60)
    assert result[needs].status == "done"
    assert cast.debug_state()["catalog"]["pins"] == 1
    stations = [line.split("ago  ")[1].split(":")[0] for line in plan.story()]
    order = [
        "submit",
        "admit",
        "resolve",
        "compile",
        "dispatch",
        "execute",
        "record",
        "report",
    ]
    assert [stations.index(one) for one in order] == sorted(map(stations.index, order))
    cast.alias("now", None)
    cast.unpin(weights)


def test_what_a_store_does_not_do_is_refused_before_anything_is_done(
    cast: tc.Session, weights: tc.Artifact, tmp_path: Path
) -> None:
    plan = cast.plan(tc.context(key="refused"))
    plan.on_any().pin(weights)
    plan.on_any().submit(note, str(tmp_path / "log"), "done")
    with pytest.raises(Unimplemented, match="executor='graph'"):
        plan.run(executor="rpc")
    with pytest.raises(NotFound):
        cast.plan_run("refused")
    assert cast.debug_state()["catalog"]["pins"] == 0


def test_a_function_that_is_marked_once_gives_its_value(cast: tc.Session) -> None:
    plan = cast.plan(tc.context(key=next(KEYS)))
    root = plan.on_any().submit(math.sqrt, 25.0, once=True)
    assert plan.run()[root].value == 5.0
    assert plan.run()[root].value == 5.0


def test_a_resumed_plan_leaves_alone_what_is_done(
    cast: tc.Session, tmp_path: Path
) -> None:
    log, gate = tmp_path / "log", tmp_path / "gate"
    plan = cast.plan(tc.context(key=next(KEYS)))
    one = plan.on_any().submit(note, str(log), "one")
    two = plan.on_any().submit(_needs, str(gate), one, retries=0)
    run = plan.submit()
    assert isinstance(run.exception(timeout=60), PlanFailed)
    gate.touch()
    result = cast.plan_run(plan.key).resume().result(timeout=60)
    assert (result[one].value, result[two].value) == ("one", "found")
    assert noted(log) == ["one"]


def _needs(path: str, _: str) -> str:
    if not Path(path).exists():
        message = "not yet"
        raise RuntimeError(message)
    return "found"


def test_a_node_that_is_not_there_is_a_typed_error_and_no_wait_for_ever(
    cast: tc.Session, weights: tc.Artifact
) -> None:
    plan = cast.plan()
    moved = plan.on_worker("nowhere").replicate(weights)
    called = plan.on_worker("nowhere").submit(math.sqrt, 4.0, retries=0)
    result = plan.run(raise_on_error=False)
    assert isinstance(result[moved].error, NotFound)
    assert isinstance(result[called].error, PeerLost)


# ---------------------------------------------------------------- handles
def test_a_handle_behaves_as_a_future(cast: tc.Session, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    plan = cast.plan()
    step = plan.on_any().submit(wait_for, str(gate))
    run = plan.submit()
    called = threading.Event()
    run.add_done_callback(lambda _: called.set())
    with pytest.raises(DeadlineExceeded, match="still runs"):
        run.result(timeout=0.1)
    assert len(run.state()) == 0
    gate.touch()
    assert run.exception(timeout=60) is None
    assert run.result()[step].value == str(gate)
    assert run.done()
    assert called.wait(30)


def test_dask_takes_a_handle_as_a_future(cast: tc.Session, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    plans = [cast.plan(), cast.plan()]
    first = plans[0].on_any().submit(wait_for, str(gate))
    plans[1].on_any().submit(math.sqrt, 4.0)
    late, early = (plan.submit() for plan in plans)
    with cast.client.as_current():
        order = as_completed([late, early])
        assert next(order) is early
        assert isinstance(late, Future)
        assert wait([late, early], return_when="FIRST_COMPLETED").not_done == {late}
        double = cast.client.submit(_value_of, late, first.name)
        assert not double.done()
        gate.touch()
        assert next(order) is late
        gathered = cast.client.gather([early, late])
        assert [one.status for one in gathered] == ["done", "done"]
        assert gathered[1][first].value == double.result(timeout=60) == str(gate)
        assert wait([late, early], timeout=60).done == {late, early}
    assert cast.plan_run(late.key).result()[first].value == str(gate)


def _value_of(result: tc.PlanResult, step: str) -> Any:
    return result[step].value


def test_a_future_of_a_run_that_failed_raises_and_one_that_goes_on_is_another(
    cast: tc.Session, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    plan = cast.plan(tc.context(key=next(KEYS)))
    step = plan.on_any().submit(_needs, str(gate), "", retries=0)
    run = plan.submit()
    with cast.client.as_current():
        assert wait([run], timeout=60).done == {run}
    assert run.status == "error"
    with pytest.raises(PlanFailed, match="not yet"):
        cast.client.gather(run)
    gate.touch()
    again = run.resume()
    assert again.key != run.key
    assert cast.client.gather(again)[step].value == "found"


def test_a_step_of_a_submitted_plan_is_an_argument_of_dasks_own_tasks(
    cast: tc.Session, weights: tc.Artifact
) -> None:
    plan = cast.plan()
    copy = plan.on_worker(cast.workers()[0]).prefetch(weights)
    bad = plan.on_any().submit(refuse, "value")
    with pytest.raises(InvalidArgument, match="submit"):
        cast.client.submit(total, copy)
    plan.submit()
    summed, failed = (cast.client.submit(total, one) for one in (copy, bad))
    assert summed.result(timeout=60) == total(weights)
    with pytest.raises(ValueError, match="no such thing"):
        failed.result(timeout=60)


def test_an_asynchronous_program_awaits(cluster: tc.LocalCluster) -> None:
    async def main() -> None:
        async with await tc.connect(
            cluster.scheduler_address, asynchronous=True
        ) as session:
            (w1, _) = await session.workers()
            plan = session.plan()
            step = plan.on_worker(w1).submit(math.sqrt, 9.0)
            run = await plan.submit()
            assert (await run)[step].value == 3.0
            assert (await session.client.gather(run))[step].value == 3.0
            again = await plan.run()
            assert again[step].value == 3.0
            assert any("report" in line for line in await plan.story())

    asyncio.run(main())


def test_a_plan_is_a_dask_collection(cast: tc.Session) -> None:
    (w1, _) = cast.workers()
    plan = cast.plan(tc.context(key=next(KEYS)))
    step = plan.on_worker(w1).submit(math.sqrt, 16.0)
    assert dask.base.is_dask_collection(plan)
    assert dask.base.tokenize(plan) == dask.base.tokenize(plan)
    assert len(plan.__dask_graph__().layers) == 3
    future = cast.client.compute(plan)
    assert future.result()[step].value == 4.0
    kept = cast.client.persist(plan)
    assert cast.client.compute(kept).result().status == "done"
    assert plan.run()[step].value == 4.0


def test_the_stations_of_a_run_are_told_in_order(cast: tc.Session) -> None:
    plan = cast.plan()
    plan.on_any().noop(name="rest")
    plan.run()
    words = [line.split("ago  ")[1].split(":")[0] for line in plan.story()]
    assert words == [
        "submit",
        "admit",
        "resolve",
        "compile",
        "dispatch",
        "execute",
        "record",
        "report",
    ]
    assert plan.visualize() == "rest: noop on any"
    assert cast.plan_run(plan.key).explain()
    steps = cast.sql(f"SELECT step, kind, status FROM steps WHERE plan='{plan.key}'")
    assert steps.rows == (("rest", "noop", "done"),)


# ---------------------------------------------------------------- what it refuses
def test_what_makes_no_plan_is_refused_while_it_is_built(cast: tc.Session) -> None:
    plan, other = cast.plan(), cast.plan()
    step = other.on_any().noop()
    for wrong in (
        lambda: plan.on_any().publish(step),
        lambda: plan.on_any().publish(3),
        lambda: plan.on_any().noop(after=[step]),
        lambda: plan.on_any().prefetch("x", speed=3),
        lambda: plan.on_any().prefetch("x", device=3),  # type: ignore[arg-type]
        lambda: plan.on_any().view("x", tc.s_[:3]),
        lambda: plan.on_any().migrate("x"),
        lambda: plan.compensate(step),
        lambda: plan.on_worker(""),
        lambda: plan.run(concurrency=0),
        lambda: plan.run(executor="magic"),
        lambda: cast.plan("roll-out"),  # type: ignore[arg-type]
        lambda: tc.context(ddl=-1),
    ):
        with pytest.raises(InvalidArgument):
            wrong()
    with pytest.raises(InvalidArgument, match="executor"):
        plan.run(executor="threads")
    assert len(plan) == 0


def test_a_key_needs_arguments_that_have_a_token(cast: tc.Session) -> None:
    plan = cast.plan(tc.context(key=next(KEYS)))
    with pytest.raises(InvalidArgument, match="__dask_tokenize__"):
        plan.on_any().submit(id, object())
    free = cast.plan()
    free.on_any().submit(_kind_of, _Nameless())
    assert free.run()["submit-0"].value == "_Nameless"


class _Nameless:
    def __init__(self) -> None:
        self.other = object()

    def __reduce__(self) -> tuple[type[_Nameless], tuple[()]]:
        return _Nameless, ()


def _kind_of(value: object) -> str:
    return type(value).__name__


def test_a_value_too_large_to_keep_is_refused(cast: tc.Session) -> None:
    plan = cast.plan()
    step = plan.on_any().submit(bytes, 2 << 20)
    result = plan.run(raise_on_error=False)
    assert isinstance(result[step].error, InvalidArgument)


def test_a_dry_run_moves_nothing_and_tells_the_bytes_that_the_run_moves(
    cast: tc.Session, weights: tc.Artifact
) -> None:
    (holder,) = [place.card.node for place in weights.locations()]
    w1, w2 = cast.workers()
    here, there = (w1, w2) if holder == w1.node else (w2, w1)
    plan = cast.plan()
    copy = plan.on_worker(there).replicate(weights)
    again = plan.on_worker(there).prefetch(copy)
    moved = plan.on_worker(there).migrate(again, here)
    called = plan.on_any().submit(total, moved)
    told = plan.dry_run()
    assert [place.card.node for place in weights.locations()] == [holder]
    assert told.refusals == {}
    assert told.links == {f"{here.name} -> {there.name}": weights.nbytes}
    assert told[called].bytes is None
    assert told.bytes == weights.nbytes
    result = plan.run()
    assert all(result[step].bytes == told[step].bytes for step in (copy, again, moved))


def test_a_dry_run_says_what_would_be_refused(cast: tc.Session) -> None:
    w1, w2 = cast.workers()
    plan = cast.plan()
    missing = plan.on_worker(w1).prefetch("not there")
    after = plan.on_worker(w2).replicate(missing)
    nowhere = plan.on_worker("nowhere").noop()
    told = plan.dry_run()
    assert set(told.refusals) == {missing.name, after.name, nowhere.name}
    assert "would fail" in told.refusals[after.name]
    assert "nowhere" in str(told)


def test_a_plan_comes_back_from_its_json_and_is_drawn(
    cast: tc.Session, weights: tc.Artifact, tmp_path: Path
) -> None:
    w1, w2 = cast.workers()
    asks = tc.context(id="me", ddl=90, key=next(KEYS), priority=2, tags=["t"])
    plan = cast.plan(asks)
    copy = plan.on_worker(w1).replicate(weights)
    plan.on_worker(w2).publish(copy)
    again = tc.Plan.from_spec(cast, plan.to_spec())
    assert (again.context, again.key) == (asks, plan.key)
    assert again.spec == plan.spec
    picture = plan.visualize(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text() == picture
    assert f"replicate on {w1.name}" in picture
    again = cast.plan().load_spec(plan.to_spec())
    assert again.spec.digest() == plan.spec.digest()
    assert again.run().status == "done"
    assert cast.latest("w") == weights
    plan.on_any().submit(math.sqrt, 4.0)
    with pytest.raises(InvalidArgument, match="function"):
        cast.plan().load_spec(plan.to_spec())
