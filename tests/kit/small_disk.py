"""A process on a disk of 4 MiB: ``python -m tests.kit.small_disk folder``, exit code 0 when all is right."""

from __future__ import annotations

import sys
from pathlib import Path

from tensorcast_dask.dataplane.files.model import open_model
from tensorcast_dask.dataplane.files.reading import read_into
from tensorcast_dask.dataplane.files.save import save
from tensorcast_dask.dataplane.files.spool import Spool
from tensorcast_dask.exceptions import CapacityError
from tensorcast_dask.tensors.ids import ArtifactId, Generation, Version
from tests.kit.models import sample

ONE = sample({"a": ("uint8", (1 << 20,))}, seed=1)
TWO = sample({"a": ("uint8", (2 << 20,))}, seed=2)


def fill_up(folder: Path) -> None:
    """Take all the room that is left."""
    with (folder / "filler").open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def spill_until_full(folder: Path) -> None:
    """P38: every accepted replica is readable, and room that is given back is used again."""
    spool = Spool(folder, allow_tmpfs=True)

    def write(generation: int, *, filling: bool = False) -> bool:
        try:
            spool.write(
                Generation(generation),
                ArtifactId("m"),
                Version(1),
                index=ONE.index,
                source=memoryview(ONE.segment),
                on_bytes=(lambda _: fill_up(folder)) if filling else None,
            )
        except CapacityError:
            return False
        return True

    def check(generations: list[int]) -> None:
        for generation in generations:
            segment = bytearray(ONE.index.nbytes)
            spool.read_into(Generation(generation), memoryview(segment))
            assert segment == ONE.segment
        assert len(list(folder.glob("*.safetensors"))) == len(generations)
        assert not list(folder.glob(".*draft"))

    accepted = [generation for generation in range(1, 8) if write(generation)]
    assert accepted == [1, 2, 3]
    check(accepted)
    spool.remove(Generation(1))
    assert not write(8, filling=True), "somebody else took the room meanwhile"
    check([2, 3])
    (folder / "filler").unlink()
    assert write(9)
    check([2, 3, 9])
    for generation in (2, 3, 9):
        spool.remove(Generation(generation))
    spool.close()


def save_without_room(folder: Path) -> None:
    """P13: a save for which there is no room leaves the model that is there."""
    path = folder / "m.safetensors"
    save(path, TWO.index, memoryview(TWO.segment))
    for filling in (False, True):
        artifact = ONE if filling else TWO
        try:
            save(
                path,
                artifact.index,
                memoryview(artifact.segment),
                on_bytes=(lambda _: fill_up(folder)) if filling else None,
            )
        except CapacityError:
            pass
        else:
            raise AssertionError("a full disk took the bytes")
        (folder / "filler").unlink(missing_ok=True)
        with open_model(path) as model:
            segment = bytearray(model.index.nbytes)
            read_into(model, memoryview(segment))
        assert segment == TWO.segment
        assert {p.name for p in folder.iterdir()} == {path.name, ".lock"}


if __name__ == "__main__":
    spill_until_full(Path(sys.argv[1]))
    save_without_room(Path(sys.argv[1]))
