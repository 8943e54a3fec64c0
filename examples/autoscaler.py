"""An autoscaler: a trigger on a signal adds a worker when memory runs short, and a policy repairs."""

from __future__ import annotations

import time

import numpy as np

import tensorcast_dask as tc
from tensorcast_dask import policies
from tensorcast_dask.tensors.signals import Signal

MIB = 1 << 20


def main() -> None:
    with (
        tc.LocalCluster(
            n_workers=1, host_memory="64 MiB", separate_hosts=True
        ) as cluster,
        tc.connect(cluster) as cast,
    ):
        # Versions are to lie on two hosts; a policy sees to it once there are two.
        cast.policies.install(policies.ReplicaFloor(), every=0.2, limit=10)
        events = cast.signals.watch("event/repaired", every=0.1)
        next(events)
        weights = cast.put(np.zeros(40 * MIB, np.uint8), "weights", replicas=2)
        assert "1 of 2 hosts" in weights.degraded

        def grow(signal: Signal) -> None:
            print(
                f"{signal['free_fraction']:.0%} of the memory is free: one worker more"
            )
            cluster.scale(2)

        trigger = cast.signals.trigger(
            "node/", "free_fraction", grow, below=0.5, clear=0.6, cooldown=60, every=0.1
        )
        until = time.monotonic() + 120
        while len(cast.workers()) < 2 and time.monotonic() < until:
            time.sleep(0.1)
        assert len(cast.workers()) == 2
        assert len(trigger.fired) == 1
        assert trigger.error is None

        (repaired,) = next(events).events
        print(f"repaired: {repaired['id']!r} lies on {repaired['node']} too")
        seen = cast.signals.snapshot("artifact/weights")["artifact/weights"]
        assert (seen["hosts"], seen["missing"]) == (2, 0)
        assert not cast.artifact("weights").degraded
        trigger.close()


if __name__ == "__main__":
    main()
