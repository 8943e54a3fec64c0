"""Puts and reads at a real store process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tensorcast_dask.dataplane.channel import Prefer
from tensorcast_dask.exceptions import (
    AlreadyExists,
    CapacityError,
    Gone,
    Incomplete,
    InvalidArgument,
    Mismatch,
    NotFound,
    TensorCastError,
    UnsupportedPlatform,
)
from tensorcast_dask.tensors.ids import ArtifactId, RequestId, Version
from tensorcast_dask.tensors.messages import (
    ChunkMap,
    ChunkMapAsked,
    Commit,
    Done,
    Ranges,
    ReadRanges,
    Reserve,
)
from tests.kit.eventually import eventually, never
from tests.kit.stores import (
    MIB,
    StoreClient,
    Stores,
    content,
    generation,
    index_of,
    nowhere,
    writable,
)

LENGTHS = [0, 1, 63, 4096, (64 << 10) - 1, 64 << 10, MIB, 3 * MIB + 5]


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_what_is_put_is_read_back_bit_for_bit(stores: Stores, nbytes: int) -> None:
    data = content(nbytes)
    with StoreClient(stores.start()) as client:
        gen = client.put(data)
        found = client.open(gen)
        assert bytes(found.data) == data
        assert found.index == index_of(nbytes)
        assert found.mapped == (nbytes >= 64 << 10)


def test_another_process_reads_what_was_put(stores: Stores) -> None:
    card = stores.start()
    data = content(MIB)
    with StoreClient(card) as client:
        gen = client.put(data)
    code = f"""
        from tests.kit.stores import StoreClient, content
        from tensorcast_dask.dataplane import hosts
        from pathlib import Path
        card = hosts.read_card(Path({str(stores.folder(card))!r}))
        with StoreClient(card) as client:
            found = client.open({gen})
            assert found.mapped
            assert bytes(found.data) == content({MIB})
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=True,
        timeout=30,
        cwd=Path(__file__).parents[3],
    )


def test_a_readers_edit_shows_to_nobody_else(stores: Stores) -> None:
    data = content(MIB)
    with StoreClient(stores.start()) as one, StoreClient(one.card) as other:
        gen = one.put(data)
        small = one.put(content(100))
        mine, copied = one.open(gen), one.open(small)
        assert mine.mapped
        assert not copied.mapped
        for view in (mine.data, copied.data):
            _scribble(view)
        assert other.read(gen) == data
        assert one.read(gen) == data
        assert other.read(small) == content(100)


def _scribble(view: memoryview) -> None:
    import numpy as np

    np.frombuffer(view, np.uint8)[:50] ^= 255


def test_commit_is_refused_while_a_write_description_is_open(stores: Stores) -> None:
    data = content(MIB)
    with StoreClient(stores.start()) as client:
        gen = generation()
        _, fd = client.reserve(gen, MIB)
        os.pwrite(fd, data, 0)
        with pytest.raises(Incomplete, match="writer"):
            client.commit(gen, MIB)
        assert client.host()["reserved_bytes"] == MIB
        os.close(fd)
        client.commit(gen, MIB)
        assert client.read(gen) == data


def test_commit_is_refused_while_a_write_map_is_open(stores: Stores) -> None:
    with StoreClient(stores.start()) as client:
        gen = generation()
        _, fd = client.reserve(gen, MIB)
        mapped = writable(fd, MIB)
        with pytest.raises(Incomplete):
            client.commit(gen, MIB)
        mapped.reserve()  # the producer's addresses stay, the writer is gone
        client.commit(gen, MIB)
        assert client.read(gen) == bytes(MIB)


def test_nothing_is_read_before_its_commit(stores: Stores) -> None:
    with StoreClient(stores.start()) as client:
        gen = generation()
        _, fd = client.reserve(gen, MIB)
        with pytest.raises(Incomplete):
            client.open(gen)
        client.fill(fd, content(MIB))
        client.abort(gen)
        with pytest.raises(NotFound):
            client.open(gen)
        assert client.host()["reserved_bytes"] == 0


def test_bytes_come_over_tcp_as_over_the_unix_socket(stores: Stores) -> None:
    card = stores.start(link=nowhere())
    data, small = content(2 * MIB), content(1000, 2)
    with StoreClient(card, prefer=Prefer.TCP) as remote, StoreClient(card) as local:
        large, little = remote.put(data), remote.put(small)
        for client in (remote, local):
            assert client.read(large) == data
            assert client.read(little) == small
        assert not remote.open(large).mapped
        assert local.open(large).mapped


def test_ranges_are_the_bytes_of_the_segment_and_are_checked(stores: Stores) -> None:
    import struct

    data = content(MIB)
    with StoreClient(stores.start(link=nowhere()), prefer=Prefer.TCP) as client:
        gen = client.put(data)
        ranges = [(0, 10), (MIB - 7, 7), (5000, 0), (100_000, 65_537)]
        packed = struct.pack("<8Q", *(n for pair in ranges for n in pair))
        frame = client.call(
            ReadRanges(rid=client.rid(), generation=gen, ranges=packed),
            Ranges,
            max_payload_bytes=MIB,
        )
        assert frame.payload == b"".join(data[at : at + n] for at, n in ranges)
        for bad in (struct.pack("<2Q", MIB - 1, 2), b"odd"):
            with pytest.raises(InvalidArgument):
                client.call(
                    ReadRanges(rid=client.rid(), generation=gen, ranges=bad), Ranges
                )
        assert client.state()["busy"]["leases"] == 0


def test_sums_of_chunks_are_known_soon_after_the_commit(stores: Stores) -> None:
    from tensorcast_dask.tensors.checksums import chunk_sums, encode_sums

    data = content(MIB + 1)
    with StoreClient(stores.start()) as client:
        gen = client.put(data)

        def sums() -> bytes:
            found: bytes = client.call(
                ChunkMapAsked(rid=client.rid(), generation=gen), ChunkMap
            ).message.sums
            return found

        found = eventually(sums, within_s=10.0)
        assert found == encode_sums(list(chunk_sums(data, len(data), 64 << 10)))


def test_the_store_reads_its_callers_memory_and_clears_what_lies_between(
    stores: Stores,
) -> None:
    with StoreClient(stores.start()) as client:
        mine = np.frombuffer(content(MIB, 4), np.uint8).copy()
        gen = generation()
        _, fd = client.reserve(gen, MIB)
        os.close(fd)
        at = mine.ctypes.data
        client.fill_from(gen, [(10, at, 1000), (5000, at + 2000, 700_000)])
        client.commit(gen, MIB)
        wanted = bytearray(MIB)
        wanted[10:1010] = mine[:1000].tobytes()
        wanted[5000:705_000] = mine[2000:702_000].tobytes()
        assert client.read(gen) == wanted


def test_spans_that_overlap_or_do_not_fit_and_strangers_are_refused(
    stores: Stores,
) -> None:
    card = stores.start(link=nowhere())
    mine = np.zeros(MIB, np.uint8)
    at = mine.ctypes.data
    with StoreClient(card) as client, StoreClient(card, prefer=Prefer.TCP) as remote:
        gen = generation()
        _, fd = client.reserve(gen, MIB)
        os.close(fd)
        for spans in (
            [(0, at, 100), (50, at, 100)],
            [(MIB - 1, at, 2)],
            [(100, at, 10), (0, at, 10)],
        ):
            with pytest.raises(InvalidArgument, match="overlap, or do not fit"):
                client.fill_from(gen, spans)
        with pytest.raises(UnsupportedPlatform, match="unix socket"):
            remote.fill_from(gen, [(0, at, 10)])
        with pytest.raises(UnsupportedPlatform, match="kernel"):
            client.fill_from(gen, [(0, 4096, 10)])


# ------------------------------------------------------------------ identity and repeats
def test_the_same_generation_is_reserved_once(stores: Stores) -> None:
    with StoreClient(stores.start()) as one, StoreClient(one.card) as other:
        gen = generation()
        _, fd = one.reserve(gen, MIB)
        with pytest.raises(AlreadyExists):
            other.reserve(gen, MIB)
        one.fill(fd, content(MIB))
        one.commit(gen, MIB)
        with pytest.raises(AlreadyExists):
            other.put_inline(b"x", gen)
        assert other.read(gen) == content(MIB)


def test_many_writers_of_one_generation_leave_one_winner(stores: Stores) -> None:
    card = stores.start()
    gen = generation()

    def race(seed: int) -> bytes | None:
        with StoreClient(card) as client:
            try:
                client.put_inline(content(500, seed), gen)
            except AlreadyExists:
                return None
            return content(500, seed)

    with ThreadPoolExecutor(8) as pool:
        won = [data for data in pool.map(race, range(16)) if data]
    with StoreClient(card) as client:
        assert [client.read(gen)] == won
        assert client.host()["replicas"] == 1


def test_a_repeated_commit_gets_its_first_answer(stores: Stores) -> None:
    with StoreClient(stores.start()) as client:
        gen, rid = generation(), RequestId("once")
        client.put_inline(b"abc", gen, rid=rid)
        client.put_inline(b"abc", gen, rid=rid)
        with pytest.raises(Mismatch, match="another request"):
            client.put_inline(b"xyz", generation(), rid=rid)
        assert client.read(gen) == b"abc"
        assert client.host()["replicas"] == 1


def test_a_repeated_reservation_gets_a_description_again(stores: Stores) -> None:
    with StoreClient(stores.start()) as client, StoreClient(client.card) as again:
        gen, rid = generation(), RequestId("reserve-once")
        _, lost = client.reserve(gen, MIB, rid=rid)
        os.close(lost)
        _, fd = again.reserve(gen, MIB, rid=rid)
        client.close()  # the reservation went over to the connection that asked last
        again.fill(fd, content(MIB))
        again.commit(gen, MIB)
        assert again.read(gen) == content(MIB)
        other = generation()
        _, fd = again.reserve(other, MIB, rid=RequestId("x"))
        os.close(fd)
        with pytest.raises(Mismatch):
            again.reserve(other, 2 * MIB, rid=RequestId("x"))


def test_a_writer_may_be_done_before_the_thread_that_sent_it_its_description(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORCAST_FAULTS", "descriptor.sent[Reserve]=delay:0.5")
    with StoreClient(stores.start()) as client, StoreClient(client.card) as other:
        gen = generation()
        _, fd = client.reserve(gen, MIB)
        other.fill(fd, content(MIB))
        other.commit(gen, MIB)
        assert other.read(gen) == content(MIB)


def test_bad_requests_are_refused_and_change_nothing(stores: Stores) -> None:
    with StoreClient(stores.start()) as client:
        gen = generation()
        _, fd = client.reserve(gen, MIB)
        os.close(fd)
        baseline = client.idle()
        wrong = [
            Reserve(
                rid=client.rid(),
                generation=generation(),
                id=ArtifactId("x"),
                version=Version(1),
                nbytes=-1,
                deadline_s=1.0,
            ),
            Commit(rid=client.rid(), generation=gen, index=b"no index"),
            Commit(rid=client.rid(), generation=gen, index=index_of(MIB - 64)),
            Commit(rid=client.rid(), generation=generation(), index=index_of(1)),
        ]
        for request in wrong:
            with pytest.raises(TensorCastError):
                client.call(request, Done)
        with pytest.raises(InvalidArgument, match="do not fit"):
            client.write(gen, MIB - 3, b"four")
        assert client.idle() == baseline


# ------------------------------------------------------------------ owners of reservations
def test_a_reservation_outlives_its_connection_while_its_process_lives(
    stores: Stores,
) -> None:
    with StoreClient(stores.start()) as watch:
        writer = StoreClient(watch.card)
        gen = generation()
        _, fd = writer.reserve(gen, 4 * MIB)
        writer.close()  # as a pool closes what was idle for long
        never(lambda: not watch.host()["reserved_bytes"], for_s=0.3)
        watch.fill(fd, content(4 * MIB))
        watch.commit(gen, 4 * MIB)
        assert watch.read(gen) == content(4 * MIB)


def test_a_reservation_over_tcp_ends_soon_after_its_connection(stores: Stores) -> None:
    card = stores.start(link=nowhere(), reservation_ttl_s=0.3)
    with StoreClient(card) as watch:
        writer = StoreClient(card, prefer=Prefer.TCP)
        gen = generation()
        writer.reserve(gen, 4 * MIB, deadline_s=600.0)
        writer.write(gen, 0, content(MIB))
        writer.close()
        eventually(lambda: not watch.host()["reserved_bytes"], within_s=15.0)
        watch.put(content(4 * MIB), gen)


def test_a_message_takes_more_than_a_slab_where_somebody_puts_so(
    stores: Stores,
) -> None:
    with StoreClient(stores.start()) as client:
        for nbytes in ((64 << 10) - 1, 64 << 10, MIB):
            gen = client.put_inline(content(nbytes))
            assert client.read(gen) == content(nbytes)
        with pytest.raises(InvalidArgument, match="too many"):
            client.put_inline(bytes(17 * MIB))


def test_a_reservation_ends_at_its_deadline(stores: Stores) -> None:
    with StoreClient(stores.start()) as client:
        gen = generation()
        _, fd = client.reserve(gen, MIB, deadline_s=0.2)
        eventually(lambda: not client.host()["reserved_bytes"], within_s=15.0)
        with pytest.raises((NotFound, Gone)):
            client.commit(gen, MIB)
        os.close(fd)
        assert client.put(content(MIB), gen) == gen


@pytest.mark.parametrize("part", [1, 2])
def test_a_writer_that_is_killed_mid_put_leaves_nothing(
    stores: Stores, part: int
) -> None:
    card = stores.start()
    gen = generation()
    nbytes = 6 * MIB
    code = f"""
        import os, time, sys
        from pathlib import Path
        from tests.kit.stores import StoreClient, content
        from tensorcast_dask.dataplane import hosts
        card = hosts.read_card(Path({str(stores.folder(card))!r}))
        client = StoreClient(card)
        _, fd = client.reserve({gen}, {nbytes})
        os.pwrite(fd, content({nbytes})[: {nbytes * part // 3}], 0)
        print("written", flush=True)
        time.sleep(60)
    """
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    assert writer.stdout is not None
    with StoreClient(card) as client, writer.stdout:
        assert writer.stdout.readline() == b"written\n"
        assert client.host()["reserved_bytes"] == nbytes
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        eventually(lambda: not client.host()["reserved_bytes"], within_s=15.0)
        with pytest.raises(NotFound):
            client.open(gen)
        client.put(content(nbytes), gen)
        assert client.read(gen) == content(nbytes)
        eventually(lambda: not client.host()["lingering_bytes"], within_s=15.0)


# ------------------------------------------------------------------ room
def test_puts_end_in_capacity_error_and_change_nothing(stores: Stores) -> None:
    with StoreClient(stores.start()) as client:
        held = [client.put(content(8 * MIB, seed)) for seed in range(8)]
        baseline = client.idle()
        with pytest.raises(CapacityError) as refused:
            client.put(content(8 * MIB))
        assert refused.value.data["tier"] == "host"
        assert refused.value.data["needed"] == 8 * MIB
        assert refused.value.data["free"] == 0
        assert client.idle() == baseline
        for seed, gen in enumerate(held):
            assert client.read(gen) == content(8 * MIB, seed)


def test_descriptors_are_refused_before_there_are_none(stores: Stores) -> None:
    with StoreClient(stores.start(max_descriptors=10)) as client:
        for _ in range(10):
            client.put(content(64 << 10))
        with pytest.raises(CapacityError, match="descriptors"):
            client.put(content(64 << 10))
        assert client.host()["reserved_bytes"] == 0
        assert client.host()["replicas"] == 10


def test_ten_thousand_small_artifacts_take_few_descriptors(stores: Stores) -> None:
    with StoreClient(
        stores.start(slab_bytes=16 * MIB, host_memory_bytes=128 * MIB)
    ) as client:
        gens = [client.put_inline(content(4096, n)) for n in range(10_000)]
        state = client.state()
        assert state["segments"] < 10
        assert state["tiers"]["host"]["used_bytes"] == 10_000 * 4096
        for n in (0, 1, 5_000, 9_999):
            assert client.read(gens[n]) == content(4096, n)
        fds = len(list(Path(f"/proc/{client.card.pid}/fd").iterdir()))
        assert fds < 100


def test_a_lookup_pins_and_leases_nothing(stores: Stores) -> None:
    with StoreClient(stores.start()) as client:
        gen = client.put(content(MIB))
        baseline = client.idle()["busy"]
        for n in range(200):
            client.call(ChunkMapAsked(rid=client.rid(), generation=gen), ChunkMap)
            with pytest.raises(NotFound):
                client.open(generation())
            if n % 10 == 0:
                broken = StoreClient(client.card)
                broken.channel.stream.send(
                    ReadRanges(rid=client.rid(), generation=gen, ranges=bytes(16))
                )
                broken.close()
            client.open(gen)
        eventually(
            lambda: (
                client.state()["busy"] == baseline
                and client.state()["connections"] == 1
            ),
            within_s=15.0,
        )
