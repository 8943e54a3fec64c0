"""Tells our numbers where Dask tells its own: `/metrics` of scheduler and workers.

Rules:

1. Dask's endpoints show the default registry of `prometheus_client`; without that package
   nothing is told, and Dask says so there.
2. A registry takes a name once, and a process may run several schedulers and workers: one
   collector of each kind tells of all of them, told apart by one more label. A scheduler that
   is alone in its process needs none: whoever scrapes names the source, and each label costs.
3. What belongs to an event loop is read in its thread only: a scrape of a server of another
   loop leaves it out.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from tensorcast_dask.metrics.families import (
    FAMILIES,
    OF_WORKERS,
    Family,
    Samples,
    of_worker,
    samples,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from distributed import Scheduler, Worker
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    from tensorcast_dask.scheduler_plugin.state.catalog import Catalog

__all__ = ["tell", "tell_of_worker"]

#: Gives what tells it apart and the samples; None while there is nothing to tell.
_Read: TypeAlias = "Callable[[], tuple[str, dict[str, Samples]] | None]"


class _Subject(NamedTuple):
    """Who is told of."""

    thread: int
    read: _Read


class _Collector:
    """Tells of every scheduler, or of every worker, of this process (rule 2)."""

    def __init__(
        self, apart: str, families: tuple[Family, ...], *, always: bool
    ) -> None:
        self._apart = apart
        self._families = families
        self._always = always
        self._lock = threading.Lock()
        self._subjects: list[_Subject] = []

    def add(self, read: _Read) -> Callable[[], None]:
        """Tell of one more, in its thread; what is returned ends that."""
        try:
            from prometheus_client import REGISTRY  # noqa: PLC0415  # optional
        except ModuleNotFoundError:
            return _nothing
        subject = _Subject(threading.get_ident(), read)
        with self._lock:
            self._subjects.append(subject)
            if len(self._subjects) == 1:
                REGISTRY.register(self)

        def remove() -> None:
            with self._lock:
                if subject in self._subjects:
                    self._subjects.remove(subject)
                    if not self._subjects:
                        REGISTRY.unregister(self)

        return remove

    def describe(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Say which names are taken."""
        return (self._made(family, ()) for family in self._families)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Read all of this thread (rule 3)."""
        here = threading.get_ident()
        subjects = tuple(one for one in self._subjects if one.thread == here)
        told = [each for one in subjects if (each := one.read())]
        apart = self._always or len(told) > 1
        for family in self._families:
            more = apart and self._apart not in family.labels
            made = self._made(family, (self._apart,) if more else ())
            for name, found in told:
                first = (name,) if more else ()
                for labels, value in found[family.name]:
                    made.add_metric((*first, *labels), value)
            yield made

    def _made(
        self, family: Family, first: tuple[str, ...]
    ) -> GaugeMetricFamily | CounterMetricFamily:
        from prometheus_client import core  # noqa: PLC0415  # optional

        counts = family.kind == "counter"
        kind = core.CounterMetricFamily if counts else core.GaugeMetricFamily
        return kind(family.name, family.help, labels=(*first, *family.labels))


_OF_SCHEDULERS: Final = _Collector("cluster", FAMILIES, always=False)
_OF_WORKERS: Final = _Collector("worker", OF_WORKERS, always=True)


def tell(
    scheduler: Scheduler,  # noqa: ARG001  # as all that shows a catalog
    catalog: Callable[[], Catalog | None],
) -> Callable[[], None]:
    """Tell of a scheduler's catalog on its `/metrics`; what is returned ends that.

    Parameters
    ----------
    scheduler : Scheduler
        Dask's; this is its thread.
    catalog : callable
        Gives the catalog, None while there is none.
    """

    def read() -> tuple[str, dict[str, Samples]] | None:
        found = catalog()
        return None if found is None else (found.cluster, samples(found))

    return _OF_SCHEDULERS.add(read)


def tell_of_worker(
    worker: Worker, describe: Callable[[], Mapping[str, Any]]
) -> Callable[[], None]:
    """Tell of a worker's store on its `/metrics`; what is returned ends that.

    Parameters
    ----------
    worker : Worker
        Dask's; this is its thread.
    describe : callable
        Says how the store stands, as `Keeper.describe`.
    """
    return _OF_WORKERS.add(lambda: (str(worker.name), of_worker(describe())))


def _nothing() -> None:
    """Nothing was told."""
