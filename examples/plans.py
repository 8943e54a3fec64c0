"""A plan: the paper's calls put together, carried out across the cluster, once under its key."""

from __future__ import annotations

import numpy as np

import tensorcast_dask as tc


def checksum(artifact: tc.Artifact) -> float:
    """The caller's own function, beside the bytes."""
    tensors = artifact.tensor_dict(framework="numpy")
    return float(sum(tensor.sum() for tensor in tensors.values()))


def refuse(artifact: tc.Artifact, limit: float) -> None:
    if checksum(artifact) > limit:
        raise ValueError("these weights are too heavy")


def main() -> None:
    with (
        tc.LocalCluster(n_workers=2, host_memory="64 MiB") as cluster,
        tc.connect(cluster) as cast,
    ):
        state = {"embed": np.ones((1000, 64), np.float32), "bias": np.zeros(64)}
        weights = cast.put(state, "qwen3/weights")
        w1, w2 = cast.workers()
        w1.publish(weights, version=1)
        newest = cast.latest("qwen3/weights")

        # As the paper's Figure 3 writes it; steps are arguments of later steps.
        with tc.plan(tc.context(id="roll-out", ddl=60, key="roll-out-7")) as plan:
            ready = plan.on_worker(w1).prefetch(newest, device="host")
            copy = plan.on_worker(w2).replicate(ready)
            total = plan.on_worker(w2).submit(checksum, copy)
        result = plan.run(concurrency=4)
        assert result[total].value == 64_000.0
        print(plan.visualize())

        # The same key again does nothing and gives the same result.
        assert plan.run()[total].value == 64_000.0
        assert cast.plan_run("roll-out-7").result().status == "done"

        # A failure skips what needs it, undoes what says how, and names both.
        careful = tc.plan(tc.context(id="careful", key="careful-1"))
        second = careful.on_worker(w2).pin(copied(result, copy), ttl=600.0)
        careful.compensate(second).unpin(newest, second)
        check = careful.on_worker(w2).submit(refuse, newest, 10.0, after=[second])
        careful.on_any().alias("live", newest, after=[check])
        try:
            careful.run()
        except tc.exceptions.PlanFailed as failed:
            print(failed)
        assert cast.debug_state()["catalog"]["pins"] == 0
        assert not cast.exists("live")


def copied(result: tc.PlanResult, step: object) -> tc.Artifact:
    """A step's value is a handle like any other."""
    artifact: tc.Artifact = result[step].value
    return artifact


if __name__ == "__main__":
    main()
