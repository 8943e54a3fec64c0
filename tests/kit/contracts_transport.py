"""What every transport promises, as one class: subclass it and name the scheme.

Rules:

1. Each test ends in the right bytes or in a typed error, within its deadline.
2. What differs between transports by nature is a class attribute with its reason.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import ClassVar

import pytest

from tensorcast_dask.dataplane.devices import Device
from tensorcast_dask.dataplane.fileranges import FileRange
from tensorcast_dask.dataplane.transports.base import (
    Arrived,
    Context,
    Source,
    Work,
    open_source,
)
from tensorcast_dask.exceptions import (
    DeadlineExceeded,
    Gone,
    Incomplete,
    OwnershipError,
    PeerLost,
    ReachError,
    WrongPeer,
)
from tensorcast_dask.tensors.messages import Location
from tests.kit.holders import GENERATION, Break, Holder, Served, serve

__all__ = ["TransportContract", "pattern"]

CHUNK_BYTES = 64 << 10
#: A holder that stalls ends by itself after 20 s.
_BEFORE_IT_GOES_ON_S = 15.0


def pattern(nbytes: int) -> bytes:
    """Bytes of which no two neighbouring chunks are equal."""
    block = b"".join(i.to_bytes(4, "little") for i in range(4099))
    return (block * (nbytes // len(block) + 1))[:nbytes]


def collect(into: list[Arrived], arrivals: Iterable[Arrived]) -> None:
    """Keep what arrives, also when the source then fails."""
    for arrived in arrivals:
        into.append(arrived)  # extend keeps nothing when it raises


class TransportContract:
    """Subclass with `scheme`; `open` may be replaced."""

    scheme: ClassVar[str]
    #: The kernel vouches for who is at the other end, so the token is not asked for.
    checks_token: ClassVar[bool] = True
    #: Once mapped, the memory outlives the holder: its death is no news.
    outlives_holder: ClassVar[bool] = False
    #: Who serves, and the device that is read on.
    holder: ClassVar[type[Holder]] = Holder
    device: ClassVar[Device | None] = None

    @pytest.fixture
    def served(self) -> Iterator[Served]:
        data = pattern(5 * CHUNK_BYTES + 17)
        with serve(data, chunk_bytes=CHUNK_BYTES, holder=self.holder) as served:
            yield served

    def open(
        self,
        served: Served,
        *,
        location: Location | None = None,
        token: bytes | None = None,
        within_s: float = 10.0,
        stall_s: float = 5.0,
    ) -> Source:
        """Connect to the holder; overridden by transports that are not registered."""
        changes: dict[str, object] = {"stall_s": stall_s}
        if token is not None:
            changes["token"] = token
        context = Context(
            credentials=served.credentials_with(**changes),
            until_s=time.monotonic() + within_s,
            device=self.device,
        )
        return open_source(
            location or served.location,
            GENERATION,
            scheme=self.scheme,
            context=context,
        )

    def read_all(self, source: Source, served: Served) -> bytes:
        """Read every chunk in order, straight to where it belongs."""
        target = memoryview(bytearray(len(served.data)))
        todo = iter(range(served.chunks))

        def work() -> Work | None:
            chunk = next(todo, None)
            if chunk is None:
                return None
            at = chunk * CHUNK_BYTES
            return Work(chunk, target[at : at + CHUNK_BYTES])

        arrived = [a.work.chunk for a in source.read_chunks(work)]
        assert arrived == list(range(served.chunks))
        return bytes(target)

    def test_the_chunk_map_says_what_there_is(self, served: Served) -> None:
        with contextlib.closing(self.open(served)) as source:
            found = source.chunk_map()
            assert found.nbytes == len(served.data)
            assert found.chunk_bytes == CHUNK_BYTES
            assert len(found.sums) == 8 * served.chunks

    def test_all_chunks_arrive_bit_for_bit(self, served: Served) -> None:
        with contextlib.closing(self.open(served)) as source:
            source.chunk_map()
            assert self.read_all(source, served) == served.data

    def test_chunks_arrive_in_a_file_too(self, served: Served) -> None:
        with (
            contextlib.closing(self.open(served)) as source,
            tempfile.TemporaryFile() as file,
        ):
            source.chunk_map()
            todo = iter(range(served.chunks))

            def work() -> Work | None:
                chunk = next(todo, None)
                if chunk is None:
                    return None
                at = chunk * CHUNK_BYTES
                return Work(chunk, FileRange(file.fileno(), 9 + at, CHUNK_BYTES))

            found = [(a.work.chunk, a.nbytes) for a in source.read_chunks(work)]
            assert [chunk for chunk, _ in found] == list(range(served.chunks))
            assert sum(nbytes for _, nbytes in found) == len(served.data)
            file.seek(0)
            assert file.read() == bytes(9) + served.data

    def test_a_chunk_that_is_too_long_for_its_place_is_refused(
        self, served: Served
    ) -> None:
        with (
            contextlib.closing(self.open(served)) as source,
            tempfile.TemporaryFile() as file,
            pytest.raises(WrongPeer),
        ):
            source.read_chunk(0, FileRange(file.fileno(), 0, CHUNK_BYTES - 1))

    def test_chunks_arrive_without_a_map_too(self, served: Served) -> None:
        with contextlib.closing(self.open(served)) as source:
            assert self.read_all(source, served) == served.data

    def test_single_chunks_arrive_in_any_order(self, served: Served) -> None:
        with contextlib.closing(self.open(served)) as source:
            for chunk in (5, 0, 3, 0):
                into = bytearray(CHUNK_BYTES)
                arrived = source.read_chunk(chunk, into)
                assert into[: arrived.nbytes] == served.chunk(chunk)
                assert arrived.nbytes == len(served.chunk(chunk))

    def test_ranges_arrive_one_after_the_other(self, served: Served) -> None:
        ranges = [(3, 10), (CHUNK_BYTES - 5, 100), (0, 1), (7, 0)]
        into = bytearray(200)
        with contextlib.closing(self.open(served)) as source:
            assert source.read_ranges(ranges, into) == 111
        wanted = b"".join(served.data[at : at + n] for at, n in ranges)
        assert into[:111] == wanted

    def test_work_is_asked_for_as_late_as_the_pipeline_allows(
        self, served: Served
    ) -> None:
        taken: list[int] = []
        todo = iter(range(served.chunks))

        def work() -> Work | None:
            chunk = next(todo, None)
            if chunk is None:
                return None
            taken.append(chunk)
            return Work(chunk, bytearray(CHUNK_BYTES))

        with contextlib.closing(self.open(served)) as source:
            for number, _ in enumerate(source.read_chunks(work)):
                assert len(taken) <= number + 3

    def test_two_sources_share_one_queue_and_lose_nothing(self, served: Served) -> None:
        target = memoryview(bytearray(len(served.data)))
        todo = iter(range(served.chunks))

        def work() -> Work | None:
            chunk = next(todo, None)
            if chunk is None:
                return None
            at = chunk * CHUNK_BYTES
            return Work(chunk, target[at : at + CHUNK_BYTES])

        with (
            contextlib.closing(self.open(served)) as one,
            contextlib.closing(self.open(served)) as two,
        ):
            readers = [one.read_chunks(work), two.read_chunks(work)]
            while readers:
                readers = [r for r in readers if next(r, None) is not None]
        assert target == served.data

    def test_a_wrong_token_gets_nothing(self, served: Served) -> None:
        if not self.checks_token:
            pytest.skip("the kernel's word on the uid stands in for the token")
        with pytest.raises(WrongPeer):
            self.open(served, token=b"x" * 32)

    def test_a_wrong_incarnation_gets_nothing(self, served: Served) -> None:
        stale = served.other_card(incarnation=2)
        with pytest.raises(OwnershipError):
            self.open(served, location=stale)

    def test_another_node_at_the_address_is_found_out(self, served: Served) -> None:
        moved = served.other_card(node="f" * 32)
        with pytest.raises(WrongPeer):
            self.open(served, location=moved)

    def test_a_source_that_dies_in_a_chunk_is_peer_lost(self, served: Served) -> None:
        served.break_at(2, Break.DIE)
        with contextlib.closing(self.open(served)) as source:
            if self.outlives_holder:
                assert self.read_all(source, served) == served.data
                return
            with pytest.raises(PeerLost):
                self.read_all(source, served)

    def test_chunks_before_the_death_were_handed_over(self, served: Served) -> None:
        served.break_at(2, Break.DIE)
        if self.outlives_holder:
            pytest.skip("its death is no news")
        todo = iter(range(served.chunks))
        handed: list[Arrived] = []

        def work() -> Work | None:
            chunk = next(todo, None)
            return None if chunk is None else Work(chunk, bytearray(CHUNK_BYTES))

        with contextlib.closing(self.open(served)) as source:
            with pytest.raises(PeerLost):
                collect(handed, source.read_chunks(work))
            assert [a.work.chunk for a in handed] == [0, 1]
            for arrived in handed:
                chunk = served.chunk(arrived.work.chunk)
                assert arrived.work.into[: arrived.nbytes] == chunk

    def test_a_source_that_stalls_ends_within_the_deadline(
        self, served: Served
    ) -> None:
        served.break_at(2, Break.STALL)
        began_s = time.monotonic()
        with (
            contextlib.closing(self.open(served, within_s=0.5)) as source,
            pytest.raises(DeadlineExceeded),
        ):
            self.read_all(source, served)
        assert time.monotonic() - began_s < _BEFORE_IT_GOES_ON_S

    def test_a_source_that_is_silent_too_long_is_left(self, served: Served) -> None:
        served.break_at(2, Break.STALL)
        with contextlib.closing(self.open(served, stall_s=0.3)) as source:
            began_s = time.monotonic()
            with pytest.raises(ReachError):
                self.read_all(source, served)
        assert time.monotonic() - began_s < _BEFORE_IT_GOES_ON_S

    def test_a_damaged_chunk_is_never_handed_over(self, served: Served) -> None:
        served.break_at(2, Break.CORRUPT)
        with contextlib.closing(self.open(served)) as source:
            source.chunk_map()
            with pytest.raises(PeerLost) as caught:
                self.read_all(source, served)
            assert caught.value.data["damaged"] is True

    def test_another_chunk_than_asked_is_refused(self, served: Served) -> None:
        if self.outlives_holder:
            pytest.skip("chunks are cut here")
        served.break_at(2, Break.OTHER)
        with (
            contextlib.closing(self.open(served)) as source,
            pytest.raises(WrongPeer),
        ):
            self.read_all(source, served)

    def test_damaged_or_missing_ranges_are_never_handed_over(
        self, served: Served
    ) -> None:
        if self.outlives_holder:
            pytest.skip("ranges are cut here")
        ranges = [(0, 5), (7, 5)]
        served.break_at(0, Break.CORRUPT)
        with contextlib.closing(self.open(served)) as source:
            with pytest.raises(PeerLost) as caught:
                source.read_ranges(ranges, bytearray(10))
            assert caught.value.data["damaged"] is True
        served.break_at(0, Break.DIE)
        with (
            contextlib.closing(self.open(served)) as source,
            pytest.raises(WrongPeer),
        ):
            source.read_ranges(ranges, bytearray(10))

    def test_bytes_of_before_and_after_a_mutation_are_never_mixed(
        self, served: Served
    ) -> None:
        if self.outlives_holder:
            pytest.skip("what is mapped is frozen")
        for ask_first in (True, False):
            with contextlib.closing(self.open(served)) as source:
                if ask_first:
                    source.chunk_map()
                source.read_chunk(0, bytearray(CHUNK_BYTES))
                served.stamp += 2
                with pytest.raises(Incomplete, match="changed"):
                    source.read_chunk(1, bytearray(CHUNK_BYTES))

    def test_a_refusal_arrives_as_the_holders_error(self, served: Served) -> None:
        served.break_at(0, Break.REFUSE)
        with (
            contextlib.closing(self.open(served)) as source,
            pytest.raises(Gone),
        ):
            self.read_all(source, served)

    def test_a_closed_source_says_so(self, served: Served) -> None:
        source = self.open(served)
        source.close()
        source.close()
        with pytest.raises(PeerLost):
            source.chunk_map()

    def test_a_holder_without_bytes_has_no_chunks(self) -> None:
        with (
            serve(b"", chunk_bytes=CHUNK_BYTES, holder=self.holder) as served,
            contextlib.closing(self.open(served)) as source,
        ):
            assert source.chunk_map().nbytes == 0
            assert self.read_all(source, served) == b""
