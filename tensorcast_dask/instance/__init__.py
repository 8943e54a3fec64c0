"""What runs inside an engine, a trainer or any process that attaches to a node of its host.

`attach` makes the process an instance of a node: it can be called by name, lends its tensors
without a copy, takes weights in place, and is listed in `cast.instances()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorcast_dask.instance.attachment import Instance as Instance
    from tensorcast_dask.instance.attachment import attach as attach
    from tensorcast_dask.instance.engine import Engine as Engine

__all__ = ["Engine", "Instance", "attach"]

_HOMES = {"Engine": "engine", "Instance": "attachment", "attach": "attachment"}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    from importlib import import_module  # noqa: PLC0415

    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
