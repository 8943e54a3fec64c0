"""The `ucx` transport over each kind of lane that a machine without a device has."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import pytest

from tensorcast_dask.dataplane.channel import Prefer
from tensorcast_dask.dataplane.transports import ucx_line
from tensorcast_dask.dataplane.transports.base import Context, Source, open_source
from tensorcast_dask.dataplane.transports.ucx import UcxSource
from tensorcast_dask.exceptions import InvalidArgument, PeerLost
from tensorcast_dask.tensors.messages import Location
from tests.kit.contracts_transport import CHUNK_BYTES, TransportContract, pattern
from tests.kit.holders import GENERATION, Served, serve
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

    def open(
        self,
        served: Served,
        *,
        location: Location | None = None,
        token: bytes | None = None,
        within_s: float = 10.0,
        stall_s: float = 5.0,
    ) -> Source:
        changes: dict[str, object] = {"stall_s": stall_s}
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
    assert Footprint.now() == before


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
