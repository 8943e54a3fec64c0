"""Boxes of an n-dimensional tensor, and the bytes that they are.

Rules:

1. A box is one ascending range an axis; steps are positive. It names elements of a tensor
   in C order, each once. The box of a 0-d tensor has no axes and one element.
2. Bytes of a box are `Runs`: runs of equal length at nested arithmetic progressions. That
   form is exact for every box and takes a few numbers, however many runs there are.
3. Runs come in ascending order and never overlap; whole rows, planes and so on are one run.
"""

from __future__ import annotations

import math
import struct
from itertools import islice, product
from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.exceptions import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensorcast_dask.tensors.specs import Shape

__all__ = [
    "MOST_RUNS",
    "Box",
    "Runs",
    "box_runs",
    "c_strides",
    "intersect",
    "relative",
    "whole",
]

#: Runs of one request: answering it takes a store some milliseconds, not seconds.
MOST_RUNS: Final = 1 << 14

#: One range an axis.
Box = tuple[range, ...]


def whole(shape: Shape) -> Box:
    """Return the box of all elements."""
    return tuple(range(n) for n in shape)


def c_strides(shape: Shape) -> Shape:
    """Elements between neighbours along each axis of a C-order tensor."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def _check(box: Box, shape: Shape) -> None:
    if len(box) != len(shape):
        message = f"a box of {len(box)} axes does not lie in shape {shape}"
        raise InvalidArgument(message)
    for axis, n in zip(box, shape, strict=True):
        if axis.step < 1 or (len(axis) and not 0 <= axis[0] <= axis[-1] < n):
            message = f"the box axis {axis} does not lie in 0..{n}"
            raise InvalidArgument(message)


def _intersect_axis(a: range, b: range) -> range:
    """Members of both ranges."""
    if not a or not b:
        return range(0)
    divisor = math.gcd(a.step, b.step)
    distance = b.start - a.start
    if distance % divisor:
        return range(0)
    period = a.step // divisor * b.step
    # Steps of `a` to a member of `b`: (distance / g) * (a.step / g)^-1 modulo (b.step / g).
    modulus = b.step // divisor
    steps = distance // divisor * pow(a.step // divisor, -1, modulus) % modulus
    first = a.start + steps * a.step
    lowest = max(a.start, b.start)
    first += -(-(lowest - first) // period) * period
    members = range(first, min(a[-1], b[-1]) + 1, period)
    return members or range(0)


def intersect(a: Box, b: Box) -> Box | None:
    """Elements of both boxes of one tensor; None when there are none.

    Raises
    ------
    InvalidArgument
        When they do not have equally many axes.
    """
    if len(a) != len(b):
        message = f"boxes of {len(a)} and {len(b)} axes are not of one tensor"
        raise InvalidArgument(message)
    common = tuple(map(_intersect_axis, a, b))
    return common if all(common) else None


def relative(inner: Box, outer: Box) -> Box:
    """Where the elements of `inner` lie in a tensor that holds just `outer`, packed.

    Every element of `inner` must be one of `outer`.
    """
    axes: list[range] = []
    for a, b in zip(inner, outer, strict=True):
        if not a:
            axes.append(range(0))
            continue
        first = b.index(a[0])
        step = 1 if len(a) == 1 else b.index(a[1]) - first
        axes.append(range(first, first + (len(a) - 1) * step + 1, step))
    return tuple(axes)


class Runs(msgspec.Struct, frozen=True):
    """Runs of bytes at nested arithmetic progressions.

    Attributes
    ----------
    offset : int
        Of the first run.
    run_bytes : int
        Length of each run.
    counts, strides : tuple of int
        How often, and how far apart in bytes, from the outermost to the innermost
        progression. Every count is at least 2. No runs at all are `run_bytes` 0.
    """

    offset: int
    run_bytes: int
    counts: Shape = ()
    strides: Shape = ()

    def __len__(self) -> int:
        """Count the runs."""
        return math.prod(self.counts) if self.run_bytes else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return math.prod(self.counts) * self.run_bytes

    @property
    def span(self) -> tuple[int, int]:
        """First byte, and the one after the last."""
        reach = sum((n - 1) * s for n, s in zip(self.counts, self.strides, strict=True))
        return self.offset, self.offset + reach + self.run_bytes

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Give (offset, length) of each run, in ascending order."""
        run_bytes = self.run_bytes
        return ((at, run_bytes) for at in self.offsets())

    def offsets(self) -> Iterator[int]:
        """Offsets of the runs, in ascending order."""
        if not self.run_bytes:
            return
        *outer, inner = [
            range(0, n * s, s) for n, s in zip(self.counts, self.strides, strict=True)
        ] or [range(1)]
        for place in product(*outer):
            start = self.offset + sum(place)
            yield from range(start, start + inner.stop, inner.step)

    def shifted(self, by_bytes: int) -> Runs:
        """Return the same runs, elsewhere."""
        return Runs(self.offset + by_bytes, self.run_bytes, self.counts, self.strides)

    def batches(self, max_bytes: int) -> Iterator[tuple[int, bytes]]:
        """Cut the runs into requests.

        Each is the number of bytes that it asks for, at most `max_bytes`, and at most
        `MOST_RUNS` runs as little-endian u64 pairs (offset, length). A run that is longer
        is cut.

        Raises
        ------
        InvalidArgument
            When `max_bytes` is not positive.
        """
        if max_bytes < 1:
            message = f"a request needs at least 1 byte, not {max_bytes}"
            raise InvalidArgument(message)
        if self.run_bytes > max_bytes:
            for start, nbytes in self:
                for at in range(start, start + nbytes, max_bytes):
                    n = min(max_bytes, start + nbytes - at)
                    yield n, struct.pack("<2Q", at, n)
            return
        offsets = self.offsets()
        each = min(max_bytes // max(self.run_bytes, 1), MOST_RUNS)
        while batch := list(islice(offsets, each)):
            pairs = [self.run_bytes] * (2 * len(batch))
            pairs[::2] = batch
            yield len(batch) * self.run_bytes, struct.pack(f"<{len(pairs)}Q", *pairs)


def box_runs(shape: Shape, itemsize: int, box: Box) -> Runs:
    """Bytes of a box in a C-order tensor, from the tensor's first byte.

    Raises
    ------
    InvalidArgument
        When the box does not lie in the tensor.
    """
    _check(box, shape)
    if not all(box):
        return Runs(0, 0)
    offset = 0
    run_bytes = itemsize
    progressions: list[tuple[int, int]] = []  # innermost first
    for axis, stride in zip(reversed(box), reversed(c_strides(shape)), strict=True):
        offset += axis.start * stride * itemsize
        count, step_bytes = len(axis), axis.step * stride * itemsize
        if count == 1:
            continue
        if not progressions and step_bytes == run_bytes:
            run_bytes *= count
        elif progressions and step_bytes == math.prod(progressions[-1]):
            progressions[-1] = (progressions[-1][0] * count, progressions[-1][1])
        else:
            progressions.append((count, step_bytes))
    counts = tuple(n for n, _ in reversed(progressions))
    strides = tuple(s for _, s in reversed(progressions))
    return Runs(offset, run_bytes, counts, strides)
