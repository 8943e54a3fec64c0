"""The disk tier of this node: spilling, restoring, and what an earlier store left.

Rules:

1. The copy in memory goes only after the copy on disk is complete, synced and read back.
2. What cannot be written stays in memory; what is said to the caller is CapacityError
   (no tier has room), never an errno.
3. A file that is damaged or gone is a lost copy, told to the catalog at once; copies in
   memory have nothing to do with it. One that merely cannot be read now stays a copy.
4. What a dead store of this folder left is taken over and announced like everything else.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tensorcast_dask.dataplane.segments import MemoryFile
from tensorcast_dask.exceptions import (
    CorruptFile,
    FileChanged,
    Gone,
    Incomplete,
    TensorCastError,
)
from tensorcast_dask.store.core import now_s
from tensorcast_dask.store.media import wanted_of
from tensorcast_dask.store.records import digest_of_index
from tensorcast_dask.store.state.replicas import Life, Wanted
from tensorcast_dask.tensors.checksums import encode_sums
from tensorcast_dask.tensors.messages import Tier, Wire, decode, encode
from tensorcast_dask.tensors.specs import Index

if TYPE_CHECKING:
    from tensorcast_dask.dataplane.files.spool import Spool, Spooled
    from tensorcast_dask.store.core import Core
    from tensorcast_dask.store.state.replicas import Filling, Replica
    from tensorcast_dask.tensors.ids import ClusterId, Generation, NodeId
    from tensorcast_dask.tensors.messages import Location, StoreSettings

__all__ = ["Disk", "measured", "open_disk"]

logger = logging.getLogger(__name__)

_WRITE_S = 600.0


class _Kept(Wire, frozen=True, kw_only=True):
    """What a store wants to find again beside the bytes."""

    nbytes: int
    index: bytes
    sums: bytes = b""
    chunk_bytes: int = 0
    published: bool = False
    labels: dict[str, str]


def measured(settings: StoreSettings) -> StoreSettings:
    """Fill in how large the disk tier is where only its folder was given.

    It is the file system's size: what others use of it is seen at each write.
    """
    if not settings.disk_dir or settings.disk_bytes:
        return settings
    folder = Path(settings.disk_dir)
    while not folder.exists():
        folder = folder.parent
    system = os.statvfs(folder)
    return msgspec.structs.replace(
        settings, disk_bytes=system.f_frsize * system.f_blocks
    )


def open_disk(
    core: Core, settings: StoreSettings, node: NodeId, *, cluster: ClusterId
) -> Disk | None:
    """Open the disk tier that the settings name, and take over what lies there.

    Each cluster has a folder of its own: its generations mean nothing in another.

    Raises
    ------
    InvalidArgument
        When the folder cannot be one.
    """
    if Tier.DISK not in core.table.tiers:
        return None
    from tensorcast_dask.dataplane.files.spool import Spool  # noqa: PLC0415 - a store starts without it

    spool = Spool.claim(
        Path(settings.disk_dir) / settings.cluster_name,
        name=node,
        owner=cluster,
        limit_bytes=settings.disk_bytes,
        allow_tmpfs=settings.disk_dir_allow_tmpfs,
        direct=None if settings.disk_direct else False,
    )
    disk = Disk(core, spool)
    disk.recover()
    return disk


class Disk:
    """The disk tier of one store.

    Parameters
    ----------
    core : Core
        The state; this object carries its spills out.
    spool : Spool
        The folder.
    """

    def __init__(self, core: Core, spool: Spool) -> None:
        self._core = core
        self._spool = spool
        self._lock = threading.Lock()
        #: Which generation a segment number of the disk tier is.
        self._generations: dict[int, Generation] = {}
        core.room.media[Tier.DISK] = self

    def recover(self) -> None:
        """Enter what the folder held into the table."""
        found = self._spool.recover()
        for path in found.set_aside:
            logger.warning("damaged, set aside: %s", path)
        for spooled in found.replicas:
            try:
                self._enter(spooled)
            except TensorCastError as error:
                logger.warning("not taken over: %s (%s)", spooled.path, error)

    def _enter(self, spooled: Spooled) -> None:
        kept = decode(spooled.record, _Kept)
        core = self._core
        wanted = Wanted(
            generation=spooled.generation,
            id=spooled.id,
            version=spooled.version,
            nbytes=kept.nbytes,
            tier=Tier.DISK,
            owner=0,
            deadline_s=now_s(),
            labels=kept.labels,
            published=kept.published,
        )
        core.reserve(wanted, until_s=now_s())
        core.commit(
            spooled.generation,
            Tier.DISK,
            index=kept.index,
            index_digest=digest_of_index(kept.index),
            sums=kept.sums,
            cut_bytes=kept.chunk_bytes,
        )

    # -------------------------------------------------------------- to disk
    def make(self, wanted: Wanted, filling: Filling, *, until_s: float) -> None:  # noqa: ARG002 - a medium's
        """Note whose file a segment number is; files are made as they are written."""
        with self._lock:
            self._generations[filling.copy.segment] = wanted.generation

    def save(self, generation: Generation, *, until_s: float) -> int:  # noqa: ARG002 - a medium's
        """Put a copy of a replica in memory on the disk; one that is there is fine.

        Raises
        ------
        CapacityError
            When the disk has no room.
        NotFound, Gone
            When it is not in memory (any more).
        Incomplete
            When the copy on the disk is not complete, or is being dropped.
        """
        core = self._core
        with core.reading(generation, Tier.HOST) as held:
            replica = held.replica
            there = replica.copy(Tier.DISK)
            if there is not None and there.life is Life.COMMITTED:
                return replica.nbytes
            if there is not None:  # not yet, or not for long: memory must not go for it
                message = (
                    f"generation {generation} is being written to, or dropped from, the "
                    "disk; try again in a moment"
                )
                raise Incomplete(message)
            filling = core.reserve(
                wanted_of(replica, Tier.DISK, now_s() + _WRITE_S), until_s=now_s()
            )
            # A lease on it, so that a drop meanwhile finds the file that is being written.
            target = core.hold(generation, filling.copy)
            try:
                self._spool.write(
                    generation,
                    replica.id,
                    replica.version,
                    index=Index.decode(replica.index),
                    source=held.view(),
                    record=encode(self._kept(replica)),
                )
                core.commit(
                    generation,
                    Tier.DISK,
                    index=replica.index,
                    index_digest=replica.index_digest,
                )
            finally:
                core.abort(generation, Tier.DISK)
                core.release(target)
            return replica.nbytes

    def _kept(self, replica: Replica) -> _Kept:
        return _Kept(
            nbytes=replica.nbytes,
            index=replica.index,
            sums=replica.sums,
            chunk_bytes=self._core.settings.chunk_bytes,
            published=replica.published,
            labels=replica.labels,
        )

    # -------------------------------------------------------------- from disk
    def restore(self, generation: Generation, *, until_s: float) -> int:
        """Bring a replica back into memory, verified; its length.

        Raises
        ------
        CorruptFile, Gone
            When the file is not what it was; that copy is given up.
        CapacityError
            When memory has no room.
        """
        core = self._core
        with core.reading(generation, Tier.DISK) as held:
            replica = held.replica
            filling = core.reserve(
                wanted_of(replica, Tier.HOST, until_s), until_s=until_s
            )
            target = core.hold(generation, filling.copy)
            try:
                report = self._spool.read_into(generation, target.view())
                sums = b""
                if report.sums and report.chunk_bytes == core.settings.chunk_bytes:
                    sums = encode_sums(report.sums)
                core.commit(
                    generation,
                    Tier.HOST,
                    index=replica.index,
                    index_digest=replica.index_digest,
                    sums=replica.sums or sums,
                )
            except (CorruptFile, FileChanged, Gone) as error:
                core.drop(generation, Tier.DISK, why=f"its file is lost: {error}")
                raise
            finally:
                core.release(target)
                core.abort(generation, Tier.HOST)
        return replica.nbytes

    def landing(self, wanted: Wanted) -> None:
        """Leave it to host memory, where sums and index come together."""

    def nearby(self, wanted: Wanted, location: Location, **_: object) -> None:
        """Leave it to host memory."""

    def transient(self, generation: Generation) -> MemoryFile:
        """Read a replica into memory of nobody's tier: for one reader, closed after it.

        Raises
        ------
        CorruptFile, Gone, NotFound
            When the file is not what it was.
        """
        with self._core.reading(generation, Tier.DISK) as held:
            file = MemoryFile(held.replica.nbytes, name="tensorcast-read")
            try:
                self._spool.read_into(generation, file.map_shared().view)
            except (CorruptFile, FileChanged, Gone) as error:
                self._core.drop(generation, Tier.DISK, why=f"its file is lost: {error}")
                file.close()
                raise
            except BaseException:
                file.close()
                raise
            return file

    def sums(self, generation: Generation) -> bytes:  # noqa: ARG002 - a medium's
        """Give none: a file has its own, which its restore checks."""
        return b""

    # -------------------------------------------------------------- end
    def keeps(self, segment: int) -> bool:  # noqa: ARG002 - a medium's
        """Keep no file that no replica has."""
        return False

    def close(self, segment: int) -> None:
        """Remove the file behind a segment number."""
        with self._lock:
            generation = self._generations.pop(segment, None)
        if generation is None:
            return
        try:
            self._spool.remove(generation)
        except TensorCastError as error:
            logger.warning("a file of generation %d stays: %s", generation, error)

    def end(self, *, remove: bool) -> None:
        """Give the folder up; with `remove` nothing is left in it."""
        if remove:
            for spooled in self._spool.replicas:
                self._spool.remove(spooled.generation)
        self._spool.close()
        if remove:
            _remove_folder(self._spool)


def _remove_folder(spool: Spool) -> None:
    try:
        for path in spool.folder.iterdir():
            path.unlink()
        spool.folder.rmdir()
    except OSError as error:
        logger.info("%s stays: %s", spool.folder, error)
