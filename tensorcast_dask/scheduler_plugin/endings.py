"""What is still done when everything ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["at_the_end"]

P = ParamSpec("P")
T = TypeVar("T")


async def at_the_end(
    function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run what blocks in a thread; here, where the interpreter starts no thread any more.

    A cluster that a program forgot to close is closed by Dask while the interpreter ends.
    """
    loop = asyncio.get_running_loop()
    try:
        waiting = loop.run_in_executor(None, lambda: function(*args, **kwargs))
    except RuntimeError:
        return function(*args, **kwargs)
    return await waiting
