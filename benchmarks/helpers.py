"""Other processes of a bench: they run named functions on request and keep a state.

A function is any importable one whose first parameter is the helper's own dict. The
process is spawned (not forked: threads), ends when its pipe closes, and dies with the
bench (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

__all__ = ["Helper"]

_PR_SET_PDEATHSIG = 1


class Helper:
    """One other process."""

    def __init__(self, name: str = "helper") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, os.getpid()), name=name, daemon=False
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid or 0

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Ask, without waiting for the answer."""
        self._pipe.send((function, args, kwargs))

    def result(self, within_s: float = 120.0) -> Any:
        """The answer to what was started; its exception is raised here."""
        if not self._pipe.poll(within_s):
            msg = f"no answer from a helper within {within_s} s"
            raise TimeoutError(msg)
        fine, value = self._pipe.recv()
        if not fine:
            msg = f"in a helper:\n{value}"
            raise RuntimeError(msg)
        return value

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Ask and wait."""
        self.start(function, *args, **kwargs)
        return self.result()

    def close(self) -> None:
        """Let it end; end it when it does not."""
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: Connection, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    state: dict[str, Any] = {}
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            answer = (True, function(state, *args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
    for value in list(state.values()):
        if hasattr(value, "close"):
            value.close()
