"""What is given up while its memory, or its file, is being made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorcast_dask.dataplane.files.spool import Spool, Spooled
from tensorcast_dask.exceptions import AbsentError, Gone
from tensorcast_dask.store.core import Core, now_s
from tensorcast_dask.store.disk import Disk
from tensorcast_dask.store.machine import Machine
from tensorcast_dask.store.room import Room
from tensorcast_dask.store.shelf import Shelf
from tensorcast_dask.store.state.replicas import Wanted
from tensorcast_dask.tensors.ids import ArtifactId, Generation, Version
from tensorcast_dask.tensors.messages import StoreSettings, Tier
from tests.kit.models import sample

GEN = Generation(1)
MODEL = sample({"a": ("uint8", (2 << 20,))}, seed=1)


class MeddledSpool(Spool):
    """A disk on which something happens while a file is written."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def write(self, *args: Any, **kwargs: Any) -> Spooled:
        return super().write(*args, **kwargs, on_bytes=lambda _: self.meanwhile())


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    settings = StoreSettings(
        host_memory_bytes=64 << 20,
        disk_dir=str(tmp_path),
        disk_bytes=64 << 20,
        warm_bytes=0,
    )
    core = Core(settings, shelf=Shelf(), machine=Machine())
    yield core
    core.drop(GEN, why="the test is over")
    core.shelf.settle()
    assert (core.table.replicas, len(core.shelf)) == ({}, 0)


def wanted(nbytes: int = MODEL.index.nbytes, **more: Any) -> Wanted:
    return Wanted(
        generation=GEN,
        id=ArtifactId("a"),
        version=Version(1),
        nbytes=nbytes,
        tier=Tier.HOST,
        owner=0,
        deadline_s=now_s() + 60.0,
        labels={},
        **more,
    )


def put(core: Core) -> None:
    filling = core.reserve(wanted(), until_s=now_s())
    held = core.hold(GEN, filling.copy)
    held.view()[:] = MODEL.segment
    core.release(held)
    encoded = MODEL.index.encode()
    core.commit(GEN, Tier.HOST, index=encoded, index_digest=MODEL.index.digest())


@pytest.mark.parametrize("nbytes", [4096, 2 << 20])
def test_what_is_given_up_while_its_memory_is_made_leaves_none(
    core: Core, nbytes: int
) -> None:
    class Meddled(Room):
        def make(self, *args: Any, **kwargs: Any) -> None:
            core.drop(GEN, why="destroyed", final=True)
            super().make(*args, **kwargs)

    core.room.__class__ = Meddled
    with pytest.raises(Gone):
        core.reserve(wanted(nbytes), until_s=now_s())


def test_memory_that_was_given_up_is_not_written_to(core: Core) -> None:
    filling = core.reserve(wanted(), until_s=now_s())
    core.drop(GEN, why="dropped")
    with pytest.raises(AbsentError):
        core.hold(GEN, filling.copy)
    again = core.reserve(wanted(), until_s=now_s())
    with pytest.raises(Gone):
        core.hold(GEN, filling.copy)
    core.release(core.hold(GEN, again.copy))


def test_what_is_destroyed_while_it_goes_to_disk_leaves_no_file(
    core: Core, tmp_path: Path
) -> None:
    put(core)
    spool = MeddledSpool(tmp_path / "disk", allow_tmpfs=True)
    spool.meanwhile = lambda: core.drop(GEN, why="destroyed", final=True)
    disk = Disk(core, spool)
    with pytest.raises(Gone):
        disk.save(GEN, until_s=now_s() + 60.0)
    assert not list(spool.folder.glob("*.safetensors"))
    disk.end(remove=True)


def test_memory_stays_when_the_copy_on_disk_went_meanwhile(
    core: Core, tmp_path: Path
) -> None:
    put(core)
    disk = Disk(core, Spool(tmp_path / "disk", allow_tmpfs=True))
    disk.save(GEN, until_s=now_s() + 60.0)
    assert core.room.evict(GEN, Tier.DISK)
    assert not core.room.evict(GEN, Tier.HOST)
    with core.reading(GEN, Tier.HOST) as held:
        assert bytes(held.view()) == MODEL.segment
    disk.end(remove=True)
