"""What a plugin travels in, so that a worker without this package lives on without us.

Dask unpickles a plugin where nothing catches an error: a worker that cannot import this
package would not start at all. So the *text* of this file travels beside the pickled plugin, and
`open_capsule` is compiled and run where it arrives.

Rule: nothing here imports this package, and nothing here raises.
"""

from __future__ import annotations

import logging
import pickle
from typing import Any

from distributed.diagnostics import plugin as of_dask

__all__ = ["open_capsule"]

TOPIC = "tensorcast"
log = logging.getLogger("tensorcast_dask")


def open_capsule(inner: bytes, *, name: str, worker: bool) -> Any:  # noqa: ANN401
    """Unpickle a plugin; where that fails give one that only says why."""
    try:
        return pickle.loads(inner)  # noqa: S301  (a scheduler may run code anyway)
    except Exception as error:  # noqa: BLE001  (the rule)
        why = f"{type(error).__name__}: {error}"
    return _absent(name, why, worker=worker)


def _absent(name: str, why: str, *, worker: bool) -> Any:  # noqa: ANN401
    plugin = _AbsentFromWorker() if worker else _AbsentFromNanny()
    plugin.name, plugin.failure = name, why
    return plugin


def _report(server: Any, why: str) -> None:  # noqa: ANN401
    log.warning("%s gets no node: %s; install tensorcast_dask there", server, why)
    server.log_event(
        TOPIC,
        {
            "topic": "worker_failed",
            "worker": getattr(server, "address", ""),
            "why": why,
        },
    )


class _AbsentFromWorker(of_dask.WorkerPlugin):
    """In place of the plugin of a worker that cannot have it."""

    name = ""
    failure = ""

    def setup(self, worker: Any) -> None:  # noqa: ANN401
        """Say why."""
        _report(worker, self.failure)


class _AbsentFromNanny(of_dask.NannyPlugin):
    """In place of the plugin of a nanny that cannot have it."""

    name = ""
    failure = ""
    restart = False

    def setup(self, nanny: Any) -> None:  # noqa: ANN401
        """Leave the saying to the worker's plugin."""
