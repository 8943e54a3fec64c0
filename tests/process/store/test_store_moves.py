"""Moves that meet: chains, joins, cancels, slow readers, takeovers, TLS."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tensorcast_dask.dataplane.channel import Prefer
from tensorcast_dask.exceptions import (
    CapacityError,
    DeadlineExceeded,
    Gone,
    NotFound,
    PeerLost,
    TensorCastError,
    WrongPeer,
)
from tensorcast_dask.tensors.ids import Generation
from tensorcast_dask.tensors.messages import (
    Chunk,
    ChunkMap,
    ChunkMapAsked,
    DoCancel,
    DoMark,
    DropGranted,
    Inventory,
    MayDrop,
    NodeCard,
    ReadChunk,
    SumsAsked,
    TaskDone,
    Tier,
)
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

SLOW = {"bandwidth_bytes_per_s": 2.0 * MIB, "connections": 1}


@pytest.fixture
def stub() -> Iterator[CatalogStub]:
    """A catalog without opinions."""
    made = CatalogStub()
    yield made
    made.close()


def apart(stores: Stores, stub: CatalogStub, number: int, **more: Any) -> NodeCard:
    """Start a store on a host of its own."""
    return stores.start(link=stub.target, host=stores.separate(number), **more)


# ------------------------------------------------------------------ receiving
def test_what_has_arrived_is_served_on_while_the_rest_arrives(
    stores: Stores, stub: CatalogStub
) -> None:
    source = apart(stores, stub, 0, **SLOW)
    middle, last = apart(stores, stub, 1), apart(stores, stub, 2)
    nbytes = 3 * MIB
    with StoreClient(source) as one:
        gen = one.put(content(nbytes))
    task = stub.start_pull(middle, gen, nbytes, source)
    with StoreClient(middle) as two, StoreClient(last) as three:

        def arrived() -> bool:
            try:
                found = two.call(ChunkMapAsked(rid=two.rid(), generation=gen), ChunkMap)
            except TensorCastError:
                return False
            return any(found.message.have)

        eventually(arrived, within_s=10.0)
        # The last one knows the middle alone, which has a part of it.
        done = stub.pull(last, gen, nbytes, middle)
        assert done.sources == (middle.node,)
        stub.done(middle.node, task)
        assert two.read(gen) == three.read(gen) == content(nbytes)


def test_two_orders_for_the_same_bytes_are_one_pull(
    stores: Stores, stub: CatalogStub
) -> None:
    source, target = apart(stores, stub, 0, **SLOW), apart(stores, stub, 1)
    nbytes = 2 * MIB
    with StoreClient(source) as one, StoreClient(target) as two:
        gen = one.put(content(nbytes))
        tasks = [stub.start_pull(target, gen, nbytes, source) for _ in range(3)]
        for task in tasks:
            stub.done(target.node, task)
        assert two.read(gen) == content(nbytes)
        assert two.host()["used_bytes"] == nbytes


def test_a_pull_ends_at_its_deadline_and_when_it_is_cancelled(
    stores: Stores, stub: CatalogStub
) -> None:
    source, target = apart(stores, stub, 0, **SLOW), apart(stores, stub, 1)
    nbytes = 40 * MIB
    with StoreClient(source) as one, StoreClient(target) as two:
        gen = one.put(content(nbytes))
        with pytest.raises(DeadlineExceeded):
            stub.pull(target, gen, nbytes, source, deadline_s=0.7)
        task = stub.start_pull(target, gen, nbytes, source)
        eventually(lambda: two.host()["reserved_bytes"], within_s=10.0)
        stub.link(target.node).stream.send(DoCancel(task=task))
        with pytest.raises(DeadlineExceeded, match="cancel"):
            stub.done(target.node, task)
        eventually(lambda: not any(two.state()["busy"].values()), within_s=15.0)
        assert two.host()["reserved_bytes"] == 0
        eventually(lambda: one.state()["connections"] == 1, within_s=15.0)


def test_a_destroy_during_a_pull_wins(stores: Stores, stub: CatalogStub) -> None:
    source, target = apart(stores, stub, 0, **SLOW), apart(stores, stub, 1)
    nbytes = 2 * MIB
    with StoreClient(source) as one, StoreClient(target) as two:
        gen = one.put(content(nbytes))
        task = stub.start_pull(target, gen, nbytes, source)
        eventually(lambda: two.host()["reserved_bytes"], within_s=10.0)
        stub.drop(target.node, gen, final=True)
        with pytest.raises((Gone, NotFound)):
            stub.done(target.node, task)
        assert two.host()["used_bytes"] == 0
        eventually(lambda: not two.host()["reserved_bytes"], within_s=15.0)


def test_outcomes_are_said_again_to_a_catalog_that_did_not_hear_them(
    stores: Stores, stub: CatalogStub
) -> None:
    target = apart(stores, stub, 0)
    with pytest.raises(PeerLost):
        stub.pull(target, generation(), MIB)
    task = stub.start_pull(target, generation(), MIB)  # ends, and nobody acknowledges
    eventually(
        lambda: [d for d in stub.heard(target.node, TaskDone) if d.task == task],
        within_s=15.0,
    )
    stub.link(target.node).stream.close()  # the link comes back by itself
    eventually(
        lambda: (
            len([d for d in stub.heard(target.node, TaskDone) if d.task == task]) == 2
        ),
        within_s=10.0,
    )
    assert len(stub.heard(target.node, Inventory)) == 2


# ------------------------------------------------------------------ slow readers
def test_a_slow_read_gets_the_right_bytes_whatever_is_evicted_meanwhile(
    stores: Stores, stub: CatalogStub
) -> None:
    card = apart(stores, stub, 0, host_memory_bytes=16 * MIB, **SLOW)
    node = card.node
    known = stub.link(node).hello.card
    data = content(2 * MIB)
    with StoreClient(card) as local:
        gen = local.put(data)
        stub.link(node).stream.send(DoMark(generation=gen, spare=True))
        eventually(lambda: local.host()["evictable_bytes"], within_s=15.0)
        # The thread that computes sums has a lease too: the one seen below is the reader's.
        asked = ChunkMapAsked(rid=local.rid(), generation=gen)
        eventually(lambda: local.call(asked, ChunkMap).message.sums, within_s=15.0)
        local.idle()
        got: list[bytes] = []

        def read() -> None:
            with StoreClient(known, prefer=Prefer.TCP, host=None) as slow:
                got.append(slow.read(gen))

        reader = threading.Thread(target=read)
        reader.start()
        eventually(lambda: local.state()["busy"]["leases"], within_s=15.0)
        # The catalog has it dropped and others fill the memory while it is read.
        stub.drop(node, gen)
        with pytest.raises(CapacityError):  # noqa: PT012
            for seed in range(20):
                local.put(content(2 * MIB, 100 + seed))
        reader.join(20.0)
        assert got == [data]
        eventually(lambda: not local.state()["busy"]["leases"], within_s=15.0)
        local.put(content(2 * MIB, 500))  # its memory is free now


def test_chunks_of_a_replica_that_went_are_refused_and_never_other_bytes(
    stores: Stores, stub: CatalogStub
) -> None:
    card = apart(stores, stub, 0, host_memory_bytes=8 * MIB)
    known = stub.link(card.node).hello.card
    with StoreClient(card) as local, StoreClient(known, prefer=Prefer.TCP) as remote:
        for turn in range(30):
            gen = local.put(content(4 * MIB, turn))
            frame = remote.call(
                ReadChunk(rid=remote.rid(), generation=gen, chunk=3),
                Chunk,
                max_payload_bytes=MIB,
            )
            chunk = 64 << 10
            assert frame.payload == content(4 * MIB, turn)[3 * chunk : 4 * chunk]
            stub.drop(card.node, gen)
            with pytest.raises(Gone):
                remote.call(
                    ReadChunk(rid=remote.rid(), generation=gen, chunk=4),
                    Chunk,
                    max_payload_bytes=MIB,
                )


# ------------------------------------------------------------------ pressure
def test_many_puts_at_once_never_hold_more_than_the_budget(
    stores: Stores, stub: CatalogStub
) -> None:
    card = apart(stores, stub, 0, host_memory_bytes=24 * MIB)
    node = card.node
    stub.link(node)
    stopping = threading.Event()

    def grant() -> None:
        """Grant whatever is asked for."""
        answered = 0
        while not stopping.is_set():
            asked = stub.heard(node, MayDrop)
            for message in asked[answered:]:
                stub.link(node).stream.send(
                    DropGranted(rid=message.rid, generations=message.generations)
                )
            answered = len(asked)
            stopping.wait(0.005)

    def work(seed: int) -> int:
        refused = 0
        with StoreClient(card) as client:
            for turn in range(8):
                nbytes = [1000, 3 * MIB, MIB, 200_000][(seed + turn) % 4]
                try:
                    gen = client.put(content(nbytes, seed * 100 + turn))
                except CapacityError:
                    refused += 1
                    continue
                assert client.read(gen) == content(nbytes, seed * 100 + turn)
                stub.link(node).stream.send(DoMark(generation=gen, spare=True))
        return refused

    granting = threading.Thread(target=grant)
    granting.start()
    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    try:
        with StoreClient(card) as watch:
            while any(worker.is_alive() for worker in workers):
                assert watch.host()["held_bytes"] <= 24 * MIB
    finally:
        for worker in workers:
            worker.join()
        stopping.set()
        granting.join()
    with StoreClient(card) as watch:
        state = watch.idle()
        assert state["busy"] == dict.fromkeys(state["busy"], 0)


# ------------------------------------------------------------------ disk
def test_a_replica_is_pulled_to_disk_and_read_from_there(
    stores: Stores, stub: CatalogStub, tmp_path: Path
) -> None:
    source = apart(stores, stub, 0)
    target = apart(
        stores,
        stub,
        1,
        disk_dir=str(tmp_path / "disk"),
        disk_bytes=64 * MIB,
        disk_dir_allow_tmpfs=True,
    )
    with StoreClient(source) as one, StoreClient(target) as two:
        gen = one.put(content(2 * MIB))
        stub.pull(target, gen, 2 * MIB, source, tier=Tier.DISK)
        assert two.state()["generations"][str(gen)] == ["disk:committed"]
        assert two.read(gen) == content(2 * MIB)


def test_memory_and_disk_may_be_wanted_at_one_node_at_once(
    stores: Stores, stub: CatalogStub, tmp_path: Path
) -> None:
    disk: dict[str, Any] = {
        "disk_dir": str(tmp_path / "disk"),
        "disk_bytes": 64 * MIB,
        "disk_dir_allow_tmpfs": True,
    }
    source, target = apart(stores, stub, 0, **SLOW), apart(stores, stub, 1, **disk)
    with StoreClient(source) as one, StoreClient(target) as two:
        gen = one.put(content(2 * MIB))
        tasks = [
            stub.start_pull(target, gen, 2 * MIB, source, tier=tier, deadline_s=60.0)
            for tier in (Tier.DISK, Tier.HOST)
        ]
        for task in tasks:
            stub.done(target.node, task, within_s=60.0)
        assert two.read(gen) == content(2 * MIB)


def test_readers_that_need_more_than_the_memory_all_get_their_bytes(
    stores: Stores, stub: CatalogStub, tmp_path: Path
) -> None:
    card = apart(
        stores,
        stub,
        0,
        disk_dir=str(tmp_path / "disk"),
        disk_bytes=64 * MIB,
        disk_dir_allow_tmpfs=True,
        host_memory_bytes=4 * MIB,
    )
    with StoreClient(card) as client:
        gens = [client.put(content(MIB, n)) for n in range(12)]
        known = stub.link(card.node).hello.card

        def read(first: int) -> list[bool]:
            prefer = Prefer.TCP if first % 2 else Prefer.UNIX
            with StoreClient(known, prefer=prefer, host=card.host) as reader:
                order = [(first * 5 + turn * 7) % 12 for turn in range(12)]
                return [reader.read(gens[n]) == content(MIB, n) for n in order]

        with ThreadPoolExecutor(4) as pool:
            for right in pool.map(read, range(4)):
                assert all(right)
        asked = SumsAsked(rid=client.rid(), generation=gens[0])
        assert client.call(asked, ChunkMap).message.sums
        eventually(lambda: not any(client.state()["busy"].values()), within_s=15.0)
        tiers = client.state()["tiers"]
        assert tiers["host"]["held_bytes"] <= 4 * MIB
        # Segments of the table, and none of those that were lent to readers.
        eventually(
            lambda: (
                client.state()["segments"]
                == client.host()["replicas"] + client.host()["warm_bytes"] // MIB
            ),
            within_s=15.0,
        )


def test_a_store_takes_over_the_disk_of_one_that_was_killed(
    stores: Stores, stub: CatalogStub, tmp_path: Path
) -> None:
    disk: dict[str, Any] = {
        "disk_dir": str(tmp_path / "disk"),
        "disk_bytes": 64 * MIB,
        "disk_dir_allow_tmpfs": True,
        "host_memory_bytes": 8 * MIB,
    }
    first = apart(stores, stub, 0, **disk)
    with StoreClient(first) as client:
        gens = [client.put(content(2 * MIB, n)) for n in range(7)]
        spilled = [
            Generation(int(gen))
            for gen, copies in client.state()["generations"].items()
            if "disk:committed" in copies
        ]
    assert spilled
    stores.kill(first)
    second = apart(stores, stub, 0, **disk)
    stub.link(second.node)
    (said,) = stub.heard(second.node, Inventory)
    assert {(r.generation, r.tier) for r in said.replicas} == {
        (gen, Tier.DISK) for gen in spilled
    }
    with StoreClient(second) as client:
        for gen in spilled:
            assert client.read(gen) == content(2 * MIB, gens.index(gen))


def test_a_spill_that_is_killed_leaves_no_half_written_replica(
    stores: Stores,
    stub: CatalogStub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk: dict[str, Any] = {
        "disk_dir": str(tmp_path / "disk"),
        "disk_bytes": 64 * MIB,
        "disk_dir_allow_tmpfs": True,
        "host_memory_bytes": 8 * MIB,
    }
    monkeypatch.setenv("TENSORCAST_FAULTS", "spill.write=kill@1")
    first = apart(stores, stub, 0, **disk)
    monkeypatch.delenv("TENSORCAST_FAULTS")
    with StoreClient(first) as client:
        with pytest.raises(PeerLost):  # noqa: PT012
            for n in range(7):
                client.put(content(2 * MIB, n))
        stores.await_end(first)
    second = apart(stores, stub, 0, **disk)
    with StoreClient(second) as client:
        assert client.state()["generations"] == {}


def test_a_failing_disk_refuses_the_put_and_loses_nothing(
    stores: Stores,
    stub: CatalogStub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TENSORCAST_FAULTS", "spill.write=raise:ENOSPC")
    card = apart(
        stores,
        stub,
        0,
        disk_dir=str(tmp_path / "disk"),
        disk_bytes=64 * MIB,
        disk_dir_allow_tmpfs=True,
        host_memory_bytes=8 * MIB,
    )
    with StoreClient(card) as client:
        gens = [client.put(content(2 * MIB, n)) for n in range(4)]
        with pytest.raises(CapacityError) as refused:
            client.put(content(2 * MIB, 9))
        assert refused.value.data["tier"] == "host"
        for n, gen in enumerate(gens):
            assert client.read(gen) == content(2 * MIB, n)
        assert client.state()["tiers"]["disk"]["reserved_bytes"] == 0


# ------------------------------------------------------------------ security
def test_with_tls_bytes_move_and_strangers_do_not(stores: Stores) -> None:
    files, others = mint_certificates(), mint_certificates()
    stub = CatalogStub(tls=files)
    try:
        source, target = apart(stores, stub, 0), apart(stores, stub, 1)
        with StoreClient(source) as one, StoreClient(target) as two:
            gen = one.put(content(MIB))
            done = stub.pull(target, gen, MIB, source)
            assert done.via == "tcp"
            assert two.read(gen) == content(MIB)
        known = stub.link(source.node).hello.card
        assert known.tls
        with StoreClient(known, prefer=Prefer.TCP, tls=files) as remote:
            assert remote.read(gen) == content(MIB)
        with pytest.raises(TensorCastError):
            StoreClient(known, prefer=Prefer.TCP, tls=others)
    finally:
        stub.close()


def test_who_does_not_hold_the_token_gets_nothing_over_tcp(
    stores: Stores, stub: CatalogStub
) -> None:
    card = apart(stores, stub, 0)
    known = stub.link(card.node).hello.card
    with pytest.raises(WrongPeer):
        StoreClient(known, prefer=Prefer.TCP, token=bytes(32))


def test_a_put_is_fixed_when_it_returns(stores: Stores, stub: CatalogStub) -> None:
    """P06: the caller's later writes never show."""
    card = apart(stores, stub, 0)
    with StoreClient(card) as client:
        for nbytes in (1024, 4 * MIB):
            mine = bytearray(content(nbytes))
            gen = client.put(bytes(mine))
            mine[:] = bytes(nbytes)
            assert client.read(gen) == content(nbytes)
