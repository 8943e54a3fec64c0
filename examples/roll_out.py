"""New weights for every instance, in place, by one plan: all of them, or the old ones again."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from paged_engine import PagedEngine, make_weights

import tensorcast_dask as tc

ENGINE = str(Path(__file__).with_name("paged_engine.py"))


def start(name: str, run_dir: str) -> subprocess.Popen[str]:
    """An engine in a process of its own, as it would run in a cluster."""
    import os

    process = subprocess.Popen(
        [sys.executable, ENGINE, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ) | {"TENSORCAST_RUN_DIR": run_dir},
    )
    assert process.stdout is not None
    print(name, process.stdout.readline().strip())
    return process


@contextmanager
def engines(*names: str) -> Iterator[tc.Session]:
    """A cluster with engines of these names attached."""
    run_dir = tempfile.mkdtemp(prefix="tcd-")
    settings = {"run-dir": run_dir}
    with (
        tc.LocalCluster(
            n_workers=2, host_memory="64 MiB", settings=settings
        ) as cluster,
        tc.connect(cluster) as cast,
    ):
        started = [start(name, run_dir) for name in names]
        try:
            yield cast
        finally:
            for engine in started:
                engine.communicate(timeout=30)  # its stdin ends, and it detaches


def main() -> None:
    with engines("engine-0", "engine-1") as cast:
        roll_out(cast)


def roll_out(cast: tc.Session) -> None:
    """Put version 1 and 2; give version 2 to all; say what each holds."""
    first = cast.put(make_weights(1), "toy/weights")
    second = cast.put(make_weights(2), "toy/weights", version="next")
    for instance in cast.instances():
        instance.transform_into(first)

    with cast.plan(tc.context(id="roll-out", ddl=60, key="roll-out-2")) as plan:
        live = plan.on_any().publish(second)
        for instance in cast.instances():
            done = plan.on_instance(instance).transform_into(
                live, expect=1, name=f"update-{instance.name}"
            )
            # Should another one fail, this one goes back.
            plan.compensate(done).on_instance(instance).transform_into(
                first, name=f"restore-{instance.name}"
            )
    result = plan.run()
    print({name: result[name].value for name in result})
    assert [one.holds for one in cast.instances()] == [{"toy/weights": 2}] * 2

    # The engines compute what one computes that had these weights from the start.
    truth = PagedEngine(seed=2).generate("s", [3, 1, 4])
    for instance in cast.instances():
        assert instance.call("generate", "s", [3, 1, 4]) == truth

    # What does not fit is refused before the first byte, by name.
    wrong = cast.put({"embed": np.zeros((2, 2), np.float32)}, "toy/other")
    try:
        cast.instance("engine-0").transform_into(wrong)
    except tc.exceptions.Mismatch as refused:
        print(refused)
    assert cast.instance("engine-0").holds == {"toy/weights": 2}


if __name__ == "__main__":
    main()
