"""Whom the kernel takes when memory runs out: the worker, whose work can be done again.

Rules:

1. A worker that has a store is a likelier victim than the store, by `SCORE_ADD`.
2. A store is started with the score that this process had at first, since a child inherits
   the score: also the second store of one worker. (Going back to where one began needs no
   privilege.)
"""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SCORE_ADD", "as_at_start", "prefer_this_process"]

log = logging.getLogger(__name__)

SCORE_ADD: Final = 200
_PATH: Final = Path("/proc/self/oom_score_adj")
_lock = threading.Lock()
#: The score of this process before it was raised; None while it is not.
_at_start: list[int] = []


def prefer_this_process() -> None:
    """Raise this process's score, once."""
    with _lock:
        if not _at_start and (score := _read()) is not None:
            _at_start.append(score)
            _write(min(1000, score + SCORE_ADD))


@contextlib.contextmanager
def as_at_start() -> Iterator[None]:
    """Have the score of the beginning while a child is started."""
    if not _at_start:
        yield
        return
    with _lock:
        raised = _read()
        _write(_at_start[0])
        try:
            yield
        finally:
            if raised is not None:
                _write(raised)


def _read() -> int | None:
    try:
        return int(_PATH.read_text())
    except (OSError, ValueError) as error:
        log.debug("oom_score_adj cannot be read: %s", error)
        return None


def _write(score: int) -> None:
    try:
        _PATH.write_text(str(score))
    except OSError as error:
        log.debug("oom_score_adj stays as it is: %s", error)
