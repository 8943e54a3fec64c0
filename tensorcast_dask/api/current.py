"""Which session a call means that names none.

Rules:

1. Inside a Dask task: the session of the task's own worker, made at first use.
2. Elsewhere: the newest session of this process that is open.
3. After a fork there is none: sessions belong to the process that made them.
"""

from __future__ import annotations

import os
import threading
from importlib import import_module
from typing import Any, Final

from tensorcast_dask.exceptions import CatalogUnavailable, UnsupportedPlatform

__all__ = ["NOT_FORKED", "current_session", "forget", "remember"]

NOT_FORKED: Final = (
    "sessions do not survive fork; start processes with spawn and connect there"
)

_open: list[Any] = []
_lock = threading.Lock()
_pid = os.getpid()


def remember(session: Any) -> None:
    """Remember that a session was opened by this process."""
    global _pid  # noqa: PLW0603 - the one place that knows which process it is
    with _lock:
        if _pid != os.getpid():
            _pid = os.getpid()
            _open.clear()
        _open.append(session)


def forget(session: Any) -> None:
    """Note that a session was closed."""
    with _lock:
        if session in _open:
            _open.remove(session)


def current_session(*, instead_of: Any = None) -> Any:
    """Return the session that a bare call means.

    Parameters
    ----------
    instead_of : Session, optional
        The closed one of the handle that asks, for the message.

    Raises
    ------
    CatalogUnavailable
        When there is none.
    UnsupportedPlatform
        In a forked child.
    """
    # A handle that was unpickled in a task finds its session through here, and sessions make
    # handles: the one circle of this room, closed when it is run and not when it is imported.
    inside = import_module("tensorcast_dask.api.connect").session_of_task()
    if inside is not None:
        return inside
    if _open and _pid != os.getpid():
        raise UnsupportedPlatform(NOT_FORKED)
    if not _open:
        message = (
            "there is no session; call tensorcast_dask.connect(...) first"
            if instead_of is None
            else "the session of this artifact was closed, and none is open here; "
            "connect again: the artifact may be in the cluster still"
        )
        raise CatalogUnavailable(message)
    return _open[-1]
