"""A store with a device process beside it: real processes, an emulated device."""

from __future__ import annotations

import functools
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tensorcast_dask.dataplane.devices import SlabHandle, open_device
from tensorcast_dask.dataplane.devices.device import Device
from tensorcast_dask.device.launch import launch
from tensorcast_dask.exceptions import DeviceError, Gone, Mismatch, NotFound
from tensorcast_dask.tensors.devices import parse_devices
from tensorcast_dask.tensors.ids import Generation
from tensorcast_dask.tensors.messages import (
    Commit,
    DeviceStart,
    DeviceTold,
    Done,
    NodeCard,
    Open,
    Opened,
    ReplicaDropped,
    TaskProgress,
    Tier,
)
from tests.kit.eventually import eventually
from tests.kit.stores import (
    MIB,
    CatalogStub,
    StoreClient,
    Stores,
    content,
    generation,
    index_of,
)

DEVICES = "emulated:1x64MiB"


@dataclass
class Scene:
    """One store, its catalog, its device process, and a program that reads."""

    stores: Stores
    catalog: CatalogStub
    card: NodeCard
    told: DeviceTold
    program: StoreClient
    device: Device

    def start_device(self) -> DeviceTold:
        return start_device(self.card, self.stores)

    def move(self, gen: Generation, nbytes: int, tier: Tier) -> None:
        self.catalog.pull(self.card, gen, nbytes, tier=tier)

    def tiers(self, gen: Generation) -> list[str]:
        copies = self.program.state()["generations"].get(str(gen), [])
        return sorted(copy.partition(":")[0] for copy in copies)

    def open_slab(self, gen: Generation, *, share: bool) -> tuple[SlabHandle, int]:
        """A handle and its tag; (-1) where the bytes came another way."""
        request = Open(
            rid=self.program.rid(),
            generation=gen,
            deadline_s=10.0,
            device=self.told.device,
            share=share,
        )
        frame = self.program.call(request, Opened)
        handle, tag = frame.message.handle, frame.take_fd()
        return SlabHandle.decode(handle), tag

    def read_slab(self, gen: Generation, nbytes: int) -> bytes:
        handle, tag = self.open_slab(gen, share=False)
        slab = self.device.open(handle)
        found = bytearray(nbytes)
        self.device.copy(found, slab.range(0, nbytes)).wait(10.0)
        self.device.close(slab)
        os.close(tag)
        return bytes(found)

    def idle_device(self) -> dict[str, int]:
        """The tier's counts, once no slab lingers."""
        eventually(
            lambda: self.counts()["lingering_bytes"] == 0,
            within_s=20.0,
            what="no slab lingers",
        )
        return self.counts()

    def counts(self) -> dict[str, int]:
        """What the tier on the device holds now."""
        found: dict[str, int] = self.program.state()["tiers"]["device"]
        return found


def start_device(card: NodeCard, stores: Stores) -> DeviceTold:
    told = DeviceStart(
        card=card,
        devices=DEVICES,
        run_dir=str(stores.run_dir),
        ordinal=0,
        memory=16 * MIB,
    )
    return launch(told, 20.0)


@pytest.fixture(scope="module")
def made() -> Iterator[Scene]:
    run_dir = Path(mkdtemp(prefix="tc-", dir="/tmp"))
    stores = Stores(run_dir)
    stub = CatalogStub()
    card = stores.start(link=stub.target)
    told = start_device(card, stores)
    device = open_device("emulated:0", parse_devices(DEVICES), str(stores.run_dir))
    with StoreClient(card) as program:
        stub.link(card.node)
        scene = Scene(stores, stub, card, told, program, device)
        yield scene
    device.close()
    stores.close()
    pid = scene.told.pid
    eventually(lambda: _ended(pid), within_s=10.0, what="the device process ends")
    folder = stores.run_dir / "emulated-0"
    eventually(
        lambda: [path.name for path in folder.iterdir()] == ["lock"],
        within_s=10.0,
        what="the helper of the device ends",
    )
    (folder / "lock").unlink()
    stub.close()
    shutil.rmtree(run_dir)


@pytest.fixture
def scene(made: Scene) -> Iterator[Scene]:
    """The scene, which holds nothing before and after each test."""
    yield made
    for gen in made.program.state()["generations"]:
        made.catalog.drop(made.card.node, Generation(int(gen)))


def _ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_bytes_go_to_the_device_and_come_back_the_same(scene: Scene) -> None:
    small, large = content(1000, seed=1), content(3 * MIB + 5, seed=2)
    for data in (small, large):
        gen = scene.program.put(data)
        scene.move(gen, len(data), Tier.DEVICE)
        assert scene.read_slab(gen, len(data)) == data
        scene.catalog.drop(scene.card.node, gen, tier=Tier.HOST)
        assert scene.tiers(gen) == ["device"]
        assert scene.program.read(gen) == data
        assert scene.tiers(gen) == ["device", "host"]
        scene.catalog.drop(scene.card.node, gen)
        with pytest.raises((Gone, NotFound)):
            scene.program.read(gen)
    assert scene.idle_device()["used_bytes"] == 0


def test_what_does_not_fit_the_device_goes_to_host_memory(scene: Scene) -> None:
    nbytes = 6 * MIB
    gens = [scene.program.put(content(nbytes, seed=n)) for n in range(4)]
    for gen in gens:
        scene.move(gen, nbytes, Tier.DEVICE)
        scene.catalog.drop(scene.card.node, gen, tier=Tier.HOST)
    on_device = [gen for gen in gens if "device" in scene.tiers(gen)]
    assert len(on_device) == 2
    for n, gen in enumerate(gens):
        assert scene.program.read(gen) == content(nbytes, seed=n)


def test_pinned_memory_is_that_of_the_host_and_goes_when_room_is_needed(
    scene: Scene,
) -> None:
    nbytes = 20 * MIB
    data = content(nbytes)
    gen = scene.program.put(data)
    before = scene.program.host()["held_bytes"]
    scene.move(gen, nbytes, Tier.PINNED)
    assert scene.tiers(gen) == ["host", "pinned"]
    assert scene.program.host()["held_bytes"] == before
    small = scene.program.put(b"12")
    with pytest.raises(Mismatch):
        scene.move(small, 2, Tier.PINNED)
    scene.catalog.drop(scene.card.node, gen, tier=Tier.HOST)
    # The device process lets go of what it registered a moment after it has said so.
    eventually(lambda: scene.tiers(gen) == [], within_s=10.0, what="both are gone")
    told = scene.catalog.heard(scene.card.node, ReplicaDropped)
    assert {one.tier for one in told if one.generation == gen} == {"host", "pinned"}
    kept = scene.program.put(content(40 * MIB, seed=3))
    assert "host" in scene.tiers(kept)


def test_a_slab_is_not_given_away_while_a_program_has_it_open(scene: Scene) -> None:
    data = content(2 * MIB)
    gen = scene.program.put(data)
    scene.move(gen, len(data), Tier.DEVICE)
    handle, tag = scene.open_slab(gen, share=True)
    slab = scene.device.open(handle)
    scene.catalog.drop(scene.card.node, gen)
    assert scene.program.state()["tiers"]["device"]["lingering_bytes"] > 0
    found = bytearray(len(data))
    scene.device.copy(found, slab.range(0, len(data))).wait(10.0)
    assert found == data
    scene.device.close(slab)
    os.close(tag)
    assert scene.idle_device()["used_bytes"] == 0


def test_what_a_program_changed_in_a_shared_slab_is_not_served_on(scene: Scene) -> None:
    data = content(2 * MIB)
    gen = scene.program.put(data)
    scene.move(gen, len(data), Tier.DEVICE)
    handle, tag = scene.open_slab(gen, share=True)
    slab = scene.device.open(handle)
    scene.device.copy(slab.range(100, 3), b"bad").wait(10.0)
    with pytest.raises(Mismatch):
        scene.open_slab(gen, share=False)
    assert scene.tiers(gen) == ["host"]
    scene.device.close(slab)
    os.close(tag)
    assert scene.program.read(gen) == data


def test_a_program_fills_a_slab_and_it_is_an_artifact(scene: Scene) -> None:
    data, gen = content(3 * MIB), generation()
    reserved, tag = scene.program.reserve(gen, len(data), device=scene.told.device)
    slab = scene.device.open(SlabHandle.decode(reserved.handle))
    scene.device.copy(slab.range(0, len(data)), data).wait(10.0)
    scene.device.close(slab)
    os.close(tag)
    commit = Commit(rid=scene.program.rid(), generation=gen, index=index_of(len(data)))
    scene.program.call(commit, Done)
    assert scene.tiers(gen) == ["device"]
    assert scene.program.read(gen) == data


@pytest.mark.parametrize("killed", [False, True])
def test_a_pull_from_another_host_lands_on_the_device_and_nowhere_else(
    scene: Scene, *, killed: bool
) -> None:
    nbytes, gen = 9 * MIB + 5, generation()
    data = content(nbytes, seed=4)
    how = {"bandwidth_bytes_per_s": 4.0 * MIB, "connections": 2} if killed else {}
    sources = [
        scene.stores.start(
            link=scene.catalog.target, host=scene.stores.separate(n), **how
        )
        for n in range(1 + killed)
    ]
    for card in sources:
        with StoreClient(card) as client:
            client.put(data, gen)
    host = scene.program.host()
    task = scene.catalog.start_pull(scene.card, gen, nbytes, *sources, tier=Tier.DEVICE)
    if killed:
        eventually(lambda: scene.tiers(gen), within_s=20.0)
        os.kill(sources[0].pid, signal.SIGKILL)
    done = scene.catalog.done(scene.card.node, task, within_s=40.0)
    assert done.moved_bytes == nbytes
    assert sources[-1].node in done.sources
    assert scene.tiers(gen) == ["device"]
    assert scene.program.host() == host
    assert scene.read_slab(gen, nbytes) == data


def test_the_end_of_the_device_process_in_a_pull_is_typed_and_leaves_nothing(
    scene: Scene,
) -> None:
    nbytes, gen = 9 * MIB, generation()
    stores, link = scene.stores, scene.catalog.target
    slow = stores.start(
        link=link, host=stores.separate(1), bandwidth_bytes_per_s=1.0 * MIB
    )
    with StoreClient(slow) as client:
        client.put(content(nbytes), gen)
    task = scene.catalog.start_pull(scene.card, gen, nbytes, slow, tier=Tier.DEVICE)
    heard = functools.partial(scene.catalog.heard, scene.card.node, TaskProgress)
    eventually(lambda: [one for one in heard() if one.task == task], within_s=20.0)
    os.kill(scene.told.pid, signal.SIGKILL)
    with pytest.raises((DeviceError, Gone)):
        scene.catalog.done(scene.card.node, task, within_s=40.0)
    eventually(lambda: scene.tiers(gen) == [], within_s=20.0)
    scene.told = scene.start_device()
    again = scene.program.put(content(MIB))
    scene.move(again, MIB, Tier.DEVICE)
    assert scene.read_slab(again, MIB) == content(MIB)


def test_the_end_of_the_device_process_is_a_lost_replica_and_no_more(
    scene: Scene,
) -> None:
    kept, lost = content(2 * MIB, seed=1), content(2 * MIB, seed=2)
    first, second = scene.program.put(kept), scene.program.put(lost)
    for gen, data in ((first, kept), (second, lost)):
        scene.move(gen, len(data), Tier.DEVICE)
    scene.catalog.drop(scene.card.node, second, tier=Tier.HOST)
    os.kill(scene.told.pid, signal.SIGKILL)
    eventually(lambda: scene.tiers(second) == [], within_s=10.0, what="it is lost")
    assert scene.program.read(first) == kept
    with pytest.raises(Gone, match="device"):
        scene.program.read(second)
    with pytest.raises(DeviceError, match="lost"):
        scene.move(first, len(kept), Tier.DEVICE)
    assert scene.program.state()["tiers"]["device"]["used_bytes"] == 0
    scene.told = scene.start_device()
    scene.move(first, len(kept), Tier.DEVICE)
    assert scene.read_slab(first, len(kept)) == kept
