"""The processes in which policies run, as the scheduler sees them.

Rules:

1. Nothing here waits on the event loop, and nothing here decides: what a process says, and that
   it ended, is told to the catalog.
2. A process that is to end is killed: a policy may be in a loop that hears nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.scheduler_plugin.policy_process import LENGTH, Answered, Question
from tensorcast_dask.scheduler_plugin.state.events import (
    PolicyBroke,
    PolicyDecided,
    PolicyLoaded,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.scheduler_plugin.state.events import (
        AskPolicy,
        Event,
        StartPolicy,
    )

__all__ = ["PolicyProcesses"]

log = logging.getLogger(__name__)

_MODULE: Final = "tensorcast_dask.scheduler_plugin.policy_process"
_MAX_ANSWER_BYTES: Final = 64 << 20


class PolicyProcesses:
    """All of them.

    Parameters
    ----------
    tell : callable
        Hands an event to the catalog.
    """

    def __init__(self, tell: Callable[[Event], None]) -> None:
        self._tell = tell
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._lives: dict[int, asyncio.Task[None]] = {}

    def start(self, what: StartPolicy) -> None:
        """Start one, and hand it its policy."""
        task = asyncio.ensure_future(self._live(what))
        self._lives[what.life] = task
        task.add_done_callback(lambda _: self._lives.pop(what.life, None))

    def ask(self, what: AskPolicy) -> None:
        """Hand it a question."""
        process = self._processes.get(what.life)
        if process is not None:
            question = Question(number=what.number, view=what.view, wanted=what.wanted)
            self._send(process, question)

    def end(self, life: int) -> None:
        """Kill one (rule 2)."""
        task = self._lives.get(life)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Kill all."""
        tasks = list(self._lives.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _live(self, what: StartPolicy) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                _MODULE,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=_environment(),
            )
        except OSError as error:
            why = f"its process could not be started: {error}"
            self._tell(PolicyBroke(life=what.life, why=why))
            return
        self._processes[what.life] = process
        try:
            self._send(process, Question(blob=what.blob))
            await self._listen(what.life, process)
        finally:
            del self._processes[what.life]
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        why = f"its process ended with status {process.returncode}"
        self._tell(PolicyBroke(life=what.life, why=why))

    async def _listen(self, life: int, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None, "policies: a process without its pipe"
        decoder = msgspec.msgpack.Decoder(Answered)
        with contextlib.suppress(asyncio.IncompleteReadError, msgspec.DecodeError):
            while True:
                head = await process.stdout.readexactly(LENGTH.size)
                (length,) = LENGTH.unpack(head)
                if length > _MAX_ANSWER_BYTES:
                    return
                answer = decoder.decode(await process.stdout.readexactly(length))
                if answer.error:
                    self._tell(PolicyBroke(life=life, why=f"it failed: {answer.error}"))
                elif answer.decided is not None:
                    self._tell(
                        PolicyDecided(
                            life=life, number=answer.number, decided=answer.decided
                        )
                    )
                else:
                    self._tell(PolicyLoaded(life=life))

    @staticmethod
    def _send(process: asyncio.subprocess.Process, question: Question) -> None:
        raw = msgspec.msgpack.encode(question)
        if process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(LENGTH.pack(len(raw)) + raw)


def _environment() -> dict[str, str]:
    """Let the process import what the scheduler imports."""
    package = str(Path(__file__).resolve().parents[2])
    known = [package, *(path for path in sys.path if path and path != package)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(known)}
