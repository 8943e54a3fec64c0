"""The catalog's orders about model files of this host: load and save.

Rules:

1. A file is opened, checked and sized before a byte is reserved.
2. Each byte is read once, straight into the segment; what fails leaves no reservation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorcast_dask.store.core import now_s
from tensorcast_dask.store.records import digest_of_index
from tensorcast_dask.store.state.replicas import Wanted
from tensorcast_dask.tensors.checksums import encode_sums
from tensorcast_dask.tensors.messages import DoLoad, DoSave, TaskDone, Tier
from tensorcast_dask.tensors.specs import Index

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.dataplane.files.model import Model
    from tensorcast_dask.store.core import Core
    from tensorcast_dask.store.jobs import Job
    from tensorcast_dask.store.movers import Movers

__all__ = ["Files"]


class Files:
    """Loads and saves of one store.

    Parameters
    ----------
    core : Core
        The state.
    movers : Movers
        Brings a replica into memory that is to be saved.
    """

    def __init__(self, core: Core, movers: Movers) -> None:
        self._core = core
        self._movers = movers

    def load(self, order: DoLoad, job: Job) -> TaskDone:
        """Read a model file into a replica; the result is the encoded index.

        Raises
        ------
        FileError, NotFound, CapacityError, DeadlineExceeded
            When that cannot be done; nothing is left of it.
        """
        from tensorcast_dask.dataplane.files.model import open_model  # noqa: PLC0415 - a store starts without it

        started_s, core = now_s(), self._core
        with open_model(order.path) as model:
            index = model.index
            encoded = index.encode()
            wanted = Wanted(
                generation=order.generation,
                id=order.id,
                version=order.version,
                nbytes=index.nbytes,
                tier=Tier.HOST,
                owner=0,
                deadline_s=job.until_s,
                labels=order.labels,
            )
            core.reserve(wanted, until_s=job.until_s)
            try:
                sums = self._fill(wanted, model, job)
                core.commit(
                    order.generation,
                    Tier.HOST,
                    index=encoded,
                    index_digest=digest_of_index(encoded),
                    sums=sums,
                )
            finally:
                core.abort(order.generation, Tier.HOST)
        return TaskDone(
            task=order.task,
            moved_bytes=index.nbytes,
            seconds=now_s() - started_s,
            via="file",
            result=encoded,
        )

    def _fill(self, wanted: Wanted, model: Model, job: Job) -> bytes:
        from tensorcast_dask.dataplane.files.reading import read_into  # noqa: PLC0415 - a store starts without it

        core = self._core
        with core.lock:
            filling = core.table.filling(wanted.generation, wanted.tier)
            held = core.hold(wanted.generation, filling.copy)
        small = core.table.tiers[Tier.HOST].in_slab(wanted.nbytes)
        fresh = filling.make_bytes and not small
        dest = core.shelf.own(filling.copy.segment).fd if fresh else held.view()
        try:
            report = read_into(model, dest, on_bytes=self._counted(job, wanted.nbytes))
        finally:
            core.release(held)
        if report.sums and report.chunk_bytes == core.settings.chunk_bytes:
            return encode_sums(report.sums)
        return b""

    def save(self, order: DoSave, job: Job) -> TaskDone:
        """Write a replica as safetensors.

        Raises
        ------
        TensorCastError
            When it is not here, or the file cannot be written; what was there stays.
        """
        from tensorcast_dask.dataplane.files.save import save  # noqa: PLC0415 - a store starts without it

        started_s, core = now_s(), self._core
        with core.reading(order.generation) as held:
            here = held.file is not None
        if not here:
            self._movers.restore(order.generation, job.until_s)
        with core.reading(order.generation, Tier.HOST) as held:
            saved = save(
                order.path,
                Index.decode(held.replica.index),
                held.view(),
                metadata=order.metadata or None,
                max_shard_bytes=order.max_shard_bytes or None,
                on_bytes=self._counted(job, held.replica.nbytes),
            )
            nbytes = held.replica.nbytes
        return TaskDone(
            task=order.task,
            moved_bytes=nbytes,
            seconds=now_s() - started_s,
            via="file",
            result="\0".join((saved.path, *saved.files)).encode(
                errors="surrogateescape"
            ),
        )

    def _counted(self, job: Job, total_bytes: int) -> Callable[[int], None]:
        counted = self._movers.counted(job, total_bytes)

        def count(nbytes: int) -> None:
            counted(nbytes)
            job.check()

        return count
