from __future__ import annotations

import ctypes

import pytest
import xxhash

from tensorcast_dask.exceptions import CorruptFile, InvalidArgument
from tensorcast_dask.tensors.checksums import (
    DEFAULT_CHUNK_BYTES,
    check_chunk_bytes,
    chunk_count,
    chunk_range,
    chunk_sum,
    chunk_sums,
    chunks_of_range,
    content_digest,
    decode_sums,
    encode_sums,
)

DATA = bytes(range(256)) * 50
CHUNK = 4096


@pytest.mark.parametrize(
    ("nbytes", "chunks"), [(0, 0), (1, 1), (4095, 1), (4096, 1), (4097, 2), (12800, 4)]
)
def test_a_segment_has_as_many_chunks_as_cover_it(nbytes: int, chunks: int) -> None:
    assert chunk_count(nbytes, CHUNK) == chunks
    ranges = [chunk_range(chunk, nbytes, CHUNK) for chunk in range(chunks)]
    assert [at for start, n in ranges for at in range(start, start + n)] == list(
        range(nbytes)
    )


@pytest.mark.parametrize(("chunk", "nbytes"), [(0, 0), (1, 4096), (-1, 4096)])
def test_a_chunk_that_is_not_there_has_no_range(chunk: int, nbytes: int) -> None:
    with pytest.raises(InvalidArgument):
        chunk_range(chunk, nbytes, CHUNK)


@pytest.mark.parametrize("chunk_bytes", [4096, DEFAULT_CHUNK_BYTES, 1 << 30])
def test_whole_pages_up_to_a_gibibyte_are_chunks(chunk_bytes: int) -> None:
    assert check_chunk_bytes(chunk_bytes) == chunk_bytes


@pytest.mark.parametrize("chunk_bytes", [0, -4096, 1, 4097, (1 << 30) + 4096])
def test_other_chunk_sizes_are_refused(chunk_bytes: int) -> None:
    with pytest.raises(InvalidArgument):
        check_chunk_bytes(chunk_bytes)


def test_a_chunks_sum_is_the_xxh3_of_its_bytes() -> None:
    sums = list(chunk_sums(DATA, len(DATA), CHUNK))
    assert sums == [
        xxhash.xxh3_64_intdigest(DATA[at : at + CHUNK])
        for at in range(0, len(DATA), CHUNK)
    ]
    assert chunk_sum(b"") == 0x2D06800538D394C2  # the published sum of nothing


def test_bytes_beyond_the_segment_do_not_count() -> None:
    assert list(chunk_sums(DATA, 5000, CHUNK)) == list(
        chunk_sums(DATA[:5000], 5000, CHUNK)
    )


def test_any_contiguous_buffer_has_sums() -> None:
    expected = list(chunk_sums(DATA, len(DATA), CHUNK))
    numbers = memoryview(DATA).cast("Q")
    exported = (ctypes.c_ubyte * len(DATA)).from_buffer_copy(DATA)
    for buffer in (bytearray(DATA), numbers, exported):
        assert list(chunk_sums(buffer, len(DATA), CHUNK)) == expected


def test_too_few_bytes_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        list(chunk_sums(b"abc", 4, CHUNK))


def test_an_empty_segment_has_no_sums() -> None:
    assert list(chunk_sums(b"", 0, CHUNK)) == []
    assert decode_sums(b"", nbytes=0, chunk_bytes=CHUNK) == ()


def test_one_flipped_bit_changes_one_sum() -> None:
    damaged = bytearray(DATA)
    damaged[5000] ^= 1
    pairs = zip(
        chunk_sums(DATA, len(DATA), CHUNK),
        chunk_sums(damaged, len(DATA), CHUNK),
        strict=True,
    )
    assert [a == b for a, b in pairs] == [True, False, True, True]


def test_sums_survive_the_codec() -> None:
    sums = (0, 1, (1 << 64) - 1)
    assert encode_sums(sums)[8:10] == b"\x01\x00"
    assert (
        decode_sums(encode_sums(sums), nbytes=2 * CHUNK + 1, chunk_bytes=CHUNK) == sums
    )


@pytest.mark.parametrize("data", [b"", b"\x00" * 8, b"\x00" * 15, b"\x00" * 24])
def test_sums_of_another_number_of_chunks_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptFile):
        decode_sums(data, nbytes=2 * CHUNK, chunk_bytes=CHUNK)


def test_a_content_digest_depends_on_index_sums_and_cut() -> None:
    digests = {
        content_digest("aa", [1, 2], CHUNK),
        content_digest("ab", [1, 2], CHUNK),
        content_digest("aa", [2, 1], CHUNK),
        content_digest("aa", [1], CHUNK),
        content_digest("aa", [1, 2], 2 * CHUNK),
    }
    assert len(digests) == 5
    assert content_digest("aa", [1, 2], CHUNK) == "f24b6655784d886cf7d7b8bddf95863b"


@pytest.mark.parametrize(
    ("offset", "nbytes", "chunks"),
    [(0, 0, []), (4096, 0, []), (0, 1, [0]), (4095, 2, [0, 1]), (4096, 4096, [1])],
)
def test_a_range_touches_the_chunks_that_its_bytes_are_in(
    offset: int, nbytes: int, chunks: list[int]
) -> None:
    assert list(chunks_of_range(offset, nbytes, CHUNK)) == chunks
