"""A store and its catalog: greeting, announcements, orders, leases, leave to drop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tensorcast_dask.dataplane import faults
from tensorcast_dask.exceptions import (
    CapacityError,
    Gone,
    Incomplete,
    NotFound,
    StaleOwner,
)
from tensorcast_dask.tensors.ids import ArtifactId, Generation, Version
from tensorcast_dask.tensors.messages import (
    DoDrop,
    DoEnd,
    DoLoad,
    DoMark,
    DoPull,
    DoSave,
    DropGranted,
    Inventory,
    Location,
    MayDrop,
    NodeCard,
    Renew,
    ReplicaDropped,
    ReplicaReady,
    TaskDone,
    Tier,
)
from tests.kit.eventually import eventually, never
from tests.kit.stores import (
    CLUSTER,
    MIB,
    CatalogStub,
    StoreClient,
    Stores,
    content,
    generation,
    writable,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture
def stub() -> Iterator[CatalogStub]:
    """A catalog without opinions."""
    made = CatalogStub(lease_ttl_s=2.0)
    yield made
    made.close()


# ------------------------------------------------------------------ greeting
def test_a_store_greets_renews_and_announces(stores: Stores, stub: CatalogStub) -> None:
    card = stores.start(link=stub.target)
    hello = stub.link(card.node).hello
    assert (hello.card.node, hello.cluster, hello.counter) == (card.node, CLUSTER, 0)
    assert hello.card.data_port > 0
    with StoreClient(card) as client:
        gen = client.put(content(MIB))
        first = eventually(lambda: stub.heard(card.node, ReplicaReady), within_s=15.0)
        assert (first[0].record.generation, first[0].record.nbytes) == (gen, MIB)
        named = eventually(
            lambda: [
                ready
                for ready in stub.heard(card.node, ReplicaReady)
                if ready.record.content_digest
            ],
            within_s=15.0,
        )
        assert named[0].record.generation == gen
    eventually(lambda: len(stub.heard(card.node, Renew)) > 2, within_s=10.0)


def test_a_store_says_all_it_holds_to_a_catalog_that_comes_back(
    stores: Stores, stub: CatalogStub
) -> None:
    stub.need_index = True
    card = stores.start(link=stub.target)
    with StoreClient(card) as client:
        stub.link(card.node)
        gens = [client.put(content(nbytes)) for nbytes in (10, MIB)]
        port = stub.port
        stub.close()
        late = client.put(content(20))
        again = CatalogStub(port=port, epoch=2)
        again.need_index = True
        try:
            again.link(card.node)
            (said,) = again.heard(card.node, Inventory)
            found = {record.generation: record for record in said.replicas}
            assert set(found) == {*gens, late}
            assert all(record.index for record in said.replicas)
            assert again.link(card.node).hello.counter == late
            assert client.state()["epoch"] == 2
        finally:
            again.close()


def test_a_store_finds_a_scheduler_that_came_back_elsewhere(
    stores: Stores, stub: CatalogStub
) -> None:
    card = stores.start(link=stub.target)
    stub.link(card.node)
    elsewhere = CatalogStub(epoch=2)
    try:
        stub.close()
        path = stores.folder(card).parent / "link.json"
        said = {"host": "127.0.0.1", "port": elsewhere.port, "cluster": CLUSTER}
        path.write_text(json.dumps(said))
        elsewhere.link(card.node)
        path.unlink()
    finally:
        elsewhere.close()


# ------------------------------------------------------------------ leases
def test_a_store_without_lease_takes_no_new_bytes_and_goes_on_reading(
    stores: Stores,
) -> None:
    stub = CatalogStub(lease_ttl_s=0.5)
    try:
        card = stores.start(link=stub.target)
        stub.link(card.node)
        with StoreClient(card) as client:
            gen = client.put(content(MIB))
            open_gen = generation()
            _, fd = client.reserve(open_gen, MIB, deadline_s=60.0)
            client.fill(fd, content(MIB))
            stub.renewing = False
            eventually(lambda: client.state()["lease_left_s"] <= 0.0, within_s=15.0)
            with pytest.raises(StaleOwner):
                client.commit(open_gen, MIB)
            with pytest.raises(StaleOwner):
                client.put(content(10))
            assert client.read(gen) == content(MIB)
            stub.renewing = True
            eventually(lambda: client.state()["lease_left_s"] > 0.0, within_s=15.0)
            client.commit(open_gen, MIB)
            assert client.read(open_gen) == content(MIB)
    finally:
        stub.close()


def test_a_stopped_store_is_fenced_when_it_wakes(stores: Stores) -> None:
    stub = CatalogStub(lease_ttl_s=2.0)
    try:
        card = stores.start(link=stub.target)
        stub.link(card.node)
        with StoreClient(card) as client:
            gen = generation()
            _, fd = client.reserve(gen, MIB, deadline_s=60.0)
            client.fill(fd, content(MIB))
            stub.renewing = False
            os.kill(card.pid, signal.SIGSTOP)
            never(lambda: False, for_s=2.2)
            os.kill(card.pid, signal.SIGCONT)
            with pytest.raises(StaleOwner):
                client.commit(gen, MIB)
    finally:
        stub.close()


def test_no_lease_is_lost_while_bytes_move(stores: Stores) -> None:
    stub = CatalogStub(lease_ttl_s=0.5)
    try:
        source = stores.start(
            link=stub.target, host=stores.separate(1), host_memory_bytes=512 * MIB
        )
        target = stores.start(
            link=stub.target, host=stores.separate(2), host_memory_bytes=512 * MIB
        )
        nbytes = 128 * MIB
        with StoreClient(source) as client, StoreClient(target) as other:
            gen = client.put(bytes(nbytes))
            stub.pull(target, gen, nbytes, source)
            assert other.state()["lease_left_s"] > 0.0
            assert len(stub.heard(target.node, Inventory)) == 1
    finally:
        stub.close()


# ------------------------------------------------------------------ drops
def test_a_mapped_result_keeps_its_values_when_the_artifact_is_destroyed(
    stores: Stores, stub: CatalogStub
) -> None:
    card = stores.start(link=stub.target)
    data = content(4 * MIB)
    with StoreClient(card) as client:
        gen = client.put(data)
        held = client.open(gen)
        stub.drop(card.node, gen, final=True)
        with pytest.raises(Gone):
            client.open(gen)
        assert client.host()["lingering_bytes"] == 4 * MIB
        for seed in range(4):  # noise, in segments of the same length
            client.put(content(4 * MIB, seed + 50))
        assert bytes(held.data) == data
        del held
        eventually(lambda: client.host()["lingering_bytes"] == 0, within_s=15.0)
        assert client.host()["warm_bytes"] >= 4 * MIB


def test_a_freed_segment_is_used_again_only_when_nobody_has_it(
    stores: Stores, stub: CatalogStub
) -> None:
    card = stores.start(link=stub.target)
    with StoreClient(card) as client:
        gen = client.put(content(4 * MIB))
        held = client.open(gen)
        stub.drop(card.node, gen)
        reserved, fd = client.reserve(generation(), 4 * MIB)
        assert not reserved.warm
        os.close(fd)
        del held
        eventually(lambda: client.host()["warm_bytes"] == 4 * MIB, within_s=15.0)
        reserved, fd = client.reserve(generation(), 4 * MIB)
        assert reserved.warm
        os.close(fd)


def test_without_leases_segments_are_sealed_and_never_used_again(
    stores: Stores,
    stub: CatalogStub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A real store on a kernel that grants no leases, as far as the store can know."""
    pretend = "from tensorcast_dask.dataplane import segments; segments._leases = False"
    (tmp_path / "sitecustomize.py").write_text(pretend)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    card = stores.start(link=stub.target)
    with StoreClient(card) as client:
        gen = generation()
        _, fd = client.reserve(gen, 4 * MIB)
        os.pwrite(fd, content(4 * MIB), 0)
        mapped = writable(os.dup(fd), 4 * MIB)
        with pytest.raises(Incomplete):
            client.commit(gen, 4 * MIB)
        mapped.reserve()
        client.commit(gen, 4 * MIB)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"late", 0)
        os.close(fd)
        held = client.open(gen)
        small = client.put(content(100))
        assert client.read(small) == content(100)
        stub.drop(card.node, gen)
        again = client.put(content(4 * MIB, 2))
        assert client.read(again) == content(4 * MIB, 2)
        assert bytes(held.data) == content(4 * MIB)
        stub.drop(card.node, again)
        del held
        eventually(lambda: client.host()["used_bytes"] < MIB, within_s=15.0)
        eventually(lambda: not client.host()["lingering_bytes"], within_s=15.0)
        reserved, fd = client.reserve(generation(), 4 * MIB)
        os.close(fd)
        assert not reserved.warm
        assert client.host()["warm_bytes"] < MIB  # what is left of the slab


def test_a_destroyed_generation_never_comes_back_and_a_dropped_one_may(
    stores: Stores, stub: CatalogStub
) -> None:
    card = stores.start(link=stub.target)
    with StoreClient(card) as client:
        destroyed, evicted = (client.put(content(100)) for _ in range(2))
        stub.drop(card.node, destroyed, final=True)
        stub.drop(card.node, evicted)
        for gen in (destroyed, evicted):
            with pytest.raises(Gone):
                client.read(gen)
        with pytest.raises(Gone):
            client.put(content(100), destroyed)
        client.put(content(100), evicted)
        assert client.read(evicted) == content(100)
        stub.drop(card.node, generation(), final=True)  # unknown: fine


def test_destroy_works_while_the_artifact_is_being_put(
    stores: Stores, stub: CatalogStub
) -> None:
    card = stores.start(link=stub.target)
    with StoreClient(card) as client:
        gen = generation()
        _, fd = client.reserve(gen, 4 * MIB)
        stub.drop(card.node, gen, final=True)
        assert client.host()["reserved_bytes"] == 0
        client.fill(fd, content(4 * MIB))
        with pytest.raises((Gone, NotFound)):
            client.commit(gen, 4 * MIB)


def test_a_drop_that_is_late_is_void_once_the_catalog_has_greeted_anew(
    stores: Stores,
    stub: CatalogStub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, log = tmp_path / "faults", tmp_path / "log"
    faults.write_spec(spec, "destroy.before_drop=pause")
    monkeypatch.setenv("TENSORCAST_FAULTS_FILE", str(spec))
    monkeypatch.setenv("TENSORCAST_FAULTS_LOG", str(log))
    card = stores.start(link=stub.target)
    with StoreClient(card) as client:
        gen = client.put(content(MIB))
        task = stub.order(card.node, lambda t: DoDrop(task=t, generation=gen))
        eventually(lambda: log.exists() and faults.read_log(log), within_s=10.0)
        former = stub.link(card.node)
        former.stream.close()
        eventually(lambda: stub.link(card.node) is not former, within_s=10.0)
        said = [m for m in stub.link(card.node).said if isinstance(m, Inventory)]
        assert [one.generation for m in said for one in m.replicas] == [gen]
        spec.unlink()
        never(lambda: stub.heard(card.node, ReplicaDropped), for_s=0.5)
        assert client.read(gen) == content(MIB)
        # The catalog says it again, and twice: it is done once, and its end said twice.
        order = DoDrop(task=task, generation=gen)
        stub.link(card.node).stream.send(order)
        eventually(lambda: stub.heard(card.node, ReplicaDropped), within_s=10.0)
        stub.link(card.node).stream.send(order)
        eventually(lambda: len(stub.heard(card.node, TaskDone)) == 2, within_s=10.0)
        with pytest.raises(Gone):
            client.read(gen)


def test_the_catalog_hears_no_more_of_what_it_has_struck(
    stores: Stores, stub: CatalogStub
) -> None:
    """Also when it goes while its sums are being computed."""
    card = stores.start(link=stub.target, host_memory_bytes=256 * MIB)
    with StoreClient(card) as client:
        gen = client.put(content(192 * MIB))
        stub.drop(card.node, gen, final=True)
        heard = len(stub.heard(card.node, ReplicaReady))
        eventually(lambda: client.host()["used_bytes"] == 0, within_s=10.0)
        renewals = len(stub.heard(card.node, Renew))
        eventually(lambda: len(stub.heard(card.node, Renew)) > renewals, within_s=10.0)
        assert len(stub.heard(card.node, ReplicaReady)) == heard


def test_a_store_evicts_spare_replicas_with_leave_and_nothing_else(
    stores: Stores, stub: CatalogStub
) -> None:
    card = stores.start(link=stub.target)
    node = card.node
    stub.link(node)

    def answer(grant: int) -> None:
        """Grant the first `grant` that are asked for."""
        asked = eventually(lambda: stub.heard(node, MayDrop), within_s=15.0)[-1]
        granted = asked.generations[:grant]
        stub.link(node).stream.send(DropGranted(rid=asked.rid, generations=granted))

    with StoreClient(card) as client:
        gens = [client.put(content(16 * MIB, n)) for n in range(4)]
        with pytest.raises(CapacityError):
            client.put(content(16 * MIB))
        for gen in gens[:3]:
            stub.link(node).stream.send(DoMark(generation=gen, spare=True))
        stub.link(node).stream.send(
            DoMark(generation=gens[0], spare=True, pinned_s=float("inf"))
        )
        eventually(lambda: client.host()["evictable_bytes"] == 32 * MIB, within_s=15.0)
        assert client.host()["pinned_bytes"] == 16 * MIB
        reader = client.open(gens[1])
        # What is mapped would not come free, so gens[2] is the one to ask for.
        import threading

        answering = threading.Thread(target=answer, args=(1,))
        answering.start()
        late = client.put(content(16 * MIB, 9))
        answering.join()
        assert stub.heard(node, MayDrop)[-1].generations == (gens[2],)
        assert client.read(late) == content(16 * MIB, 9)
        for n in (0, 1, 3):
            assert client.read(gens[n]) == content(16 * MIB, n)
        with pytest.raises(Gone):
            client.read(gens[2])
        del reader
        assert {m.generation for m in stub.heard(node, ReplicaDropped)} == {gens[2]}


# ------------------------------------------------------------------ pulls
def pair(stores: Stores, stub: CatalogStub, **more: Any) -> list[NodeCard]:
    """Start two stores that are on different hosts."""
    return [
        stores.start(link=stub.target, host=stores.separate(n), **more)
        for n in range(2)
    ]


@pytest.mark.parametrize("nbytes", [0, 5, 4096, 64 << 10, MIB + 3, 9 * MIB])
def test_a_replica_is_pulled_bit_for_bit_over_tcp(
    stores: Stores, stub: CatalogStub, nbytes: int
) -> None:
    source, target = pair(stores, stub)
    with StoreClient(source) as one, StoreClient(target) as two:
        gen = one.put(content(nbytes))
        done = stub.pull(target, gen, nbytes, source)
        assert (done.via, done.moved_bytes) == ("tcp", nbytes)
        assert two.read(gen) == content(nbytes)
        assert done.sources == ((source.node,) if nbytes else ())
        again = stub.pull(target, gen, nbytes, source)
        assert again.via == "here"
        state = two.idle()
        assert state["busy"] == dict.fromkeys(state["busy"], 0)


def test_a_pull_from_a_node_without_a_port_says_that_it_came_by_the_socket(
    stores: Stores, stub: CatalogStub
) -> None:
    source, target = pair(stores, stub)
    unlistened = msgspec.structs.replace(source, data_port=0)
    with StoreClient(source) as one, StoreClient(target) as two:
        gen = one.put(content(MIB))
        task = stub.order(
            target.node,
            lambda task: DoPull(
                task=task,
                generation=gen,
                id=ArtifactId("a"),
                version=Version(1),
                nbytes=MIB,
                tier=Tier.HOST,
                sources=(Location(card=unlistened, tier=Tier.HOST),),
                deadline_s=20.0,
            ),
        )
        done = stub.done(target.node, task, within_s=40.0)
        assert (done.via, done.moved_bytes) == ("unix", MIB)
        assert two.read(gen) == content(MIB)


def test_a_pull_into_a_used_segment_is_bit_for_bit_too(
    stores: Stores, stub: CatalogStub
) -> None:
    source, target = pair(stores, stub)
    with StoreClient(source) as one, StoreClient(target) as two:
        old = two.put(content(4 * MIB, 7))
        two.read(old)
        stub.drop(target.node, old)
        gen = one.put(content(4 * MIB, 8))
        eventually(lambda: two.host()["warm_bytes"] == 4 * MIB, within_s=15.0)
        stub.pull(target, gen, 4 * MIB, source)
        assert two.read(gen) == content(4 * MIB, 8)
        assert two.host()["warm_bytes"] == 0


def test_a_node_of_the_same_host_is_shared_and_not_copied(
    stores: Stores, stub: CatalogStub
) -> None:
    source, target = (stores.start(link=stub.target) for _ in range(2))
    with StoreClient(source) as one, StoreClient(target) as two:
        gen = one.put(content(8 * MIB))
        done = stub.pull(target, gen, 8 * MIB, source)
        assert (done.via, done.moved_bytes) == ("shm", 0)
        # Once the sums are known it says so again, and not once more whose the memory is.
        ready = stub.heard(target.node, ReplicaReady)[0]
        assert ready.shared_with == source.node
        counts = two.host()
        assert (counts["used_bytes"], counts["shared_bytes"]) == (0, 8 * MIB)
        mine, theirs = two.open(gen), one.open(gen)
        assert bytes(mine.data) == content(8 * MIB) == bytes(theirs.data)
        del mine, theirs
        # The memory outlives the node it came from.
        stub.drop(source.node, gen)
        stores.kill(source)
        assert two.read(gen) == content(8 * MIB)
        stub.drop(target.node, gen)
        assert two.host()["shared_bytes"] == 0


def test_small_replicas_are_copied_between_nodes_of_one_host(
    stores: Stores, stub: CatalogStub
) -> None:
    source, target = (stores.start(link=stub.target) for _ in range(2))
    with StoreClient(source) as one, StoreClient(target) as two:
        gen = one.put(content(1000))
        stub.pull(target, gen, 1000, source)
        assert two.read(gen) == content(1000)
        assert two.host()["shared_bytes"] == 0


def test_a_pull_of_what_nobody_has_ends_typed_and_leaves_nothing(
    stores: Stores, stub: CatalogStub
) -> None:
    source, target = pair(stores, stub)
    with StoreClient(target) as two:
        stub.link(target.node)
        baseline = two.idle()
        with pytest.raises(NotFound):
            stub.pull(target, generation(), MIB, source)
        after = two.idle()
        for key in ("busy", "generations", "segments", "resident_bytes"):
            assert after[key] == baseline[key]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("holders", [1, 2])
def test_a_source_that_dies_or_stops_mid_pull_is_left_for_another_or_ends_typed(
    stores: Stores, stub: CatalogStub, how: signal.Signals, holders: int
) -> None:
    from tensorcast_dask.exceptions import ReachError

    slow = {"bandwidth_bytes_per_s": 4.0 * MIB, "connections": 2}
    cards = [
        stores.start(link=stub.target, host=stores.separate(n), **slow)
        for n in range(holders + 1)
    ]
    target, sources = cards[0], cards[1:]
    nbytes = 12 * MIB
    gen = generation()
    data = content(nbytes)
    for card in sources:
        with StoreClient(card) as client:
            client.put(data, gen)
    with StoreClient(target) as two:
        baseline = two.idle()
        task = stub.order(
            target.node,
            lambda task: DoPull(
                task=task,
                generation=gen,
                id=ArtifactId("a"),
                version=Version(1),
                nbytes=nbytes,
                tier=Tier.HOST,
                sources=tuple(Location(card=card, tier=Tier.HOST) for card in sources),
                deadline_s=8.0 if holders == 1 else 60.0,
            ),
        )
        eventually(lambda: two.host()["reserved_bytes"], within_s=10.0)
        os.kill(sources[0].pid, how)
        if holders == 2:
            done = stub.done(target.node, task, within_s=60.0)
            assert sources[1].node in done.sources
            assert two.read(gen) == data
        else:
            with pytest.raises(ReachError):
                stub.done(target.node, task)
            eventually(
                lambda: (
                    two.state()["busy"] == baseline["busy"]
                    and not two.host()["reserved_bytes"]
                ),
                within_s=15.0,
            )


# ------------------------------------------------------------------ files
def test_a_model_file_is_loaded_and_saved_again(
    stores: Stores, stub: CatalogStub, tmp_path: Path
) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    tensors: dict[str, np.ndarray[Any, Any]] = {
        "a": np.arange(100_000, dtype=np.float32),
        "b": np.arange(7, dtype=np.int64).reshape(1, 7),
    }
    save_file(tensors, tmp_path / "in.safetensors")
    card = stores.start(link=stub.target)
    gen = generation()
    task = stub.order(
        card.node,
        lambda task: DoLoad(
            task=task,
            generation=gen,
            id=ArtifactId("m"),
            version=Version(1),
            path=str(tmp_path / "in.safetensors"),
            deadline_s=10.0,
        ),
    )
    done = stub.done(card.node, task)
    with StoreClient(card) as client:
        assert client.open(gen).index == done.result
    task = stub.order(
        card.node,
        lambda task: DoSave(
            task=task,
            generation=gen,
            path=str(tmp_path / "out.safetensors"),
            deadline_s=10.0,
        ),
    )
    stub.done(card.node, task)
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert np.array_equal(found[name], value)


def test_a_file_that_is_not_there_leaves_no_reservation(
    stores: Stores, stub: CatalogStub, tmp_path: Path
) -> None:
    card = stores.start(link=stub.target)
    task = stub.order(
        card.node,
        lambda task: DoLoad(
            task=task,
            generation=generation(),
            id=ArtifactId("m"),
            version=Version(1),
            path=str(tmp_path / "no.safetensors"),
            deadline_s=10.0,
        ),
    )
    with pytest.raises(NotFound):
        stub.done(card.node, task)
    with StoreClient(card) as client:
        assert client.state()["generations"] == {}


# ------------------------------------------------------------------ disk
def test_what_does_not_fit_memory_goes_to_disk_and_comes_back(
    stores: Stores, stub: CatalogStub, tmp_path: Path
) -> None:
    card = stores.start(
        link=stub.target,
        disk_dir=str(tmp_path / "disk"),
        disk_bytes=256 * MIB,
        disk_dir_allow_tmpfs=True,
    )
    with StoreClient(card) as client:
        gens = [client.put(content(8 * MIB, n)) for n in range(14)]
        for n, gen in enumerate(gens):
            assert client.read(gen) == content(8 * MIB, n)
        tiers = client.state()["tiers"]
        assert tiers["host"]["used_bytes"] <= 64 * MIB
        assert tiers["disk"]["replicas"] >= 6


def test_when_no_tier_has_room_the_put_is_refused_and_all_stays_readable(
    stores: Stores, stub: CatalogStub, tmp_path: Path
) -> None:
    card = stores.start(
        link=stub.target,
        disk_dir=str(tmp_path / "disk"),
        disk_bytes=32 * MIB,
        disk_dir_allow_tmpfs=True,
        host_memory_bytes=32 * MIB,
    )
    with StoreClient(card) as client:
        gens: list[Generation] = []
        with pytest.raises(CapacityError) as refused:  # noqa: PT012
            for n in range(100):
                gens.append(client.put(content(MIB, n)))
        assert {"tier", "needed", "free"} <= refused.value.data.keys()
        assert 55 <= len(gens) <= 64
        for n, gen in enumerate(gens):
            assert client.read(gen) == content(MIB, n)
        for gen in gens[:10]:
            stub.drop(card.node, gen, final=True)
        client.put(content(MIB, 500))


def test_a_vanished_disk_folder_loses_nothing_that_is_in_memory(
    stores: Stores, stub: CatalogStub, tmp_path: Path
) -> None:
    import shutil

    card = stores.start(
        link=stub.target,
        disk_dir=str(tmp_path / "disk"),
        disk_bytes=64 * MIB,
        disk_dir_allow_tmpfs=True,
        host_memory_bytes=16 * MIB,
    )
    with StoreClient(card) as client:
        gens = [client.put(content(4 * MIB, n)) for n in range(6)]
        there = client.state()["generations"]
        shutil.rmtree(tmp_path / "disk")
        for n, gen in enumerate(gens):
            if "host:committed" in there[str(gen)]:
                assert client.read(gen) == content(4 * MIB, n)
        lost = [gen for gen in gens if there[str(gen)] == ["disk:committed"]]
        assert lost
        with pytest.raises(Gone):
            client.read(lost[0])
        eventually(
            lambda: (
                lost[0] in {m.generation for m in stub.heard(card.node, ReplicaDropped)}
            ),
            within_s=15.0,
        )


def test_the_catalog_ends_a_store(stores: Stores, stub: CatalogStub) -> None:
    card = stores.start(link=stub.target)
    stub.link(card.node).stream.send(DoEnd(why="test"))
    stores.await_end(card)


# ------------------------------------------------------------------ memory cgroup
def test_in_a_cgroup_smaller_than_the_budget_puts_end_in_capacity_error(
    stores: Stores,
) -> None:
    group = _cgroup(384 * MIB)
    if group is None:
        pytest.skip("no memory cgroup can be made here")
    code = f"""
        import sys
        from pathlib import Path
        Path(sys.argv[1], "cgroup.procs").write_text("0")
        from tensorcast_dask.exceptions import CapacityError
        from tests.kit.stores import StoreClient, Stores, content
        stores = Stores(Path({str(stores.run_dir)!r}))
        card = stores.start(
            host_memory_bytes=4 << 30, reserve_min_bytes=64 << 20, free_ttl_s=30.0
        )
        client = StoreClient(card)
        held = []  # pieces so small that this process's own copies fit into the reserve
        try:
            for n in range(60):
                held.append(client.put(content(8 << 20, n)))
            print("never refused")
        except CapacityError as error:
            assert error.data["what"] == "cgroup", error.data
            for n, gen in enumerate(held):
                assert client.read(gen) == content(8 << 20, n)
            assert client.host()["reserved_bytes"] == 0
            print("refused after", len(held))
        client.close()
        stores.close()
    """
    try:
        said = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), str(group)],
            cwd=ROOT,
            capture_output=True,
            timeout=50,
            check=False,
        )
        assert said.returncode == 0, said.stderr.decode()
        count = int(said.stdout.split()[-1])
        assert 12 <= count <= 42
    finally:
        eventually(lambda: _rmdir(group), within_s=10.0)


def _rmdir(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return False
    return True


def _cgroup(limit_bytes: int) -> Path | None:
    """Make a memory cgroup (version 1 or 2), or say that none can be made."""
    for root, name in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"tensorcast-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / name).write_text(str(limit_bytes))
        except OSError:
            if group.exists():
                group.rmdir()
            continue
        return group
    return None
