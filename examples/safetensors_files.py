"""Import a safetensors file, save it in shards, read it with the format's own library."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import tensorcast_dask as tc


def main() -> None:
    rng = np.random.default_rng(0)
    state = {f"layer{i}": rng.standard_normal((128, 256)) for i in range(8)}
    with (
        tempfile.TemporaryDirectory() as folder,
        tc.LocalCluster(n_workers=1, host_memory="64 MiB") as cluster,
        tc.connect(cluster) as cast,
    ):
        source = Path(folder) / "model.safetensors"
        save_file(state, source)
        model = cast.load(source, "model", labels={"from": "file"}).result()
        assert [a.id for a in cast.list(labels={"from": "file"})] == ["model"]

        whole = Path(folder) / "whole.safetensors"
        model.save(whole)
        back = load_file(whole)
        assert all(np.array_equal(back[name], state[name]) for name in state)

        sharded = Path(folder) / "sharded"
        model.save(sharded, max_shard_bytes=1 << 20)
        again = cast.load(sharded, "again").result()
        tensors = again.tensor_dict(framework="numpy")
        assert all(np.array_equal(tensors[name], state[name]) for name in state)
        print("saved and loaded", again)


if __name__ == "__main__":
    main()
