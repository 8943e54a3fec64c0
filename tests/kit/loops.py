"""Tests that are coroutines, each on an event loop of its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

__all__ = ["on_loop"]

P = ParamSpec("P")


def on_loop(
    test: Callable[P, Coroutine[Any, Any, None]],
) -> Callable[P, None]:
    """Run a coroutine function as a test; the bound is for hangs."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(200):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run
