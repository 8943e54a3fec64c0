"""The `ucx` transport over each kind of lane that a machine without a device has."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import pytest

from tensorcast_dask.dataplane.channel import Prefer
from tensorcast_dask.dataplane.transports import ucx_library, ucx_line
from tensorcast_dask.dataplane.transports.base import Context, Source, open_source
from tensorcast_dask.dataplane.transports.idle import Idle
from tensorcast_dask.dataplane.transports.ucx import UcxSource, Way, open_ucx
from tensorcast_dask.exceptions import InvalidArgument, PeerLost
from tensorcast_dask.tensors.messages import Location
from tests.kit.contracts_transport import CHUNK_BYTES, TransportContract, pattern
from tests.kit.holders import GENERATION, Break, Served, serve
from tests.kit.leaks import Footprint
from tests.kit.ucx_holders import NO_UCX, UcxHolder

needs_ucx = pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX)


class UcxContract(TransportContract):
    scheme = "ucx"
    tls: ClassVar[str]
    lane: ClassVar[str]

    @pytest.fixture(autouse=True)
    def lanes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", self.tls)

    @pytest.fixture
    def served(self) -> Iterator[Served]:
        data = pattern(5 * CHUNK_BYTES + 17)
        with serve(data, chunk_bytes=CHUNK_BYTES, holder=UcxHolder) as served:
            yield served

    def test_a_line_at_rest_is_used_again_and_one_that_broke_is_not(
        self, served: Served
    ) -> None:
        idle: Idle[Way] = Idle()
        context = Context(
            credentials=served.credentials, prefer=Prefer.TCP, any_lane=True, idle=idle
        )

        def opened() -> UcxSource:
            return open_ucx(served.location, GENERATION, context)

        first = opened()
        assert self.read_all(first, served) == served.data
        first.close()
        with pytest.raises(PeerLost, match="closed here"):
            first.read_chunk(0, bytearray(CHUNK_BYTES))
        second = opened()
        assert second._way is first._way
        assert self.read_all(second, served) == served.data
        served.break_at(1, Break.DIE)
        with pytest.raises(PeerLost):
            self.read_all(second, served)
        second.close()
        assert len(idle) == 0
        idle.close()

    def open(
        self,
        served: Served,
        *,
        location: Location | None = None,
        token: bytes | None = None,
        within_s: float = 10.0,
        stall_s: float = 5.0,
    ) -> Source:
        changes: dict[str, object] = {"stall_s": 5.0}
        if token is not None:
            changes["token"] = token
        context = Context(
            credentials=served.credentials_with(**changes),
            prefer=Prefer.TCP,  # as between hosts
            any_lane=True,
        )
        source = open_source(
            location or served.location, GENERATION, scheme="ucx", context=context
        )
        # Counted from when the line is there: on a busy machine UCX takes its time.
        until_s = time.monotonic() + within_s
        assert isinstance(source, UcxSource)
        source._context = replace(context, until_s=until_s)
        source._way.channel.stream.stall_s = stall_s
        return source

    def test_a_holder_without_bytes_has_no_chunks(self) -> None:
        with (
            serve(b"", chunk_bytes=CHUNK_BYTES, holder=UcxHolder) as served,
            contextlib.closing(self.open(served)) as source,
        ):
            assert source.chunk_map().nbytes == 0
            assert self.read_all(source, served) == b""

    def test_the_lane_is_named(self, served: Served) -> None:
        with contextlib.closing(self.open(served)) as source:
            assert source.via == f"ucx:{self.lane}"


@needs_ucx
class TestOverTcp(UcxContract):
    tls = "tcp,self"
    lane = "tcp"

    def test_it_is_refused_where_nobody_insists(self, served: Served) -> None:
        context = Context(credentials=served.credentials)
        with pytest.raises(PeerLost, match="plain connections"):
            open_source(served.location, GENERATION, scheme="ucx", context=context)


@needs_ucx
class TestOverCma(UcxContract):
    tls = "tcp,cma,self"
    lane = "cma"


@needs_ucx
def test_a_line_that_is_closed_leaves_no_descriptor() -> None:
    ucx_line.offered()
    before = Footprint.now()
    line = ucx_line.Line()
    assert len(Footprint.now().descriptors) > len(before.descriptors)
    line.close()
    line.close()
    assert not Footprint.now().since(before, threads=True)


@needs_ucx
def test_a_line_that_ucx_does_not_end_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[object] = []
    line, other = ucx_line.Line(), ucx_line.Line()
    line.connect(other.address)
    with monkeypatch.context() as never:
        never.setattr(ucx_library.Ucx, "progress", lambda *_: True)
        never.setattr(ucx_line, "_CLOSE_S", 0.1)
        never.setattr(ucx_line, "_left", left)
        line.close()
    assert len(left) == 1
    with pytest.raises(PeerLost, match="closed"):
        line.send(ucx_line.Stretch(0, 1))
    left.clear()
    other.close()


@needs_ucx
def test_the_lanes_of_this_machine_are_named_the_best_first() -> None:
    lanes = ucx_line.offered()
    assert "tcp" in lanes
    assert lanes[-1] == "tcp"
    assert "self" not in lanes


@pytest.mark.skipif(not NO_UCX, reason="ucxx is installed")
def test_without_ucx_the_error_names_the_extra() -> None:
    with pytest.raises(InvalidArgument, match=r"tensorcast-dask\[ucx\]"):
        ucx_line.offered()


def test_memory_is_cut_into_pieces_that_keep_its_kind() -> None:
    cut = list(ucx_line.Stretch(1000, 25, "cuda").pieces(10))
    assert cut == [(1000, 10, "cuda"), (1010, 10, "cuda"), (1020, 5, "cuda")]
