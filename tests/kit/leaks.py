"""What a test left behind in its own process: children, descriptors, threads.

Rules:

1. Only what appeared during the test counts; what was there before is not its own.
2. A kernel or a library may need a moment to let go, so an absence is waited for.
3. A process that detached itself is found all the same: whatever is started during the
   block inherits a mark in its environment.
4. multiprocessing's own helpers live as long as this process and are nobody's leak.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

from tests.kit.eventually import eventually

__all__ = ["Footprint", "no_leaks"]


_MARK = "TENSORCAST_TESTS_LEAK_MARK"
_NUMBERS = itertools.count()
_HELPERS = re.compile(r"multiprocessing\.(resource_tracker|forkserver)").search


@dataclass(frozen=True, slots=True)
class Footprint:
    """Processes, descriptors and threads of this process at one instant."""

    children: dict[int, str] = field(default_factory=dict)
    descriptors: dict[int, str] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)

    @classmethod
    def now(cls, *, mark: str = "") -> Footprint:
        """Read the present footprint, with all processes that carry `mark`."""
        children: dict[int, str] = {}
        for child in [*psutil.Process().children(recursive=True), *_marked(mark)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                command = " ".join(child.cmdline()[:6])
                if child.status() != psutil.STATUS_ZOMBIE and not _HELPERS(command):
                    children[child.pid] = command
        descriptors: dict[int, str] = {}
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(entry.readlink())
                # Reading the folder opens it: its own descriptor is no leak.
                if "/fd" not in target:
                    descriptors[int(entry.name)] = target
        threads = {t.ident or 0: t.name for t in threading.enumerate()}
        return cls(children=children, descriptors=descriptors, threads=threads)

    def since(self, before: Footprint, *, threads: bool) -> list[str]:
        """Say what is here and was not before."""
        pairs = [
            ("process", self.children, before.children),
            ("descriptor", self.descriptors, before.descriptors),
        ]
        if threads:
            pairs.append(("thread", self.threads, before.threads))
        return [
            f"{what} {key}: {name}"
            for what, new, old in pairs
            for key, name in new.items()
            if old.get(key) != name
        ]


def _marked(mark: str) -> Iterator[psutil.Process]:
    if not mark:
        return
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == mark and process.pid != os.getpid():
                yield process


@contextlib.contextmanager
def no_leaks(
    *, within_s: float = 10.0, threads: bool = False, descriptors: int = 0
) -> Iterator[None]:
    """Fail when the block leaves processes or descriptors of its own behind.

    Parameters
    ----------
    within_s : float
        The longest time to wait for them to go.
    threads : bool
        Count threads too.
    descriptors : int
        How many new descriptors are no leak (a library's pool opened once).
    """
    resource_tracker.ensure_running()
    mark = f"{os.getpid()}-{next(_NUMBERS)}"
    before = Footprint.now()
    outer = os.environ.get(_MARK)
    os.environ[_MARK] = mark
    try:
        yield
    finally:
        if outer is None:
            del os.environ[_MARK]
        else:
            os.environ[_MARK] = outer

    def left() -> list[str]:
        found = Footprint.now(mark=mark).since(before, threads=threads)
        spare = descriptors
        kept: list[str] = []
        for line in found:
            if line.startswith("descriptor") and spare:
                spare -= 1
            else:
                kept.append(line)
        return kept

    def nothing_left() -> bool:
        found = left()
        assert not found, found
        return True

    eventually(nothing_left, within_s=within_s, what="the test's leftovers are gone")
