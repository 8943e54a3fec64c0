"""The disk tier against a dictionary: writes, reads, removals, damage, full disks, restarts."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tensorcast_dask.dataplane import faults
from tensorcast_dask.dataplane.files.spool import Spool, file_name
from tensorcast_dask.exceptions import (
    AlreadyExists,
    CapacityError,
    CorruptFile,
    Gone,
    NotFound,
)
from tensorcast_dask.tensors.ids import ArtifactId, Generation, Version
from tests.kit.models import Sample, sample

LIMIT_BYTES: Final = 12_000

names = st.sampled_from(["a/b", "a%2Fb", "a b", "x" * 300])
generations = st.integers(1, 12).map(Generation)
sizes = st.sampled_from([0, 1, 64, 1000, 4000])


class SpoolMachine(RuleBasedStateMachine):
    """What the tier says is what a dictionary says, whatever happens to it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.spool = Spool(self.folder, limit_bytes=LIMIT_BYTES, allow_tmpfs=True)
        #: What must be readable.
        self.held: dict[Generation, tuple[str, Sample]] = {}
        #: What was damaged behind the tier's back.
        self.damaged: set[Generation] = set()

    def teardown(self) -> None:
        self.spool.close()
        shutil.rmtree(self.folder)

    def _path(self, generation: Generation) -> Path:
        return self.folder / file_name(generation, ArtifactId(self.held[generation][0]))

    def _used_bytes(self) -> int:
        return sum(replica.file_nbytes for replica in self.spool.replicas)

    def _write(self, generation: Generation, name: str, artifact: Sample) -> None:
        self.spool.write(
            generation,
            ArtifactId(name),
            Version(1),
            index=artifact.index,
            source=memoryview(artifact.segment),
        )

    @rule(generation=generations, name=names, nbytes=sizes, seed=st.integers(0, 3))
    def write(self, generation: Generation, name: str, nbytes: int, seed: int) -> None:
        artifact = sample({"t": ("uint8", (nbytes,)), "s": ("int16", ())}, seed=seed)
        free_bytes = LIMIT_BYTES - self._used_bytes()
        refused = None
        try:
            self._write(generation, name, artifact)
        except AlreadyExists:
            assert generation in self.held
            return
        except CapacityError as error:
            refused = error.data
        if refused is not None:
            assert generation not in self.held
            assert refused["free"] == free_bytes
            assert int(refused["needed"] or 0) > free_bytes
        else:
            assert generation not in self.held
            self.held[generation] = (name, artifact)

    @rule(
        generation=generations,
        point=st.sampled_from(["spill.write", "save.before_rename"]),
    )
    def fail_to_write(self, generation: Generation, point: str) -> None:
        artifact = sample({"t": ("uint8", (100,))})
        with faults.armed(f"{point}=raise:ENOSPC"):
            try:
                self._write(generation, "a/b", artifact)
            except (AlreadyExists, CapacityError):
                return
        raise AssertionError("a full disk took the bytes")

    @rule(generation=generations)
    def read(self, generation: Generation) -> None:
        known = self.held.get(generation)
        segment = bytearray(known[1].index.nbytes if known else 0)
        try:
            self.spool.read_into(generation, memoryview(segment))
        except NotFound:
            assert known is None
        except (CorruptFile, Gone):
            assert generation in self.damaged
            self.damaged.remove(generation)
            del self.held[generation]
        else:
            assert known is not None
            assert generation not in self.damaged
            assert segment == known[1].segment

    @rule(generation=generations)
    def remove(self, generation: Generation) -> None:
        assert self.spool.remove(generation) == (generation in self.held)
        self.held.pop(generation, None)
        self.damaged.discard(generation)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), how=st.sampled_from(["flip", "cut", "unlink"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        generation = data.draw(st.sampled_from(sorted(self.held)))
        if generation in self.damaged:
            return
        path = self._path(generation)
        content = path.read_bytes()
        match how:
            case "flip":
                at = data.draw(st.integers(0, len(content) - 1))
                path.write_bytes(
                    content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :]
                )
            case "cut":
                path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
            case _:
                path.unlink()
        self.damaged.add(generation)

    @rule()
    def restart(self) -> None:
        self.spool.close()
        self.spool = Spool(self.folder, limit_bytes=LIMIT_BYTES, allow_tmpfs=True)
        found = {replica.generation for replica in self.spool.recover().replicas}
        # A file whose header or length is wrong is known for it at once.
        assert set(self.held) - self.damaged <= found <= set(self.held)
        for generation in set(self.held) - found:
            del self.held[generation]
            self.damaged.remove(generation)

    @invariant()
    def what_it_lists_is_what_it_holds(self) -> None:
        listed = {replica.generation: replica.id for replica in self.spool.replicas}
        assert listed == {g: ArtifactId(name) for g, (name, _) in self.held.items()}
        assert self.spool.booked_bytes == 0
        assert self._used_bytes() <= LIMIT_BYTES

    @invariant()
    def no_draft_is_left(self) -> None:
        assert not list(self.folder.glob(".*draft"))


# Each step syncs a disk: fewer histories than elsewhere, in proportion to the profile.
_EXAMPLES: Final = (
    max(15, settings.default.max_examples // 4) if settings.default else 15
)

TestSpool = SpoolMachine.TestCase
TestSpool.settings = settings(
    max_examples=_EXAMPLES, stateful_step_count=25, deadline=None
)
