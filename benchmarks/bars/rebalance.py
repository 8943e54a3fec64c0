"""Algorithm 1 on a generated load: p95 of queueing, against no rebalancing and two choices.

A simulation with a virtual clock (`benchmarks/routing.py`): the same numbers on every machine.
"""

from __future__ import annotations

from benchmarks.harness import emit, paired
from benchmarks.routing import PRESETS, Outcome, simulate
from benchmarks.sizes import Sizes, parse

SEED = 7
AGAINST = ("none", "two choices a turn")
OTHERS = ("two choices, then stays",)


def main(sizes: Sizes) -> None:
    """Two lines for each preset."""
    seconds = 600.0 if sizes.smoke else 3600.0
    for preset in PRESETS:
        found: dict[str, Outcome] = {
            routing: simulate(preset, routing, seed=SEED, seconds=seconds)
            for routing in ("rebalance", *AGAINST, *OTHERS)
        }
        facts = {routing: one.facts() for routing, one in found.items()}
        for routing in AGAINST:
            emit(
                paired(
                    f"Rebalance, {preset} sessions, p95 queueing, against {routing}",
                    lambda: found["rebalance"].p95_s,
                    lambda: found[routing].p95_s,
                    bar=1.0,
                    better="lower",
                    unit="s",
                    pairs=1,
                    warm=0,
                    notes={"seed": SEED, **facts},
                )
            )


if __name__ == "__main__":
    main(parse())
