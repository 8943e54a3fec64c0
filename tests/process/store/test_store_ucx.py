"""Pulls over UCX between two real stores, and what is done where it cannot be had."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tensorcast_dask.store.launch import LOG_NAME
from tensorcast_dask.tensors.messages import NodeCard
from tests.kit.stores import MIB, CatalogStub, StoreClient, Stores, content
from tests.kit.ucx_holders import NO_UCX

needs_ucx = pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX)
NBYTES = 20 * MIB + 3


@pytest.fixture
def stub() -> Iterator[CatalogStub]:
    made = CatalogStub()
    yield made
    made.close()


def apart(stores: Stores, stub: CatalogStub, number: int, **more: Any) -> NodeCard:
    return stores.start(link=stub.target, host=stores.separate(number), **more)


def pulled(stub: CatalogStub, source: NodeCard, target: NodeCard) -> str:
    """Pull from one to the other; how it went."""
    with StoreClient(source) as one, StoreClient(target) as two:
        gen = one.put(content(NBYTES))
        via = stub.pull(target, gen, NBYTES, source).via
        assert two.read(gen) == content(NBYTES)
        one.idle(), two.idle()
    return str(via)


@needs_ucx
def test_stores_that_may_use_ucx_publish_lanes_and_pull_over_the_best(
    stores: Stores, stub: CatalogStub
) -> None:
    source, target = (apart(stores, stub, n, ucx="auto") for n in range(2))
    assert source.ucx == ("cma", "tcp")
    assert pulled(stub, source, target) == "ucx:cma"


@needs_ucx
@pytest.mark.parametrize(("mode", "via"), [("auto", "tcp"), ("on", "ucx:tcp")])
def test_ucx_over_tcp_is_used_only_when_it_is_on(
    stores: Stores,
    stub: CatalogStub,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    via: str,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    source, target = (apart(stores, stub, n, ucx=mode) for n in range(2))
    assert pulled(stub, source, target) == via


@needs_ucx
def test_a_holder_that_no_longer_has_ucx_is_read_over_tcp(
    stores: Stores, stub: CatalogStub
) -> None:
    source, target = apart(stores, stub, 0), apart(stores, stub, 1, ucx="on")
    assert source.ucx == ()
    link = stub.link(source.node)  # the catalog still believes in its lanes
    promised = msgspec.structs.replace(link.hello.card, ucx=("cma", "tcp"))
    link.hello = msgspec.structs.replace(link.hello, card=promised)
    assert pulled(stub, source, target) == "tcp"
    log = (stores.folder(target) / LOG_NAME).read_text()
    assert "UCX is not used" in log


def test_without_leave_nothing_is_published_and_tcp_is_used(
    stores: Stores, stub: CatalogStub
) -> None:
    source, target = apart(stores, stub, 0), apart(stores, stub, 1)
    assert source.ucx == ()
    assert pulled(stub, source, target) == "tcp"
