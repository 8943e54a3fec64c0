"""How far an operation is, shown to whoever looks.

Rules:

1. A terminal gets a bar of `rich`, a notebook a widget of `ipywidgets`, else what `rich`
   shows there. Where standard output is neither, nothing is shown and nothing imported.
2. What is shown is what `Operation.progress()` says. It never fails the operation.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

from tensorcast_dask.exceptions import TensorCastError
from tensorcast_dask.tensors.quantities import human_bytes

if TYPE_CHECKING:
    from tensorcast_dask.tensors.messages import OperationState

__all__ = ["Meter", "meter", "watch"]

_EVERY_S: Final = 0.1


class Meter(Protocol):
    """Something that shows how far it is."""

    def show(self, done: int, total: int) -> None:
        """Show so much of so much; a total of 0 is one that is not known."""

    def close(self, status: str) -> None:
        """Show no more; what was shown stays, with the status."""


async def watch(operation: Any) -> None:
    """Show how far an operation is, until it ends."""
    core, task = operation._core, operation._task  # noqa: SLF001 - one room
    title = f"{operation.kind} {operation.ref}"
    shown = await core.in_thread(meter, title)
    if shown is None:
        return
    while True:
        with contextlib.suppress(
            TensorCastError
        ):  # the scheduler may be away for a while
            state: OperationState = await operation._state()  # noqa: SLF001
            shown.show(state.done_bytes, state.total_bytes)
        if task.done():
            break
        await asyncio.wait({task}, timeout=_EVERY_S)
    shown.close(operation.status)


def meter(title: str, *, of: str = "bytes") -> Meter | None:
    """Give what shows here how far something is, or None where nobody looks.

    Parameters
    ----------
    title : str
        What it is.
    of : {"bytes", "steps"}
        What is counted.
    """
    if _in_notebook():
        try:
            import ipywidgets
        except ImportError:
            return _Display(title, of)
        return _Widget(title, of, ipywidgets)
    return _Terminal(title, of) if sys.stdout.isatty() else None


def _in_notebook() -> bool:
    """Say whether this is the kernel of a notebook; imports nothing."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class _Terminal:
    """A line of rich in a terminal."""

    def __init__(self, title: str, of: str) -> None:
        self._title, self._bar = title, _rich(of)
        self._task = self._bar.add_task(title, total=None)
        self._start()

    def _start(self) -> None:
        self._bar.start()

    def show(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total or None)

    def close(self, status: str) -> None:
        if status != "done":
            self._bar.update(self._task, description=f"{self._title}: {status}")
        self._bar.stop()


class _Display(_Terminal):
    """The same in a notebook that has no widgets: shown again and again in its place."""

    def _start(self) -> None:
        from IPython.display import display

        self._place = display(self._bar, display_id=True)

    def show(self, done: int, total: int) -> None:
        super().show(done, total)
        self._place.update(self._bar)

    def close(self, status: str) -> None:
        super().close(status)
        self._place.update(self._bar)


def _rich(of: str) -> Any:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    figures: tuple[Any, ...] = (DownloadColumn(), TransferSpeedColumn())
    if of != "bytes":
        figures = (MofNCompleteColumn(), TextColumn(of))
    what = TextColumn("{task.description}", markup=False)
    return Progress(what, BarColumn(), *figures, TimeElapsedColumn())


class _Widget:
    """A bar and a sentence in a notebook."""

    def __init__(self, title: str, of: str, widgets: Any) -> None:
        from IPython.display import display

        self._title, self._of = title, of
        self._started_s = time.monotonic()
        self._bar = widgets.FloatProgress(min=0.0, max=1.0)
        self._text = widgets.Label(title)
        display(widgets.HBox([self._bar, self._text]))

    def show(self, done: int, total: int) -> None:
        self._bar.value = done / total if total else 0.0
        self._text.value = f"{self._title}  {self._figures(done, total)}"

    def _figures(self, done: int, total: int) -> str:
        if self._of != "bytes":
            return f"{done} of {total} {self._of}"
        rate = done / max(time.monotonic() - self._started_s, 1e-3)
        return f"{human_bytes(done)} of {human_bytes(total)}, {human_bytes(rate)}/s"

    def close(self, status: str) -> None:
        self._bar.bar_style = "success" if status == "done" else "danger"
        if status != "done":
            self._text.value += f"  {status}"
