"""How big and how often: the real bars, and a smoke run that only shows that all works."""

from __future__ import annotations

import argparse
import dataclasses

MIB = 1 << 20
GIB = 1 << 30

__all__ = ["GIB", "MIB", "Sizes", "parse"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a bench may vary; a smoke run decides no bar."""

    big_bytes: int = GIB
    small_bytes: int = 64 * MIB
    pairs: int = 7
    tensors: int = 10_000
    artifacts: int = 100_000
    kills: int = 5
    window_s: float = 10.0
    rate_s: float = 2.0
    smoke: bool = False

    @property
    def node_memory(self) -> str:
        """Budget of one node: the artifact, its successor, and room."""
        return f"{int(self.big_bytes * 2.5) // MIB + 64} MiB"


SMOKE = Sizes(
    big_bytes=64 * MIB,
    small_bytes=4 * MIB,
    pairs=2,
    tensors=200,
    artifacts=500,
    kills=1,
    window_s=0.5,
    rate_s=0.3,
    smoke=True,
)


def parse(arguments: list[str] | None = None) -> Sizes:
    """The sizes that a bench's command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--pairs", type=int)
    chosen = parser.parse_args(arguments)
    sizes = SMOKE if chosen.smoke else Sizes()
    return dataclasses.replace(sizes, pairs=chosen.pairs) if chosen.pairs else sizes
