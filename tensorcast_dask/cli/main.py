"""The `tensorcast` command: its name, its version, its commands."""

from __future__ import annotations

from typing import Final

import click

import tensorcast_dask
from tensorcast_dask.cli import artifacts, machines, moves, plans, seeing, tools

__all__ = ["main"]

_COMMANDS: Final = (
    machines.demo,
    machines.up,
    machines.down,
    machines.store,
    machines.doctor,
    artifacts.ls,
    artifacts.show,
    artifacts.put,
    artifacts.get,
    artifacts.publish,
    artifacts.alias,
    artifacts.pin,
    artifacts.unpin,
    artifacts.explain,
    artifacts.rm,
    artifacts.sql,
    artifacts.nodes,
    artifacts.instances,
    moves.cp,
    moves.mv,
    moves.drain,
    plans.plan,
    seeing.top,
    seeing.watch,
    seeing.story,
    tools.bench,
    tools.http,
    tools.debug,
    tools.completion,
)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(tensorcast_dask.__version__, prog_name="tensorcast")
def main() -> None:
    """Long-lived tensors as first-class citizens of a Dask cluster.

    Exit status: 0 done, 1 refused, 2 wrong usage, 3 not reached in time, 130 interrupted.
    """


for _command in _COMMANDS:
    main.add_command(_command)
