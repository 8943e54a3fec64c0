"""Use artifacts in Dask tasks: a handle travels, the bytes stay where they are."""

from __future__ import annotations

import numpy as np

import tensorcast_dask as tc


def norm(artifact: tc.Artifact) -> float:
    """Run on a worker; the tensors are mapped there."""
    return float(np.linalg.norm(artifact.tensor_dict(framework="numpy")["w"]))


def double(artifact: tc.Artifact) -> str:
    """Make another artifact from inside a task, with the worker's own session."""
    w = artifact.tensor_dict(framework="numpy")["w"]
    return tc.put({"w": 2 * w}, "layer/doubled").id


def make(n: int) -> np.ndarray:
    return np.full((n, n), 3, np.float32)


def main() -> None:
    with (
        tc.LocalCluster(n_workers=2, host_memory="64 MiB") as cluster,
        tc.connect(cluster) as cast,
    ):
        w = np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32)
        layer = cast.put({"w": w}, "layer")

        anywhere = cast.client.submit(norm, layer)
        beside_the_bytes = cast.submit(norm, layer)  # goes to a holder
        assert (
            anywhere.result() == beside_the_bytes.result() == float(np.linalg.norm(w))
        )

        doubled = cast.artifact(cast.submit(double, layer).result())
        assert np.array_equal(doubled.tensor_dict(framework="numpy")["w"], 2 * w)

        # A Future is put by the worker that has it: its result is never sent here.
        made = cast.put(cast.client.submit(make, 256), "made")
        assert (made.tensor(framework="numpy") == 3).all()
        print("norm", anywhere.result(), "of", layer)


if __name__ == "__main__":
    main()
