"""Which bytes are asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorcast_dask.http.state.ranges import Part, etag_of, part_of, unchanged

TAG = '"1-ab-77"'


def part(status: int, start: int, stop: int, length: int = 100) -> Part:
    return Part(status=status, start=start, stop=stop, length=length)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", part(200, 0, 100)),
        ("bytes=0-0", part(206, 0, 1)),
        ("bytes=0-99", part(206, 0, 100)),
        ("bytes=10-19", part(206, 10, 20)),
        ("bytes=90-", part(206, 90, 100)),
        ("bytes=99-500", part(206, 99, 100)),
        ("bytes=-1", part(206, 99, 100)),
        ("bytes=-100", part(206, 0, 100)),
        ("bytes=-500", part(206, 0, 100)),
        ("bytes=100-", part(416, 0, 0)),
        ("bytes=100-200", part(416, 0, 0)),
        ("bytes=-0", part(416, 0, 0)),
        # What the standard lets a server ignore.
        ("bytes=0-1,5-6", part(200, 0, 100)),
        ("bytes=5-4", part(200, 0, 100)),
        ("bytes=-", part(200, 0, 100)),
        ("items=0-1", part(200, 0, 100)),
        ("bytes=a-b", part(200, 0, 100)),
        ("bytes=\u0661-\u0662", part(200, 0, 100)),
        ("bytes=0-" + "9" * 40, part(200, 0, 100)),
    ],
)
def test_a_range_is_read_as_the_standard_says(header: str, expected: Part) -> None:
    assert part_of(header, 100, etag=TAG) == expected


def test_a_range_of_another_version_gives_all_of_this_one() -> None:
    assert part_of("bytes=0-9", 100, etag=TAG, if_range=TAG).status == 206
    assert part_of("bytes=0-9", 100, etag=TAG, if_range='"other"').status == 200


def test_nothing_can_be_asked_of_no_bytes_but_all_of_them() -> None:
    assert part_of("", 0, etag=TAG) == part(200, 0, 0, 0)
    assert part_of("bytes=0-0", 0, etag=TAG) == part(416, 0, 0, 0)
    assert part_of("bytes=-5", 0, etag=TAG) == part(416, 0, 0, 0)


def test_the_header_of_the_answer_says_which_bytes_they_are() -> None:
    assert part(200, 0, 100).content_range == ""
    assert part(206, 10, 20).content_range == "bytes 10-19/100"
    assert part(416, 0, 0).content_range == "bytes */100"


@given(st.integers(0, 50), st.integers(0, 60), st.integers(0, 60))
def test_what_is_given_is_what_python_would_slice(
    length: int, first: int, last: int
) -> None:
    found = part_of(f"bytes={first}-{last}", length, etag=TAG)
    if found.status == 206:
        content = range(length)
        assert content[found.start : found.stop] == content[first : last + 1]
    else:
        assert found.status == (416 if first >= length and last >= first else 200)


def test_a_tag_names_one_life_of_one_tensor() -> None:
    tags = {
        etag_of(1, "ab", "w"),
        etag_of(2, "ab", "w"),
        etag_of(1, "ac", "w"),
        etag_of(1, "ab", "v"),
        etag_of(1, "ab", "x" * 100 + "y"),
        etag_of(1, "ab", "x" * 100 + "z"),
    }
    assert len(tags) == 6
    assert all(t[0] == t[-1] == '"' and t.isascii() and len(t) < 120 for t in tags)


def test_a_tag_is_known_again_alone_among_others_and_by_the_star() -> None:
    for header in (TAG, f'"x", {TAG}', f"W/{TAG}", "*"):
        assert unchanged(header, TAG)
    for header in ("", '"x"', TAG.strip('"')):
        assert not unchanged(header, TAG)
