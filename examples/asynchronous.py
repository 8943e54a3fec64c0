"""The same calls, awaited; an operation that runs while the program goes on."""

from __future__ import annotations

import asyncio

import numpy as np
from distributed import Client

import tensorcast_dask as tc


async def main() -> None:
    async with (
        tc.LocalCluster(
            n_workers=2, host_memory="64 MiB", asynchronous=True
        ) as cluster,
        Client(cluster, asynchronous=True) as client,
        await tc.connect(client) as cast,
    ):
        parts = await asyncio.gather(
            *(cast.put({"x": np.full(1000, i)}, f"part/{i}") for i in range(8))
        )
        sums = [
            (await part.tensor_dict(framework="numpy"))["x"].sum() for part in parts
        ]
        assert sums == [1000 * i for i in range(8)]
        assert [part.id for part in await cast.list("part/")] == [p.id for p in parts]

        first = parts[0]
        holder = (await first.locations())[0].card.node
        other = next(w for w in await cast.workers() if w.node != holder)
        operation = await other.prefetch(first)  # begun, not waited for
        moved = await operation.result()
        assert moved.location.card.node == other.node
        assert operation.status == "done"
        print(operation, "took", f"{moved.seconds * 1e3:.1f} ms")


if __name__ == "__main__":
    asyncio.run(main())
