"""A short benchmark of the product on the user's own cluster.

Rules:

1. It says what was measured, from where, and how often; it judges nothing.
2. Whatever it puts goes again, also when it is interrupted.
3. Each figure is the median of its rounds; the first round is thrown away (fresh pages, first connections).
"""

from __future__ import annotations

import contextlib
import secrets
import statistics
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tensorcast_dask.dataplane.memory import private
from tensorcast_dask.exceptions import CapacityError, TensorCastError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Figure", "measure"]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was measured; `rate` is bytes a second where bytes moved."""

    what: str
    seconds: float
    bytes: int = 0
    rounds: int = 0
    note: str = ""

    @property
    def rate(self) -> float:
        """Bytes a second; 0 where none moved."""
        return self.bytes / self.seconds if self.bytes and self.seconds else 0.0


_CALLS: Final = 200


def measure(cast: Any, *, nbytes: int, rounds: int) -> Iterator[Figure]:
    """Measure one thing after the other."""
    import numpy as np

    name = f"tensorcast-bench/{secrets.token_hex(6)}"
    try:
        tensor = np.frombuffer(private(nbytes), np.uint8)
    except (OSError, OverflowError) as error:
        message = f"this machine has no memory of {nbytes} bytes; give a smaller --size"
        raise CapacityError(message) from error
    block = np.random.default_rng(1).integers(0, 255, min(nbytes, 1 << 20), np.uint8)
    for start in range(0, nbytes, len(block)):
        tensor[start : start + len(block)] = block[: nbytes - start]
    try:
        yield _of("one question to the catalog", lambda: cast.exists(name), _CALLS)
        yield from _bytes(cast, name, {"w": tensor}, rounds)
        yield from _plan(cast, rounds)
    finally:
        for one in ("w", "small"):
            with contextlib.suppress(TensorCastError):
                cast.destroy(f"{name}/{one}")


def _of(what: str, act: Callable[[], Any], rounds: int, nbytes: int = 0) -> Figure:
    taken = []
    for _ in range(rounds + 1):
        start_s = time.perf_counter()
        act()
        taken.append(time.perf_counter() - start_s)
    seconds = statistics.median(taken[1:])
    return Figure(what=what, seconds=seconds, bytes=nbytes, rounds=rounds)


def _bytes(
    cast: Any, name: str, tensors: dict[str, Any], rounds: int
) -> Iterator[Figure]:
    import numpy as np

    nbytes = tensors["w"].nbytes
    small = {"x": np.zeros(16)}

    def put_small() -> None:
        cast.put(small, f"{name}/small")
        cast.destroy(f"{name}/small")

    def put() -> None:
        with contextlib.suppress(TensorCastError):
            cast.destroy(f"{name}/w")
        cast.put(tensors, f"{name}/w")

    yield _of("put of 128 bytes, and its end", put_small, rounds)
    yield _of("put", put, rounds, nbytes)
    artifact = cast.artifact(f"{name}/w")
    yield _of(
        "read: mapped on a node's host, else copied",
        lambda: artifact.tensor_dict(framework="numpy"),
        rounds,
        nbytes,
    )
    yield _copied(cast, artifact, rounds)


def _copied(cast: Any, artifact: Any, rounds: int) -> Figure:
    """Copy to another node, best on another host, and take it back each time."""
    what = "copy to another node"
    at = {one.card.node: one.card.host for one in artifact.locations()}
    others = [one for one in cast.nodes() if one.attended and one.card.node not in at]
    if not others:
        return Figure(what=what, seconds=0.0, note="there is one node only")
    others.sort(key=lambda one: one.card.host in at.values())
    target, taken, via = others[0].card.node, [], ""
    for _ in range(rounds + 1):
        moved = cast.replicate(artifact, target).result()
        taken.append(moved.seconds)
        via = moved.via
        cast.release(artifact, worker=target).result()
    return Figure(
        what=what,
        seconds=statistics.median(taken[1:]),
        bytes=artifact.nbytes if via not in {"here", "shm"} else 0,
        rounds=rounds,
        note=f"by {via}",
    )


def _plan(cast: Any, rounds: int) -> Iterator[Figure]:
    def run() -> None:
        plan = cast.plan()
        plan.on_any().noop()
        plan.run()

    yield _of("a plan of one step that does nothing", run, rounds)
