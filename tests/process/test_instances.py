"""Instances: attached for real, called, killed, replaced; weights that are written in place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.exceptions import (
    CallFailed,
    DeadlineExceeded,
    Gone,
    InvalidArgument,
    Mismatch,
    NotFound,
    OwnerGone,
    Poisoned,
    StaleOwner,
    TensorCastError,
    Unimplemented,
    Unknown,
    UnsupportedPlatform,
)
from tensorcast_dask.instance import Instance, attach
from tests.kit import engine_process
from tests.kit.clusters import debug
from tests.kit.eventually import eventually
from tests.kit.faulty import store_pid
from tests.kit.local import stores_in
from tests.kit.tasks import wait_for


class Engine:
    """Six weights, one of them strided; `spoil` makes the last one fail after the check."""

    def __init__(self) -> None:
        self.live: dict[str, np.ndarray] = {
            f"w{at}": np.full((4, 3), float(at)) for at in range(5)
        }
        self.live["w5"] = np.zeros((6, 4))[:, ::2]
        self.spoil = False
        self.said: list[str] = []

    def weights(self) -> dict[str, np.ndarray]:
        return self.live

    def pause(self) -> None:
        self.said.append("pause")
        self.live["w5"].flags.writeable = not self.spoil

    def resume(self) -> None:
        self.said.append("resume")
        if not self.spoil:
            return
        self.spoil = False
        self.live["w5"] = np.zeros((6, 4))[:, ::2]


def update(value: float) -> dict[str, np.ndarray]:
    return {
        **{f"w{at}": np.full((4, 3), value) for at in range(5)},
        "w5": np.full((6, 2), value),
    }


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run: Path = tmp_path_factory.mktemp("run")
    run.chmod(0o700)
    return run


@pytest.fixture(scope="module")
def cast(run_dir: Path) -> Iterator[tc.Session]:
    with (
        tc.LocalCluster(
            1,
            threads_per_worker=2,
            host_memory="128 MiB",
            dashboard_address="127.0.0.1:0",
            settings={
                "run-dir": str(run_dir),
                "segment.own-bytes": "2 MiB",
                "lease.ttl": "2s",
            },
        ) as cluster,
        tc.connect(cluster) as session,
    ):
        yield session


@contextmanager
def engine(name: str, run_dir: Path, **how: Any) -> Iterator[Instance]:
    with attach(name, run_dir=str(run_dir), **how) as instance:
        yield instance


@contextmanager
def process(name: str, run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """An instance in a process of its own, to be killed."""
    path = os.pathsep.join(part for part in sys.path if part)
    started = subprocess.Popen(
        [sys.executable, engine_process.__file__, name, str(run_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ) | {"PYTHONPATH": path},
    )
    try:
        assert started.stdout is not None
        assert started.stdout.readline() == "attached\n"
        yield started
    finally:
        started.kill()
        started.communicate()


def found(cast: tc.Session, name: str) -> Any:
    """Give an instance, which is off the list while a busy machine lets its node's lease lapse."""

    def listed() -> Any:
        return next((one for one in cast.instances() if one.name == name), None)

    return eventually(listed, within_s=60)


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def test_an_instance_is_listed_called_and_gone_when_it_detaches(
    cast: tc.Session, run_dir: Path
) -> None:
    with engine("e", run_dir, engine=Engine(), labels={"zone": "a"}) as instance:

        @instance.function
        def add(one: int, more: int = 1) -> int:
            return one + more

        @instance.function(name="fail")
        def anything() -> None:
            raise KeyError("no")

        instance.push_load(queue=3.0, tokens=7)
        handle = eventually(
            lambda: [one for one in cast.instances() if one.load], within_s=20
        )[0]
        assert (handle.name, handle.labels) == ("e", {"zone": "a"})
        assert handle.load == {"queue": 3.0, "tokens": 7.0}
        assert handle.engine == ("transform_into", "transform_register", "manifest")
        handle = eventually(
            lambda: [one for one in cast.instances() if len(one.functions) == 2],
            within_s=20,
        )[0]
        assert handle.functions == ("add", "fail")
        assert handle.call("add", 2, more=5) == 7
        assert handle.call("add", 2, key="k") == 3
        with pytest.raises(Mismatch, match="another call"):
            handle.call("add", 3, key="k")
        with pytest.raises(CallFailed, match="KeyError"):
            handle.call("fail")
        with pytest.raises(Unimplemented, match="hydrate"):
            handle.hydrate("x", "s")
        with pytest.raises(InvalidArgument, match="put the tensors first"):
            handle.call("transform_into", {"w1": 1})
        lent = handle.transform_register("lent/all", names=["w1"])
        assert lent.tensor(framework="numpy").shape == (4, 3)
        with pytest.raises(InvalidArgument, match="artifact"):
            handle.call("add", np.zeros(3))
    eventually(lambda: not cast.instances(), within_s=20)
    with pytest.raises(OwnerGone):
        handle.call("add", 1)
    with pytest.raises(StaleOwner, match="detached"):
        instance.push_load(queue=1.0)
    (card,) = stores_in(run_dir)
    assert debug(card)["busy"]["calls"] == 0


def test_weights_are_written_in_place_or_not_at_all(
    cast: tc.Session, run_dir: Path
) -> None:
    held = Engine()
    good = cast.put(update(7.0), "p21/good")
    wrong: dict[str, dict[str, np.ndarray]] = {
        "shape": update(9.0) | {"w3": np.zeros((3, 4))},
        "broadcast": update(9.0) | {"w3": np.zeros((1,))},
        "dtype": update(9.0) | {"w3": np.zeros((4, 3), np.float32)},
        "missing": {k: v for k, v in update(9.0).items() if k != "w3"},
        "extra": update(9.0) | {"w9": np.zeros(3)},
    }
    with engine("e", run_dir, engine=held):
        handle = found(cast, "e")
        before = {name: array.copy() for name, array in held.live.items()}
        for name, tensors in wrong.items():
            artifact = cast.put(tensors, f"p21/{name}")
            with pytest.raises(Mismatch, match=r"w3|w9"):
                handle.transform_into(artifact)
        with pytest.raises(Mismatch, match="holds version 0"):
            handle.transform_into(good, expect=4)
        for name, array in held.live.items():
            np.testing.assert_array_equal(array, before[name])
        assert held.said == []
        assert found(cast, "e").holds == {}
        told = handle.transform_into(good, expect=0)
        assert told["applied"] == sorted(held.live)
        assert (held.live["w2"] == 7.0).all()
        assert (held.live["w5"] == 7.0).all()
        assert held.said == ["pause", "resume"]
        eventually(lambda: found(cast, "e").holds == {"p21/good": 1}, within_s=20)
        part = cast.put({"a": np.full((4, 3), 8.0)}, "p21/part")
        handle.transform_into(part, names={"a": "w1"}, partial=True)
        assert (held.live["w1"] == 8.0).all()


def test_half_an_update_poisons_the_instance_until_all_is_given_anew(
    cast: tc.Session, run_dir: Path
) -> None:
    held = Engine()
    good = cast.put(update(5.0), "poison/good")
    with engine("e", run_dir, engine=held) as instance:

        @instance.function
        def work() -> int:
            return 1

        held.spoil = True
        with pytest.raises(Poisoned, match="poison/good"):
            found(cast, "e").transform_into(good)
        handle = eventually(
            lambda: [one for one in cast.instances() if not one.routable], within_s=20
        )[0]
        assert "poison/good" in handle.poisoned
        with pytest.raises(Poisoned):
            handle.call("work")
        part = cast.put({"w1": np.full((4, 3), 8.0)}, "poison/part")
        with pytest.raises(Poisoned, match="not a part"):
            handle.transform_into(part, partial=True)
        handle.transform_into(good)
        eventually(lambda: found(cast, "e").routable, within_s=20)
        assert handle.call("work") == 1


def test_lent_memory_is_read_where_it_is_and_ends_with_its_owner(
    cast: tc.Session, run_dir: Path
) -> None:
    content = np.random.default_rng(0).normal(size=1 << 18)
    strided = np.arange(20.0)[::2]
    with engine("lender", run_dir) as instance, engine("e", run_dir, engine=Engine()):
        lent = instance.register({"x": content, "s": strided}, "lent/x")
        read = cast.artifact("lent/x").tensor_dict(framework="numpy")
        np.testing.assert_array_equal(read["x"], content)
        np.testing.assert_array_equal(read["s"], strided)
        with lent.mutate():
            content[:] = 3.0
        read = cast.artifact("lent/x").tensor_dict(framework="numpy")
        assert (read["x"] == 3.0).all()
        weights = instance.register(update(6.0), "lent/weights")
        found(cast, "e").transform_into(cast.artifact("lent/weights"))
        weights.release()
        with pytest.raises((Gone, OwnerGone)):
            cast.artifact("lent/weights").tensor_dict()
        copy = cast.publish("lent/x").result()
        kept = cast.artifact("lent/x")
    assert (kept.version, copy.version) == (2, 2)
    assert (kept.tensor_dict(framework="numpy")["x"] == 3.0).all()


@pytest.mark.parametrize("nbytes", [100, 2_000_000, 2 << 20, 3 << 20])
def test_what_an_instance_puts_is_read_by_others(
    cast: tc.Session, run_dir: Path, nbytes: int
) -> None:
    content = np.random.default_rng(nbytes).bytes(nbytes)
    with engine("e", run_dir) as instance:
        made = instance.put({"x": np.frombuffer(content, np.uint8)}, f"put/{nbytes}")
        read = cast.artifact(made.id).tensor(framework="numpy")
    assert bytes(read) == content


def test_a_forked_child_cannot_use_or_end_the_attachment(
    cast: tc.Session, run_dir: Path
) -> None:
    with engine("e", run_dir) as instance:
        child = os.fork()
        if not child:  # pragma: no cover - in the child
            status = 1
            try:
                instance.push_load(queue=1.0)
            except UnsupportedPlatform:
                instance.detach()
                status = 0
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        instance.function(len, name="size")
        assert found(cast, "e").call("size", "four") == 4


def test_a_process_that_is_killed_in_a_call_leaves_it_unknown_and_its_name_free(
    cast: tc.Session, run_dir: Path, tmp_path: Path
) -> None:
    log, never = tmp_path / "log", str(tmp_path / "never")
    with process("e", run_dir) as first:
        handle = found(cast, "e")
        raised: list[BaseException] = []

        def call() -> None:
            try:
                handle.call("note", str(log), never)
            except TensorCastError as error:
                raised.append(error)

        caller = threading.Thread(target=call)
        caller.start()
        eventually(lambda: lines(log), within_s=20)
        with pytest.raises(DeadlineExceeded):
            handle.call("pid", deadline=0.2)
        first.send_signal(signal.SIGKILL)
        caller.join(20)
        assert [type(error) for error in raised] == [Unknown]
        with process("e", run_dir) as second:
            assert found(cast, "e").call("pid") == second.pid
            with pytest.raises(OwnerGone):
                handle.call("pid")
    assert lines(log) == [str(first.pid)]


def test_the_later_process_of_a_name_has_it_and_the_earlier_is_let_go(
    cast: tc.Session, run_dir: Path, tmp_path: Path
) -> None:
    begun, go = tmp_path / "begun", tmp_path / "go"
    with engine("e", run_dir) as old:

        @old.function
        def work() -> None:
            begun.touch()
            wait_for(str(go))

        found(cast, "e")
        plan = cast.plan()
        called = plan.on_instance("e").call("work", retries=0)
        run = plan.submit(executor="rpc")
        eventually(begun.exists, within_s=20)
        with process("e", run_dir) as new:
            assert isinstance(run.outcome(timeout=20)[called].error, Unknown)
            assert found(cast, "e").call("pid") == new.pid
            # It hears of that when its function has ended, and does not take the name back.
            go.touch()
            eventually(lambda: not old.attached, within_s=20)
            with pytest.raises(StaleOwner, match="another process"):
                old.push_load(queue=1.0)
            assert found(cast, "e").call("pid") == new.pid


def test_a_step_goes_to_one_life_and_is_carried_out_once(
    cast: tc.Session, run_dir: Path, tmp_path: Path
) -> None:
    log, go = tmp_path / "log", tmp_path / "go"
    with process("e", run_dir) as first:
        plan = cast.plan(tc.context(key="once"))
        asked = plan.on_instance("e").call("note", str(log), str(go), name="asked")
        total = plan.on_instance("e").call("total", after=[asked])
        run = plan.submit()
        eventually(lambda: lines(log), within_s=30)
        # The worker that waits for it dies: its successor asks again, and gets the outcome.
        (pid,) = cast.client.run(os.getpid).values()
        os.kill(pid, signal.SIGKILL)
        eventually(cast.workers, within_s=60)
        go.touch()
        result = run.result(timeout=60)
        assert result[asked].value == first.pid
        assert result[total].value == 0.0
        assert lines(log) == [str(first.pid)]
        go.unlink()
        # The process dies in a step: nobody else is asked.
        plan = cast.plan(tc.context(key="killed"))
        asked = plan.on_instance("e").call("note", str(log), str(go), name="asked")
        run = plan.submit()
        eventually(lambda: len(lines(log)) == 2, within_s=30)
        first.send_signal(signal.SIGKILL)
        with process("e", run_dir):
            result = run.outcome(timeout=60)
            assert isinstance(result[asked].error, Unknown)
            run.resume()
            assert isinstance(run.outcome(timeout=60)[asked].error, Unknown)
    assert len(lines(log)) == 2


def test_a_step_whose_driving_store_is_killed_ends_typed_and_was_made_once(
    cast: tc.Session, run_dir: Path, tmp_path: Path
) -> None:
    log, go = tmp_path / "log", tmp_path / "go"

    def alone() -> list[tc.Worker]:
        """The one node, once those that other tests have killed are given up."""
        found = cast.workers()
        return found if len(found) == 1 else []

    (worker,) = eventually(alone, within_s=60)
    with process("e", run_dir) as engine_process:
        plan = cast.plan(tc.context(key="driven"))
        asked = plan.on_instance("e").call("note", str(log), str(go), name="asked")
        total = plan.on_instance("e").call("total", after=[asked])
        run = plan.submit(executor="rpc")
        eventually(lambda: lines(log), within_s=30)
        os.kill(store_pid(cast, worker.node), signal.SIGKILL)
        go.touch()
        result = run.outcome(timeout=100)
        if (
            result[asked].status == "done"
        ):  # it was attached again when it was asked again
            assert result[asked].value == engine_process.pid
            assert result[total].value == 0.0
        else:
            assert isinstance(result[asked].error, Unknown)
    assert lines(log) == [str(engine_process.pid)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_instance_attaches_again_when_its_store_dies_or_ends(
    cast: tc.Session, run_dir: Path, how: signal.Signals
) -> None:
    content = np.arange(1000.0)
    with engine("e", run_dir) as instance:
        instance.function(len, name="size")
        assert found(cast, "e").call("size", "four", key="before") == 4
        instance.register({"x": content}, f"again/{how.name}")
        (card,) = stores_in(run_dir)
        os.kill(card.pid, how)
        eventually(lambda: instance.card.node != card.node, within_s=60)

        def works() -> bool:
            try:
                return bool(cast.instance("e").call("size", "four", key="before") == 4)
            except (NotFound, OwnerGone):
                return False

        eventually(works, within_s=60)

        def readable() -> bool:
            try:
                read = cast.artifact(f"again/{how.name}").tensor(framework="numpy")
            except TensorCastError:
                return False
            return bool((read == content).all())

        eventually(readable, within_s=30)
