"""Build tensors inside the cluster's memory; lend tensors that stay yours."""

from __future__ import annotations

import numpy as np

import tensorcast_dask as tc
from tensorcast_dask.exceptions import Gone


def build(cast: tc.Session) -> None:
    """Create, fill, commit: nothing is copied, and the arrays stay valid."""
    spec = {"w": ((1024, 1024), "float32"), "b": (1024, "float32")}
    draft = cast.create(spec, "built")
    own = draft.tensors(framework="numpy")
    own["w"][...] = np.eye(1024)
    own["b"][...] = 1
    address = own["w"].ctypes.data
    built = draft.commit()
    assert own["w"].ctypes.data == address
    own["w"][...] = 0  # now private to this program
    assert built.tensor_dict(framework="numpy")["w"].trace() == 1024


def lend(cast: tc.Session) -> None:
    """Register: this process keeps the memory, readers get copies."""
    cache = {"k": np.zeros((256, 1024), np.float32)}
    lent = cast.register(cache, "cache")
    before = lent.tensor_dict(framework="numpy")
    with lent.mutate():  # the fence: nobody reads half of a change
        cache["k"][...] = 5
    assert (before["k"] == 0).all()
    assert (lent.tensor_dict(framework="numpy")["k"] == 5).all()

    kept = lent.publish().result()  # a copy that the cluster owns
    lent.release()
    try:
        lent.tensor_dict()
    except Gone:
        pass
    else:
        raise AssertionError("a released registration is gone")
    assert (kept.tensor_dict(framework="numpy")["k"] == 5).all()
    print("kept", kept)


def main() -> None:
    with (
        tc.LocalCluster(n_workers=1, host_memory="64 MiB") as cluster,
        tc.connect(cluster) as cast,
    ):
        build(cast)
        lend(cast)


if __name__ == "__main__":
    main()
