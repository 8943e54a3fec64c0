"""Put tensors, read them back without a copy, view a slice, publish a version."""

from __future__ import annotations

import numpy as np

import tensorcast_dask as tc


def main() -> None:
    with (
        tc.LocalCluster(n_workers=2, host_memory="64 MiB") as cluster,
        tc.connect(cluster) as cast,
    ):
        state = {"embed": np.ones((1000, 64), np.float32), "bias": np.zeros(64)}
        weights = cast.put(state, "toy/weights")
        weights.publish()

        assert weights.tensor_meta("embed").shape == (1000, 64)
        tensors = weights.tensor_dict(framework="numpy")
        tensors["bias"][:] = 7  # private: nobody else sees it
        again = weights.tensor_dict(framework="numpy")
        assert (again["bias"] == 0).all()

        head = weights.view({"embed": tc.s_[:10]}, name="toy/head")
        assert head.tensor(framework="numpy").shape == (10, 64)
        assert head.nbytes == 10 * 64 * 4

        holder = weights.locations()[0].card.node
        other = next(worker for worker in cast.workers() if worker.node != holder)
        other.replicate(weights)
        assert len(weights.locations()) == 2

        moved = other.migrate(weights, holder)
        assert moved.done()
        assert len(weights.locations()) == 1

        newer = cast.put({**state, "bias": np.ones(64)}, "toy/weights", version="next")
        assert cast.latest("toy/weights").version == 1  # not yet published
        newer.publish()
        assert cast.latest("toy/weights").version == 2
        print("latest is", cast.latest("toy/weights"))


if __name__ == "__main__":
    main()
