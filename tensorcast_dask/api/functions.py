"""The paper's calls as functions, on the session that is current.

Inside a Dask task that is its worker's own; elsewhere the newest open one of the process.
"""

from __future__ import annotations

from typing import Any

from tensorcast_dask.api.current import current_session

__all__ = ["artifact", "latest", "plan", "put", "register"]


def put(tensors: Any, id: str, **options: Any) -> Any:  # noqa: A002 - the field's word
    """See `Session.put`."""
    return current_session().put(tensors, id, **options)


def register(tensors: Any, id: str, **options: Any) -> Any:  # noqa: A002
    """See `Session.register`."""
    return current_session().register(tensors, id, **options)


def artifact(id: str, **options: Any) -> Any:  # noqa: A002
    """See `Session.artifact`."""
    return current_session().artifact(id, **options)


def latest(id: str, **options: Any) -> Any:  # noqa: A002
    """See `Session.latest`."""
    return current_session().latest(id, **options)


def plan(context: Any = None) -> Any:
    """See `Session.plan`."""
    return current_session().plan(context)
