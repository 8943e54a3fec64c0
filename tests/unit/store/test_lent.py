from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest

from tensorcast_dask.dataplane import arrays
from tensorcast_dask.dataplane.hosts import PidWatch
from tensorcast_dask.exceptions import CorruptFile, InvalidArgument, OwnerGone
from tensorcast_dask.store import lent
from tensorcast_dask.store.lent import RemoteMemory
from tensorcast_dask.tensors.ids import ArtifactId, Generation, RequestId, Version
from tensorcast_dask.tensors.messages import Lend, Owner, Tier

TENSORS: dict[str, np.ndarray] = {
    "a": np.arange(1000, dtype=np.uint8),
    "b": np.arange(7, dtype=np.int16),
    "c": np.arange(64, dtype=np.float64),
}


def lend(tensors: dict[str, np.ndarray] = TENSORS, **more: object) -> Lend:
    index, sources = arrays.canonical(tensors)
    spans, others = arrays.spans(sources, index)
    given = {"index": index.encode(), "spans": spans, "whole": not others} | more
    return Lend(
        rid=RequestId("r"),
        generation=Generation(7),
        id=ArtifactId("x"),
        version=Version(1),
        **given,  # type: ignore[arg-type]
    )


def content(tensors: dict[str, np.ndarray] = TENSORS) -> bytes:
    index, sources = arrays.canonical(tensors)
    whole = bytearray(index.nbytes)
    arrays.copy_into(sources, index, whole)
    return bytes(whole)


def nobody(*_: object) -> None:
    pytest.fail("the instance was asked for what the store can read")


def mine(**more: object) -> RemoteMemory:
    return RemoteMemory(lend(**more), PidWatch(os.getpid()), nobody)  # type: ignore[arg-type]


def test_every_range_of_lent_memory_is_what_the_segment_would_hold() -> None:
    memory, whole = mine(), content()
    assert memory.record.owner is Owner.CALLER
    assert memory.record.nbytes == len(whole)
    for start, end in [(0, len(whole)), (0, 1), (990, 1030), (1000, 1024), (5, 1200)]:
        room = bytearray(b"\xaa" * (end - start))
        assert memory.part(start, memoryview(room)) == 0
        assert bytes(room) == whole[start:end], (start, end)


def test_a_reader_waits_for_the_end_of_a_mutation_and_sees_its_stamp() -> None:
    memory = mine()
    memory.mutating(1)
    room = bytearray(8)
    stamps: list[int] = []
    reader = threading.Thread(
        target=lambda: stamps.append(memory.part(0, memoryview(room)))
    )
    reader.start()
    memory.mutating(2)
    reader.join(10)
    assert stamps == [2]
    assert bytes(room) == content()[:8]


def test_what_does_not_lie_as_it_is_stored_is_asked_of_its_owner() -> None:
    strided = {"s": np.arange(20.0)[::2]}
    asked: list[tuple[int, int]] = []

    def give(_: int, start: int, room: memoryview) -> None:
        asked.append((start, len(room)))
        room[:] = content(strided)[start : start + len(room)]

    memory = RemoteMemory(lend(strided), PidWatch(os.getpid()), give)
    assert memory.where() == (0, b"")
    room = bytearray(16)
    memory.part(8, memoryview(room))
    assert bytes(room) == content(strided)[8:24]
    assert asked == [(8, 16)]


def test_where_the_kernel_forbids_it_the_owner_is_asked_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tensorcast_dask.exceptions import PeerLost

    def forbidden(*_: object, **__: object) -> int:
        raise PeerLost("not permitted")

    monkeypatch.setattr(lent, "read_process", forbidden)
    asked: list[int] = []
    memory = RemoteMemory(
        lend(), PidWatch(os.getpid()), lambda _, start, __: asked.append(start)
    )
    assert memory.where()[0] == os.getpid()
    memory.part(0, memoryview(bytearray(4)))
    memory.part(4, memoryview(bytearray(4)))
    assert asked == [0, 4]
    assert memory.where() == (0, b"")


def test_memory_of_a_process_that_has_ended_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.DEVNULL)
    watch = PidWatch(child.pid)
    child.wait(30)
    memory = RemoteMemory(lend(), watch, nobody)
    with pytest.raises(OwnerGone):
        memory.part(0, memoryview(bytearray(4)))
    with pytest.raises(OwnerGone):
        memory.stamp()


def test_memory_on_a_device_is_given_by_handle_to_who_has_it_and_by_its_owner() -> None:
    asked: list[int] = []
    memory = RemoteMemory(
        lend(device="EMU-1", slabs=(b"handle",), slab_spans=b"spans", spans=b""),
        PidWatch(os.getpid()),
        lambda _, start, __: asked.append(start),
    )
    assert memory.record.tier is Tier.DEVICE
    assert memory.slabs("EMU-1") == ((b"handle",), b"spans")
    assert memory.slabs("EMU-2") == ((), b"")
    assert memory.where() == (0, b"")
    memory.part(4, memoryview(bytearray(4)))
    assert asked == [4]


@pytest.mark.parametrize(
    "spans",
    [
        b"x",
        struct.pack("<QQQ", 0, 0, 8),
        struct.pack("<QQQ", 0, 4096, 1 << 40),
        struct.pack("<6Q", 8, 4096, 8, 0, 4096, 8),
    ],
)
def test_spans_that_cannot_be_are_refused(spans: bytes) -> None:
    with pytest.raises(InvalidArgument):
        mine(spans=spans)


def test_bytes_that_are_no_index_are_refused() -> None:
    with pytest.raises(CorruptFile):
        mine(index=b"junk")
