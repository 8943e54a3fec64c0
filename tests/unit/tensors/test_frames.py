from __future__ import annotations

import struct

import pytest

from tensorcast_dask.exceptions import WrongPeer
from tensorcast_dask.tensors.frames import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    FrameHeader,
    pack_header,
    parse_header,
)


def test_a_header_is_sixteen_bytes_that_never_change_their_meaning() -> None:
    assert pack_header(5, 7) == b"TCD1" + struct.pack("!IQ", 5, 7)
    assert len(pack_header(0)) == HEADER_BYTES == 16


@pytest.mark.parametrize(
    ("body", "payload"), [(0, 0), (1, 0), (MAX_BODY_BYTES, 1 << 40)]
)
def test_a_header_within_the_limits_gives_both_lengths(body: int, payload: int) -> None:
    header = pack_header(body, payload)
    for data in (header, bytearray(header), memoryview(header)):
        found = parse_header(data, max_payload_bytes=1 << 40)
        assert found == FrameHeader(body, payload)


@pytest.mark.parametrize(
    ("body", "payload"), [(MAX_BODY_BYTES + 1, 0), (0, 101), (1 << 31, 1 << 63)]
)
def test_lengths_beyond_the_limits_are_refused(body: int, payload: int) -> None:
    with pytest.raises(WrongPeer):
        parse_header(pack_header(body, payload), max_payload_bytes=100)


def test_no_payload_is_expected_unless_said() -> None:
    with pytest.raises(WrongPeer):
        parse_header(pack_header(1, 1))


@pytest.mark.parametrize(
    "header", [bytes(16), b"GET / HTTP/1.1\r\n", b"1DCT" + bytes(12)]
)
def test_a_stranger_is_known_by_its_first_bytes(header: bytes) -> None:
    with pytest.raises(WrongPeer, match="does not speak"):
        parse_header(header)
