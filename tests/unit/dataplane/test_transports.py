from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from tensorcast_dask.dataplane.maps import PrivateMap
from tensorcast_dask.dataplane.transports.base import (
    Context,
    Source,
    have_chunk,
    open_source,
    schemes,
)
from tensorcast_dask.exceptions import InvalidArgument, PeerLost
from tensorcast_dask.tensors.messages import ChunkMap, Location
from tests.kit.contracts_transport import CHUNK_BYTES, TransportContract, pattern
from tests.kit.fakes import open_fake
from tests.kit.holders import GENERATION, serve

if TYPE_CHECKING:
    from tests.kit.holders import Served


class TestTcp(TransportContract):
    scheme = "tcp"


class TestUnix(TransportContract):
    scheme = "unix"
    checks_token = False


class TestShm(TransportContract):
    scheme = "shm"
    checks_token = False
    outlives_holder = True


class TestFake(TransportContract):
    scheme = "fake"

    def open(
        self,
        served: Served,
        *,
        location: Location | None = None,
        token: bytes | None = None,
        within_s: float = 10.0,
        stall_s: float = 5.0,
    ) -> Source:
        token = served.credentials.token if token is None else token
        context = Context(credentials=served.credentials_with(token=token))
        return open_fake(served, location or served.location, GENERATION, context)


def test_an_unknown_scheme_names_the_known_ones() -> None:
    with serve(b"x") as served, pytest.raises(InvalidArgument, match="shm"):
        open_source(served.location, GENERATION, scheme="carrier-pigeon")
    assert {"shm", "tcp", "unix"} <= set(schemes())


def test_a_holder_on_another_host_is_not_mapped() -> None:
    with serve(b"x") as served, pytest.raises(PeerLost, match="another host"):
        open_source(
            served.other_card(host="elsewhere"),
            GENERATION,
            scheme="shm",
            context=Context(credentials=served.credentials),
        )


def test_who_shares_a_segment_takes_its_description() -> None:
    data = pattern(CHUNK_BYTES + 3)
    with serve(data, chunk_bytes=CHUNK_BYTES) as served:
        context = Context(credentials=served.credentials)
        source = open_source(served.location, GENERATION, scheme="shm", context=context)
        fd = source.take_fd()
        source.close()
        assert fd is not None
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"a reader never writes")
        assert bytes(PrivateMap(fd, len(data)).view) == data


def test_a_holder_that_does_not_map_sends_the_bytes() -> None:
    data = pattern(CHUNK_BYTES + 3)
    with serve(data, chunk_bytes=CHUNK_BYTES, mapped=False) as served:
        context = Context(credentials=served.credentials, until_s=time.monotonic() + 10)
        source = open_source(served.location, GENERATION, scheme="shm", context=context)
        assert source.take_fd() is None
        into = bytearray(CHUNK_BYTES)
        assert source.read_chunk(1, into).nbytes == 3
        assert into[:3] == data[-3:]
        assert source.via == "unix"
        source.close()


def test_a_map_offers_the_chunks_whose_bits_are_set() -> None:
    some = ChunkMap(
        generation=GENERATION, nbytes=10, chunk_bytes=1, index=b"", have=b"\x05\x01"
    )
    assert [c for c in range(10) if have_chunk(some, c)] == [0, 2, 8]
    assert not have_chunk(some, 99)
    assert have_chunk(
        ChunkMap(generation=GENERATION, nbytes=10, chunk_bytes=1, index=b""), 9
    )
