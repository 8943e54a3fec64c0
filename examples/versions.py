"""Versions that become visible when published, and an alias that moves and rolls back."""

from __future__ import annotations

import numpy as np

import tensorcast_dask as tc
from tensorcast_dask.exceptions import Mismatch


def main() -> None:
    with (
        tc.LocalCluster(n_workers=1, host_memory="64 MiB") as cluster,
        tc.connect(cluster) as cast,
    ):
        for step in range(1, 4):
            version = None if step == 1 else "next"
            saved = cast.put({"w": np.full(1000, step)}, "model", version=version)
            assert saved.version == step
            saved.publish()
        (worker,) = cast.workers()
        assert worker.latest("model") == cast.latest("model") == saved
        assert saved.version == 3

        # Serving follows an alias. Only who has seen its present generation moves it.
        stable = cast.alias("model/stable", cast.artifact("model", version=2), expect=0)
        assert cast.artifact("model/stable").version == 2
        moved = cast.alias(
            "model/stable", cast.latest("model"), expect=stable.alias_generation
        )
        try:
            cast.alias(
                "model/stable",
                cast.artifact("model", version=1),
                expect=stable.alias_generation,
            )
        except Mismatch as error:
            seen = error.data["generation"]
        else:
            raise AssertionError("a second mover with an old generation is refused")
        assert seen == moved.alias_generation
        assert cast.artifact("model/stable").version == 3

        # Roll back: what readers hold already stays as it is.
        held = cast.artifact("model/stable").tensor_dict(framework="numpy")
        cast.alias(
            "model/stable",
            cast.artifact("model", version=2),
            expect=moved.alias_generation,
        )
        stable_now = cast.artifact("model/stable").tensor_dict(framework="numpy")
        assert (held["w"] == 3).all()
        assert (stable_now["w"] == 2).all()

        cast.destroy(cast.artifact("model", version=3))
        assert cast.latest("model").version == 2
        assert cast.put({"w": np.zeros(1)}, "model", version="next").version == 4
        print("stable is", cast.artifact("model/stable"))


if __name__ == "__main__":
    main()
