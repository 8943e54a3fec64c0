"""Hypothesis strategies for the nouns of the project."""

from __future__ import annotations

from hypothesis import strategies as st

from tensorcast_dask.tensors.dtypes import DTYPES, DType
from tensorcast_dask.tensors.specs import ALIGN_BYTES, Index, nbytes_of

__all__ = ["ODD_IDS", "boxes", "dtypes", "indices", "names", "shapes", "slices"]

#: Legal ids that a careless escape would mix up, or take for a path.
ODD_IDS = (
    *("a/b", "a-SEP-b", "a%2Fb", "a__b", "a--b", "a\\b", "a:b", "a b", "a.b", "a@1"),
    *(".", "..", "../x", "/abs", "a/../b", "a/", "a//b", "é", "e\u0301", "A/B", "a/B"),
    *("x" * 500, "-rf", "*", "~", "'; drop table versions; --", '"q"', "a?b#c", "0"),
)
names = st.text(
    st.characters(categories=["L", "N", "P"], include_characters=" /"),
    min_size=1,
    max_size=40,
).filter(lambda text: text == text.strip())
dtypes: st.SearchStrategy[DType] = st.sampled_from(list(DTYPES.values()))
shapes: st.SearchStrategy[tuple[int, ...]] = st.lists(
    st.integers(0, 5), max_size=4
).map(tuple)


@st.composite
def indices(draw: st.DrawFn) -> Index:
    """Packed or placed, tied or not."""
    entries = draw(st.lists(st.tuples(dtypes, shapes), max_size=6))
    extra = draw(
        st.lists(st.integers(0, max(len(entries) - 1, 0)), max_size=4 if entries else 0)
    )
    entry_of = _in_order(draw(st.permutations([*range(len(entries)), *extra])))
    unique = draw(
        st.lists(names, min_size=len(entry_of), max_size=len(entry_of), unique=True)
    )
    kinds, forms = [d for d, _ in entries], [s for _, s in entries]
    if not draw(st.booleans()):
        return Index(unique, kinds, forms, entry_of=entry_of)
    offsets, end = [0] * len(entries), 0
    for at in draw(st.permutations(range(len(entries)))):
        gap = draw(st.integers(0, 2)) * 16
        offsets[at] = -(-(end + gap) // 16) * 16
        end = offsets[at] + nbytes_of(kinds[at], forms[at])
    total = end + draw(st.integers(0, ALIGN_BYTES))
    return Index(unique, kinds, forms, entry_of=entry_of, offsets=offsets, nbytes=total)


def _in_order(numbers: list[int]) -> list[int]:
    """Renumber in order of first use."""
    seen: dict[int, int] = {}
    return [seen.setdefault(number, len(seen)) for number in numbers]


def slices(size: int) -> st.SearchStrategy[slice]:
    """Any slice, mostly one that takes something of an axis of `size`."""
    bound = st.none() | st.integers(-size - 2, size + 2)
    step = st.none() | st.integers(-4, 4).filter(bool)
    return st.builds(slice, bound, bound, step)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[range, ...]:
    """A box of a tensor of that shape; an axis may be empty."""
    axes = []
    for n in shape:
        picked = range(n)[draw(slices(n))]
        axes.append(picked if picked.step > 0 else picked[::-1])
    return tuple(axes)
