"""Small artifacts as an index and bytes, for everything that moves them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorcast_dask.tensors.dtypes import DTYPES, dtype
from tensorcast_dask.tensors.specs import Index

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Sample:
    """A segment and what is in it."""

    index: Index
    segment: bytes

    def tensor(self, name: str) -> bytes:
        """Bytes of one tensor."""
        return tensor_bytes(self.index, self.segment, name)


def tensor_bytes(index: Index, segment: bytes | memoryview, name: str) -> bytes:
    """Bytes of one tensor in a segment."""
    entry = index.entry(name)
    return bytes(segment[entry.offset : entry.offset + entry.nbytes])


def fill(index: Index, seed: int) -> Sample:
    """Give each tensor of `index` random bytes; zeros stand between them."""
    segment = bytearray(random.Random(seed).randbytes(index.nbytes))
    for at, nbytes in index.gaps():
        segment[at : at + nbytes] = bytes(nbytes)
    return Sample(index, bytes(segment))


def sample(
    specs: Mapping[str, tuple[str, Sequence[int]]],
    *,
    ties: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Sample:
    """Make an artifact of (dtype, shape) by name; `ties` maps further names to owners."""
    names = list(specs)
    entry_of = list(range(len(names)))
    for alias, owner in (ties or {}).items():
        at = names.index(owner) + 1
        names.insert(at, alias)
        entry_of.insert(at, entry_of[at - 1])
    index = Index(
        names,
        [dtype(name) for name, _ in specs.values()],
        [tuple(shape) for _, shape in specs.values()],
        entry_of=entry_of,
    )
    return fill(index, seed)


def every_dtype(*, seed: int = 0) -> Sample:
    """Make a tensor of every dtype and several shapes, zero-size and 0-d ones among them."""
    shapes = {
        "": (),
        "_none": (0,),
        "_rows": (2, 0),
        "_cube": (3, 5, 7),
        "_one": (1, 1),
    }
    specs = {
        f"{name}{suffix}": (name, shape)
        for name in DTYPES
        for suffix, shape in shapes.items()
    }
    return sample(
        specs, ties={"tied/ünï": "bfloat16_cube", "also": "complex128"}, seed=seed
    )
