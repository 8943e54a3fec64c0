"""What commands take, and the session that most of them open."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import click

from tensorcast_dask.cli import completing

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "POSITIVE",
    "Seconds",
    "as_json",
    "of_artifact",
    "of_version",
    "on_cluster",
    "pairs",
    "scheduler",
    "session",
]

#: A whole number from 1 on.
POSITIVE: Final = click.IntRange(min=1)

_OPEN_S: Final = 10.0


class Seconds(click.FloatRange):
    """Seconds; NaN, which is in every range for click, is none."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read them."""
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value!r} is no number of seconds", param, ctx)
        return seconds


as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON for programs."
)

of_version = click.option(
    "-v",
    "--version",
    type=POSITIVE,
    shell_complete=completing.versions,
    help="That version.",
)

#: The argument that names an artifact.
of_artifact = click.argument("id_", metavar="ID", shell_complete=completing.ids)

scheduler = click.option(
    "-s",
    "--scheduler",
    envvar=["TENSORCAST_SCHEDULER", "DASK_SCHEDULER_ADDRESS"],
    help="Scheduler address; default: the one that `tensorcast up` started.",
)


def on_cluster(function: Callable[..., None]) -> Callable[..., None]:
    """Options that every command on a running cluster takes."""
    return scheduler(as_json(function))


def session(address: str | None) -> Any:
    """Open a session with the cluster that is named, or that `tensorcast up` started.

    Raises
    ------
    click.UsageError
        When there is neither.
    """
    from tensorcast_dask.cli.local import running_address

    address = address or running_address()
    if address is None:
        message = (
            "no cluster is named: give --scheduler, or start one with `tensorcast up`"
        )
        raise click.UsageError(message)
    from tensorcast_dask.api.connect import connect  # takes a second: only when needed

    return connect(address, deadline=_OPEN_S)


def pairs(
    context: click.Context,  # noqa: ARG001 - click calls it so
    parameter: click.Parameter,  # noqa: ARG001
    labels: tuple[str, ...],
) -> dict[str, str]:
    """Read `key=value` words.

    Raises
    ------
    click.BadParameter
        When one is not of that form.
    """
    found = {}
    for label in labels:
        key, equals, value = label.partition("=")
        if not (key and equals):
            message = f"{label!r} is not key=value"
            raise click.BadParameter(message)
        found[key] = value
    return found
