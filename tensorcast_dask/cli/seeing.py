"""Commands that look at a cluster while it runs."""

from __future__ import annotations

import itertools
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import click

from tensorcast_dask.cli import completing
from tensorcast_dask.cli.options import POSITIVE, Seconds, on_cluster, session
from tensorcast_dask.cli.output import console, run, show_json
from tensorcast_dask.exceptions import AbsentError

if TYPE_CHECKING:
    from tensorcast_dask.cli.screen import Frame
    from tensorcast_dask.tensors.signals import Signal

__all__ = ["story", "top", "watch"]

_FAMILIES: Final = ("node/", "link/", "artifact/", "catalog/counts")
_TRANSFERS: Final = "SELECT id, kind, node, status, done_bytes, total_bytes, seconds, via FROM transfers"
#: Rows of `top` that are no rows of a table, and its tables.
_FIXED_ROWS: Final = 8
_TABLES: Final = 3
_ROWS_UNSEEN: Final = 1000

_every = click.option(
    "-e",
    "--every",
    type=Seconds(min=0.1, max=3600),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)


@click.command()
@_every
@click.option("--once", is_flag=True, help="One picture, and no more.")
@on_cluster
def top(every: float, once: bool, scheduler: str | None, as_json: bool) -> None:
    """Show nodes, artifacts and transfers, live and full screen; Ctrl-C ends it.

    With --json, --once, or where no terminal is: one picture.
    """

    def work() -> None:
        with session(scheduler) as cast:
            if as_json:
                show_json(_look(cast, _ROWS_UNSEEN))
            elif once or not sys.stdout.isatty() or console().is_dumb_terminal:
                _print(_look(cast, _ROWS_UNSEEN))
            else:
                _live(cast, every)

    run(work)


def _look(cast: Any, rows: int) -> Frame:
    from tensorcast_dask.cli.screen import frame_of

    signals = cast.signals.snapshot(_FAMILIES, limit=10_000)
    return frame_of(signals, cast.sql(_TRANSFERS).rows, rows=rows)


def _print(frame: Frame) -> None:
    from tensorcast_dask.cli.screen import draw

    width = None if sys.stdout.isatty() else 200
    console(width=width).print(draw(frame))


def _live(cast: Any, every: float) -> None:
    from rich.live import Live

    from tensorcast_dask.cli.local import interruptible
    from tensorcast_dask.cli.screen import draw

    screen = console()

    def picture() -> Any:
        rows = max(1, (screen.size.height - _FIXED_ROWS) // _TABLES)
        return draw(_look(cast, rows))

    with (  # a signal to end leaves the terminal as it was
        interruptible(),
        Live(picture(), console=screen, screen=True, auto_refresh=False) as live,
    ):
        while True:
            time.sleep(every)
            live.update(picture(), refresh=True)


@click.command()
@click.argument("prefixes", nargs=-1, shell_complete=completing.families)
@_every
@click.option("--seconds", type=Seconds(min=0), help="When it ends; else with Ctrl-C.")
@click.option(
    "-n",
    "--count",
    type=POSITIVE,
    help="Ends after so many looks that told something; the first tells all that there is.",
)
@on_cluster
def watch(
    prefixes: tuple[str, ...],
    every: float,
    seconds: float | None,
    count: int | None,
    scheduler: str | None,
    as_json: bool,
) -> None:
    """Print signals whose names begin with PREFIXES as they change; `event/` for what happens.

    With --json each line is one JSON value.
    """

    def work() -> None:
        with (
            session(scheduler) as cast,
            cast.signals.watch(
                list(prefixes) or "", every=every, seconds=seconds
            ) as changes,
        ):
            for change in itertools.islice(changes, count):
                for one in (*change.changed.values(), *change.events):
                    _tell(one, as_json=as_json)
                for name in change.gone:
                    _tell_gone(name, as_json=as_json)
                sys.stdout.flush()

    run(work)


def _tell(one: Signal, *, as_json: bool) -> None:
    if as_json:
        show_json(one)
        return
    at = time.strftime("%H:%M:%S", time.localtime(one.as_of))
    facts = " ".join(f"{name}={value}" for name, value in one.value.items())
    stale = "" if one.fresh else " (stale)"
    click.echo(f"{at} {one.name}{stale} {facts}")


def _tell_gone(name: str, *, as_json: bool) -> None:
    if as_json:
        show_json({"name": name, "gone": True})
    else:
        click.echo(f"{time.strftime('%H:%M:%S')} {name} is away")


@click.command()
@click.argument("ref", shell_complete=completing.refs)
@on_cluster
def story(ref: str, scheduler: str | None, as_json: bool) -> None:
    """Tell what happened to REF, oldest first.

    REF is an artifact, a node, an instance, a request, `plan:KEY`, `plan:KEY/STEP` or `context:ID`:
    what the catalog remembers of it, and the events that name it.
    """

    def work() -> None:
        with session(scheduler) as cast:
            found = _story(cast, ref)
        if as_json:
            show_json([{"ago_s": ago_s, "what": what} for ago_s, what in found])
        else:
            for ago_s, what in found:
                click.echo(f"{ago_s:8.2f} s ago  {what}")

    run(work)


def _story(cast: Any, ref: str) -> list[tuple[float, str]]:
    """Give seconds ago and what, of what is remembered and of events, brought to one clock."""
    events = [
        (one.as_of, f"{one.name}: {_facts(one)}")
        for one in cast.signals.snapshot("event/", limit=10_000).events
        if ref in {str(value) for value in one.value.values()}
    ]
    try:
        lines = cast.explain(ref)
    except AbsentError:
        if not events:
            raise
        lines = []  # what is gone is remembered by its events
    now = time.time()  # noqa: TID251 - a signal says when, on this clock
    told = [(now - ago_s, what) for ago_s, what in map(_timed, lines)]
    merged = sorted([*told, *events], key=lambda one: one[0])
    return [(max(0.0, now - at), what) for at, what in merged]


def _facts(one: Signal) -> str:
    return ", ".join(f"{name} {value}" for name, value in one.value.items())


def _timed(line: str) -> tuple[float, str]:
    """Take a line of `explain` apart."""
    ago, _, what = line.partition(" s ago  ")
    return float(ago), what
