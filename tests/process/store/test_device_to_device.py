"""Bytes from one node's device to another's: over UCX, or on the device that both have.

Nodes of other "hosts" share this machine's emulated device; only who is on one host may open
the other's slabs there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from tensorcast_dask.device.launch import launch
from tensorcast_dask.exceptions import DeviceError, Gone
from tensorcast_dask.tensors.ids import Generation
from tensorcast_dask.tensors.messages import (
    DeviceStart,
    NodeCard,
    TaskDone,
    Tier,
)
from tests.kit.eventually import eventually
from tests.kit.stores import MIB, CatalogStub, StoreClient, Stores, content, generation
from tests.kit.ucx_holders import NO_UCX

needs_ucx = pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX)

DEVICES = "emulated:2x64MiB"
NBYTES = 9 * MIB + 5
LEFT = "in place of UCX between devices"
#: Longer than a busy machine keeps anybody waiting.
PATIENT_S = 30.0


@dataclass(eq=False)
class Node:
    """A store with a device process beside it, and a client of it."""

    card: NodeCard
    client: StoreClient
    run_dir: Path
    ordinal: int
    pids: list[int] = field(default_factory=list)

    def start_device(self) -> None:
        told = DeviceStart(
            card=self.card,
            devices=DEVICES,
            run_dir=str(self.run_dir),
            ordinal=self.ordinal,
            memory=24 * MIB,
            ucx=bool(self.card.ucx),
        )
        self.pids.append(launch(told, 30.0).pid)

    def tiers(self, gen: Generation) -> list[str]:
        copies = self.client.state()["generations"].get(str(gen), [])
        return sorted(copy.partition(":")[0] for copy in copies)


class Scene:
    """Nodes, and the catalog that they have."""

    def __init__(self, run_dir: Path) -> None:
        self.stores = Stores(run_dir)
        self.catalog = CatalogStub()
        self.nodes: list[Node] = []

    def start(self, *, device: int = 0, **settings: Any) -> Node:
        how = {"stall_s": PATIENT_S, **settings}
        card = self.stores.start(link=self.catalog.target, **how)
        node = Node(card, StoreClient(card), self.stores.run_dir, device)
        self.nodes.append(node)
        self.catalog.link(card.node)
        node.start_device()
        return node

    def apart(self, **settings: Any) -> Node:
        host = self.stores.separate(len(self.nodes))
        return self.start(host=host, ucx="on", **settings)

    def give(self, node: Node, data: bytes, gen: Generation, *, also: bool) -> None:
        """Have a node hold bytes on its device, `also` in host memory."""
        node.client.put(data, gen)
        self.catalog.pull(node.card, gen, len(data), tier=Tier.DEVICE)
        if not also:
            self.catalog.drop(node.card.node, gen, tier=Tier.HOST)

    def start_pull(self, to: Node, gen: Generation, *sources: Node) -> int:
        cards = [node.card for node in sources]
        return self.catalog.start_pull(
            to.card, gen, NBYTES, *cards, tier=Tier.DEVICE, held_in=Tier.DEVICE
        )

    def done(self, to: Node, task: int) -> TaskDone:
        return self.catalog.done(to.card.node, task, within_s=60.0)

    def pull(self, to: Node, gen: Generation, *sources: Node) -> TaskDone:
        return self.done(to, self.start_pull(to, gen, *sources))

    def clear(self) -> None:
        """Drop everything; every node is at its baseline then."""
        for node in self.nodes:
            for gen in node.client.state()["generations"]:
                self.catalog.drop(node.card.node, Generation(int(gen)))
        for node in self.nodes:
            eventually(
                lambda: not node.client.idle()["tiers"]["device"]["held_bytes"],  # noqa: B023
                within_s=20.0,
                what="nothing is left on the device",
            )

    def close(self) -> None:
        for node in self.nodes:
            node.client.close()
        pids = [pid for node in self.nodes for pid in node.pids]
        for pid in pids:  # one that was stopped has to end, too
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.stores.close()
        eventually(
            lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()],
            within_s=20.0,
            what="the device processes have ended",
        )
        folders = list(self.stores.run_dir.glob("emulated-*"))
        eventually(
            lambda: not [path for f in folders for path in f.glob("[!l]*")],
            within_s=20.0,
            what="the helpers of the devices have ended",
        )
        self.catalog.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    run_dir = Path(mkdtemp(prefix="tc-", dir="/tmp"))
    made = Scene(run_dir)
    try:
        yield made
        made.clear()
    finally:
        made.close()
        shutil.rmtree(run_dir)


@needs_ucx
def test_bytes_cross_from_device_to_device_without_the_host_both_ways_at_once(
    scene: Scene,
) -> None:
    one, two = scene.apart(), scene.apart()
    gens, bits = [generation(), generation()], [content(NBYTES, n) for n in range(2)]
    for node, gen, data in zip((one, two), gens, bits, strict=True):
        scene.give(node, data, gen, also=False)
    host = [node.client.host() for node in (one, two)]
    there = scene.start_pull(two, gens[0], one)
    back = scene.start_pull(one, gens[1], two)
    for node, task in ((two, there), (one, back)):
        done = scene.done(node, task)
        assert (done.via, done.left) == ("ucx:cma:device", "")
        assert done.moved_bytes == NBYTES
    assert [node.client.host() for node in (one, two)] == host
    for node in (one, two):
        assert [node.tiers(gen) for gen in gens] == [["device"], ["device"]]
        assert [node.client.read(gen) for gen in gens] == bits


@needs_ucx
def test_a_holder_that_stands_still_in_a_chunk_costs_the_lane_and_no_byte(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = scene.apart(stall_s=3.0)
    monkeypatch.setenv("TENSORCAST_FAULTS", "ucx.sending[device]=stop@9")
    holder = scene.apart()
    monkeypatch.delenv("TENSORCAST_FAULTS")
    gen, data = generation(), content(NBYTES)
    scene.give(holder, data, gen, also=True)
    done = scene.pull(to, gen, holder)
    assert LEFT in done.left
    assert holder.card.node in done.left
    assert to.tiers(gen) == ["device"]
    assert to.client.read(gen) == data
    os.kill(holder.pids[0], signal.SIGKILL)


@needs_ucx
def test_a_holder_that_is_killed_in_a_chunk_is_left_for_another_one(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, other = scene.apart(), scene.apart()
    monkeypatch.setenv("TENSORCAST_FAULTS", "ucx.sending[device]=kill@3")
    dies = scene.apart()
    monkeypatch.delenv("TENSORCAST_FAULTS")
    gen, data = generation(), content(NBYTES)
    for holder in (dies, other):
        scene.give(holder, data, gen, also=False)
    done = scene.pull(to, gen, dies, other)
    assert other.card.node in done.sources
    assert to.client.read(gen) == data
    eventually(lambda: dies.tiers(gen) == [], within_s=20.0, what="its copy is lost")


@needs_ucx
def test_the_end_of_the_readers_device_process_lets_the_holder_go(
    scene: Scene,
) -> None:
    to, holder = scene.apart(), scene.apart()
    gen, data = generation(), content(NBYTES)
    scene.give(holder, data, gen, also=False)
    os.kill(holder.pids[0], signal.SIGSTOP)
    task = scene.start_pull(to, gen, holder)
    eventually(lambda: to.tiers(gen), within_s=20.0)
    os.kill(to.pids[0], signal.SIGKILL)
    with pytest.raises((DeviceError, Gone)):
        scene.done(to, task)
    os.kill(holder.pids[0], signal.SIGCONT)
    assert to.tiers(gen) == []
    assert holder.client.idle()["generations"] == {str(gen): ["device:committed"]}
    to.start_device()
    assert scene.pull(to, gen, holder).via == "ucx:cma:device"
    assert to.client.read(gen) == data


def test_nodes_with_one_device_copy_there_and_verify_before_they_hand_on(
    scene: Scene,
) -> None:
    one, two = scene.start(), scene.start()
    gen, data = generation(), content(NBYTES)
    scene.give(one, data, gen, also=False)
    host = [node.client.host() for node in (one, two)]
    done = scene.pull(two, gen, one)
    assert (done.via, done.moved_bytes, done.sources) == (
        "ipc",
        NBYTES,
        (one.card.node,),
    )
    assert [node.client.host() for node in (one, two)] == host
    assert two.tiers(gen) == ["device"]
    scene.catalog.drop(one.card.node, gen)
    assert two.client.read(gen) == data


@needs_ucx
def test_nodes_of_one_host_with_a_device_each_go_from_one_to_the_other(
    scene: Scene,
) -> None:
    one, two = (scene.start(device=n, ucx="on") for n in range(2))
    gen, data = generation(), content(NBYTES)
    scene.give(one, data, gen, also=True)
    done = scene.pull(two, gen, one)
    assert (done.via, done.left) == ("ucx:cma:device", "")
    assert two.tiers(gen) == ["device"]
    assert two.client.read(gen) == data
