"""Commands for who runs a cluster: a benchmark, a bundle for who helps, completion of the shell."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import get_completion_class

from tensorcast_dask.cli import options
from tensorcast_dask.cli.options import on_cluster, session
from tensorcast_dask.cli.output import run, show_json, show_table, success
from tensorcast_dask.exceptions import InvalidArgument
from tensorcast_dask.tensors.quantities import human_bytes

__all__ = ["bench", "completion", "debug", "http"]

_SHELLS: Final = ("bash", "zsh", "fish")
_VARIABLE: Final = "_TENSORCAST_COMPLETE"


def _size(_: click.Context, parameter: click.Parameter, text: str) -> int:
    from tensorcast_dask.tensors.quantities import parse_bytes

    try:
        nbytes = parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param=parameter) from error
    if nbytes < 1:
        message = "at least one byte"
        raise click.BadParameter(message, param=parameter)
    return nbytes


@click.command()
@click.option(
    "--size",
    callback=_size,
    default="64 MiB",
    show_default=True,
    help="Of what is put, read and copied.",
)
@click.option(
    "-r",
    "--rounds",
    type=click.IntRange(min=1, max=1000),
    default=5,
    show_default=True,
    help="How often each is measured.",
)
@on_cluster
def bench(size: int, rounds: int, scheduler: str | None, as_json: bool) -> None:
    """Measure this cluster from here, in a few seconds; medians. What it puts goes again."""

    def work() -> None:
        from tensorcast_dask.cli.bench import measure

        with session(scheduler) as cast:
            figures = list(measure(cast, nbytes=size, rounds=rounds))
        if as_json:
            show_json(figures)
            return
        show_table(
            "",
            ("what", "time", "rate", "rounds", ""),
            [
                (
                    one.what,
                    f"{one.seconds * 1e3:.2f} ms" if one.rounds else "",
                    f"{human_bytes(one.rate)}/s" if one.rate else "",
                    one.rounds or "",
                    one.note,
                )
                for one in figures
            ],
        )

    run(work)


@click.command()
@on_cluster
def http(scheduler: str | None, as_json: bool) -> None:
    """Say where HTTP is answered, and which file of this machine holds the token."""

    def work() -> None:
        with session(scheduler) as cast:
            facts = _gateways(cast)
        if as_json:
            show_json(facts)
            return
        show_table(
            "",
            ("gateway", "address"),
            [("scheduler", facts["dashboard"]), *facts["nodes"].items()],
        )
        where = facts["token_file"] or "on the host of the scheduler"
        success(f"token: {where}")

    run(work)


def _gateways(cast: Any) -> dict[str, Any]:
    from tensorcast_dask.config import Settings
    from tensorcast_dask.dataplane import bearer, hosts
    from tensorcast_dask.scheduler_plugin.installation import ABOUT_OP
    from tensorcast_dask.worker_plugin.plugin import STATE_OP

    client, settings = cast.client, Settings.read()
    about = client.sync(getattr(client.scheduler, ABOUT_OP))
    told = client.sync(client.scheduler.broadcast, msg={"op": STATE_OP})
    folder = hosts.run_directory(settings.run_dir) / hosts.cluster_name(
        about["cluster_name"]
    )
    kept = folder / bearer.FILE
    return {
        "dashboard": client.dashboard_link.removesuffix("/status") + "/tensorcast",
        "nodes": {
            worker: state["gateway"]["url"]
            for worker, state in sorted(told.items())
            if state.get("gateway", {}).get("url")
        },
        "token_file": settings.http_token_file or (str(kept) if kept.exists() else ""),
    }


@click.group()
def debug() -> None:
    """Help who helps."""


@debug.command("bundle")
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path), required=False)
@on_cluster
def _bundle(path: Path | None, scheduler: str | None, as_json: bool) -> None:
    """Write state, stories, versions and settings into one file (zip), without secrets."""
    written = path or Path(time.strftime("tensorcast-debug-%Y%m%d-%H%M%S.zip"))

    def work() -> None:
        from tensorcast_dask.cli.bundle import write

        if not written.absolute().parent.is_dir():
            message = f"there is no folder {written.absolute().parent}"
            raise InvalidArgument(message)
        with session(scheduler) as cast:
            parts = write(cast, written)
        nbytes = written.stat().st_size
        if as_json:
            show_json(
                {"path": str(written.absolute()), "parts": parts, "bytes": nbytes}
            )
        else:
            success(
                f"{written}: {len(parts)} parts, {human_bytes(nbytes)}; read it before you send it"
            )

    run(work)


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
@options.as_json
@click.pass_context
def completion(context: click.Context, shell: str, as_json: bool) -> None:
    """Print what has SHELL complete the words of this command.

    For bash: tensorcast completion bash > ~/.local/share/bash-completion/completions/tensorcast
    """
    made = get_completion_class(shell)
    assert made is not None, "completion: click knows these shells"
    root: Any = context.find_root().command
    script = made(root, {}, "tensorcast", _VARIABLE).source()
    if as_json:
        show_json({"shell": shell, "script": script})
    else:
        click.echo(script)
