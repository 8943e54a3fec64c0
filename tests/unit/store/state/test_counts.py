from __future__ import annotations

from tensorcast_dask.store.state.counts import MAX_COUNTED, MAX_TOLD, Counts
from tensorcast_dask.tensors.ids import Generation


def test_reads_are_told_once() -> None:
    counts = Counts()
    for generation in (7, 8, 7):
        counts.read(Generation(generation))
    assert counts.take() == {7: 2, 8: 1}
    assert counts.take() == {}


def test_of_very_many_those_that_were_read_most_are_told() -> None:
    counts = Counts()
    for generation in range(MAX_COUNTED + 10):
        counts.read(Generation(generation))
    hot = Generation(MAX_COUNTED - 1)
    counts.read(hot)
    found = counts.take()
    assert len(found) == MAX_TOLD
    assert found[hot] == 2
    assert MAX_COUNTED + 5 not in found
