from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from tensorcast_dask.exceptions import CorruptFile
from tensorcast_dask.tensors.specs import Index
from tests.kit.strategies import indices


@given(indices())
def test_an_index_decodes_to_itself(index: Index) -> None:
    again = Index.decode(index.encode())
    assert again == index
    assert again.encode() == index.encode()
    assert again.digest() == index.digest()


@given(indices())
def test_every_byte_of_a_segment_is_of_one_entry_or_one_gap(index: Index) -> None:
    covered = sorted(
        at
        for offset, nbytes in [
            *index.gaps(),
            *zip(index.offsets, index.sizes, strict=True),
        ]
        for at in range(offset, offset + nbytes)
    )
    assert covered == list(range(index.nbytes))


@given(indices(), st.data())
def test_a_damaged_encoding_is_another_index_or_a_corrupt_file(
    index: Index, data: st.DataObject
) -> None:
    encoded = bytearray(index.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(encoded) - 1))
        encoded[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptFile):
        found = Index.decode(bytes(encoded))
        assert found.nbytes >= 0
        assert Index.decode(found.encode()) == found


@given(st.binary(max_size=60))
def test_noise_is_an_index_or_a_corrupt_file(data: bytes) -> None:
    with contextlib.suppress(CorruptFile):
        Index.decode(data)
