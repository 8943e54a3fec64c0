"""Pulls over UCX between two real stores, and what is done where it cannot be had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tensorcast_dask.exceptions import PeerLost
from tensorcast_dask.tensors.ids import NodeId
from tensorcast_dask.tensors.messages import NodeCard, Role, TaskDone
from tests.kit.certificates import mint_certificates
from tests.kit.eventually import eventually
from tests.kit.stores import (
    MIB,
    CatalogStub,
    StoreClient,
    Stores,
    content,
    generation,
)
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


def pull(stub: CatalogStub, source: NodeCard, target: NodeCard) -> TaskDone:
    """Pull from one to the other; how it went."""
    with StoreClient(source) as one, StoreClient(target) as two:
        gen = one.put(content(NBYTES))
        done = stub.pull(target, gen, NBYTES, source)
        assert two.read(gen) == content(NBYTES)
        one.idle(), two.idle()
    return done


def pulled(stub: CatalogStub, source: NodeCard, target: NodeCard) -> str:
    return pull(stub, source, target).via


def promise(stub: CatalogStub, node: NodeId) -> None:
    """Let the catalog believe in lanes that a node has not got."""
    link = stub.link(node)
    promised = msgspec.structs.replace(link.hello.card, ucx=("cma", "tcp"))
    link.hello = msgspec.structs.replace(link.hello, card=promised)


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
    promise(stub, source.node)
    done = pull(stub, source, target)
    assert (done.via, done.left.partition(" from ")[0]) == (
        "tcp",
        "tcp in place of UCX",
    )


def test_without_leave_nothing_is_published_and_tcp_is_used(
    stores: Stores, stub: CatalogStub
) -> None:
    source, target = apart(stores, stub, 0), apart(stores, stub, 1)
    assert source.ucx == ()
    assert pulled(stub, source, target) == "tcp"


@needs_ucx
def test_a_line_that_is_lost_in_a_pull_is_left_for_tcp_and_the_catalog_is_told(
    stores: Stores, stub: CatalogStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAST_FAULTS", "ucx.sending=raise:PeerLost@3")
    source = apart(stores, stub, 0, ucx="on")
    monkeypatch.delenv("TENSORCAST_FAULTS")
    target = apart(stores, stub, 1, ucx="on")
    done = pull(stub, source, target)
    assert "tcp" in done.via
    assert source.node in done.left
    again = pull(stub, source, target)
    assert (again.via, again.left) == ("ucx:cma", "")


@needs_ucx
def test_holders_killed_in_a_message_cost_the_lanes_and_leave_nothing(
    stores: Stores, stub: CatalogStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = []
    # The first one dies in the first pull, the second one in the second.
    for number, hit in enumerate((3, 2 * NBYTES // (64 << 10) - 9)):
        monkeypatch.setenv("TENSORCAST_FAULTS", f"ucx.sending=kill@{hit}")
        cards.append(apart(stores, stub, number, ucx="on"))
    monkeypatch.delenv("TENSORCAST_FAULTS")
    target = apart(stores, stub, 2, ucx="on")
    with StoreClient(target) as two:
        before = len(list(Path(f"/proc/{target.pid}/fd").iterdir()))
        first, second = generation(), generation()
        for card in cards:
            with StoreClient(card) as one:
                one.put(content(NBYTES, 1), first)
        with StoreClient(cards[1]) as one:
            one.put(content(NBYTES, 2), second)
        done = stub.pull(target, first, NBYTES, *cards)
        assert cards[1].node in done.sources
        assert two.read(first) == content(NBYTES, 1)
        with pytest.raises(PeerLost):
            stub.pull(target, second, NBYTES, cards[1])
        for card in cards:
            stores.await_end(card)
        stub.drop(target.node, first)
        assert two.idle()["tiers"]["host"]["used_bytes"] == 0
        eventually(
            lambda: len(list(Path(f"/proc/{target.pid}/fd").iterdir())) <= before + 1,
            within_s=10,
            what="the lines are gone; a warm segment may be kept",
        )


@needs_ucx
def test_a_worker_that_adopts_a_store_switches_ucx_on_and_off(
    stores: Stores, stub: CatalogStub
) -> None:
    card = stores.start(link=stub.target)
    assert card.ucx == ()

    wanted: tuple[str, ...] = ()

    def told() -> bool:
        return stub.link(card.node).hello.card.ucx == wanted

    with StoreClient(card, role=Role.WORKER) as worker:
        for mode in ("on", "off"):
            wanted = ("cma", "tcp") if mode == "on" else ()
            worker.adopt(stores.settings(ucx=mode), link=stub.target)
            eventually(told, within_s=30)


def test_beside_tls_ucx_is_not_used(stores: Stores) -> None:
    stub = CatalogStub(tls=mint_certificates())
    try:
        source, target = (apart(stores, stub, n, ucx="on") for n in range(2))
        assert source.ucx == ()
        promise(stub, source.node)
        done = pull(stub, source, target)
        assert (done.via, done.left) == ("tcp", "")
    finally:
        stub.close()
