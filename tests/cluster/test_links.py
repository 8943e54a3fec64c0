"""The port for nodes: who gets in, who does not, and what becomes of the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tensorcast_dask.dataplane.link import Link, LinkCallbacks
from tensorcast_dask.exceptions import CatalogUnavailable
from tensorcast_dask.scheduler_plugin.links import MAX_STRANGER_BYTES, Links
from tensorcast_dask.scheduler_plugin.state.events import (
    Event,
    NodeJoined,
)
from tensorcast_dask.tensors.frames import pack_header
from tensorcast_dask.tensors.ids import ClusterId, Epoch, HostId, Incarnation, NodeId
from tensorcast_dask.tensors.messages import (
    Inventory,
    LinkTarget,
    NodeCard,
    NodeHello,
    NodeWelcome,
)
from tests.kit.eventually import eventually_async
from tests.kit.loops import on_loop

CLUSTER = ClusterId("c" * 32)
TOKEN = b"t" * 32
WELCOME = NodeWelcome(cluster=CLUSTER, epoch=Epoch(1), lease_ttl_s=5.0)


@asynccontextmanager
async def a_port() -> AsyncIterator[tuple[Links, list[Event]]]:
    """A port that welcomes every node and records what it is told."""
    told: list[Event] = []

    def tell(event: Event) -> None:
        told.append(event)
        if isinstance(event, NodeJoined):
            links.send(event.link, WELCOME)

    links = Links(tell, cluster=CLUSTER, token=TOKEN)
    await links.listen("127.0.0.1", (0, 0), 0)
    try:
        yield links, told
    finally:
        await links.close()


def a_node(port: int, **target: Any) -> tuple[Link, list[str]]:
    """A node's side, and what it heard of the end of its links."""
    ends: list[str] = []
    card = NodeCard(
        node=NodeId("n" * 32), incarnation=Incarnation(1), host=HostId("h"), socket=""
    )
    callbacks = LinkCallbacks(
        hello=lambda: NodeHello(card=card, cluster=CLUSTER, epoch=Epoch(0)),
        on_up=lambda _: [Inventory(replicas=())],
        on_down=lambda error: ends.append(error.kind),
    )
    known: dict[str, Any] = {"cluster": CLUSTER, "token": TOKEN}
    known |= target
    link = Link(
        callbacks,
        target=LinkTarget(host="127.0.0.1", port=port, epoch=Epoch(1), **known),
        retry_s=0.1,
    )
    link.start()
    return link, ends


def kinds(told: list[Event]) -> list[str]:
    return [type(event).__name__ for event in told]


@on_loop
async def test_a_node_with_the_token_joins_speaks_and_is_missed() -> None:
    async with a_port() as (links, told):
        link, _ = a_node(links.port)
        await eventually_async(lambda: len(told) == 2, within_s=5)
        assert kinds(told) == ["NodeJoined", "NodeSaid"]
        assert [hello.card.node for _, hello in links.joined()] == ["n" * 32]
        await asyncio.to_thread(link.stop)
        await eventually_async(lambda: kinds(told)[-1] == "NodeLinkLost", within_s=5)
        assert len(links) == 0


@pytest.mark.parametrize(
    "wrong",
    [{"token": b"x" * 32}, {"cluster": ClusterId("d" * 32)}],
    ids=["token", "cluster"],
)
def test_a_node_of_another_cluster_stays_outside(wrong: dict[str, Any]) -> None:
    @on_loop
    async def run() -> None:
        async with a_port() as (links, told):
            link, ends = a_node(links.port, **wrong)
            await eventually_async(lambda: len(ends) >= 2, within_s=5)
            assert told == []
            assert set(ends) == {"WrongPeer"}
            await asyncio.to_thread(link.stop)

    run()


def noise(port_bytes: bytes) -> Callable[[asyncio.StreamWriter], None]:
    return lambda writer: writer.write(port_bytes)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        pack_header(MAX_STRANGER_BYTES + 1),
        pack_header(8, 1 << 40),
        pack_header(4) + b"\xff\xff\xff\xff",
        b"",
    ],
    ids=["http", "long-body", "payload", "no-message", "nothing"],
)
def test_a_stranger_is_hung_up_on_and_the_others_do_not_notice(said: bytes) -> None:
    @on_loop
    async def run() -> None:
        async with a_port() as (links, told):
            reader, writer = await asyncio.open_connection("127.0.0.1", links.port)
            writer.write(said)
            if not said:
                writer.write_eof()
            with contextlib.suppress(OSError):
                async with asyncio.timeout(5):
                    await reader.read()
            writer.close()
            link, _ = a_node(links.port)
            await eventually_async(lambda: len(told) == 2, within_s=5)
            await asyncio.to_thread(link.stop)

    run()


@on_loop
async def test_a_link_that_the_catalog_closes_is_not_told_as_lost() -> None:
    async with a_port() as (links, told):
        link, _ = a_node(links.port)
        await eventually_async(lambda: len(told) == 2, within_s=5)
        ((number, _),) = links.joined()
        links.close_link(number, "superseded")
        await eventually_async(lambda: kinds(told).count("NodeJoined") == 2, within_s=5)
        assert "NodeLinkLost" not in kinds(told)
        await asyncio.to_thread(link.stop)


@on_loop
async def test_the_port_of_the_last_life_is_tried_first_and_a_range_is_kept() -> None:
    async with a_port() as (first, _):
        taken = first.port
        second = Links(lambda _: None, cluster=CLUSTER, token=TOKEN)
        with pytest.raises(CatalogUnavailable, match=r"link\.ports"):
            await second.listen("127.0.0.1", (taken, taken), 0)
        assert await second.listen("127.0.0.1", (0, 0), taken) != taken
        await second.close()
    third = Links(lambda _: None, cluster=CLUSTER, token=TOKEN)
    assert await third.listen("127.0.0.1", (0, 0), taken) == taken
    await third.close()
