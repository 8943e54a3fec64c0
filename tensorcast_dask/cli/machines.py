"""Commands that start and end something on this machine, or look at it."""

from __future__ import annotations

from pathlib import Path

import click

from tensorcast_dask.cli import options
from tensorcast_dask.cli.output import run

__all__ = ["demo", "doctor", "down", "store", "up"]

#: A store's working directory is `/`.
_FOLDER = click.Path(file_okay=False, resolve_path=True)


@click.command()
@click.option(
    "-n",
    "--workers",
    type=click.IntRange(min=1),
    help="How many nodes; default: by the number of cores.",
)
@click.option("-m", "--host-memory", help='Budget of each node, such as "1 GiB".')
@click.option(
    "--device-memory",
    help="Budget of each node on its device; see the setting `device`.",
)
@click.option("--disk", type=_FOLDER, help="Folder of the disk tier.")
@click.option(
    "-p",
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port of the scheduler; 0 = any.",
)
@click.option("-d", "--detach", is_flag=True, help="Return when it runs; see `down`.")
@options.as_json
def up(
    workers: int | None,
    host_memory: str | None,
    device_memory: str | None,
    disk: str | None,
    port: int,
    detach: bool,
    as_json: bool,
) -> None:
    """Run a cluster on this machine; print its addresses."""
    from tensorcast_dask.cli import local

    if not detach:
        run(
            lambda: local.up(
                workers=workers,
                host_memory=host_memory,
                device_memory=device_memory,
                disk=disk,
                port=port,
                as_json=as_json,
            )
        )
        return
    given = {
        "--workers": workers,
        "--host-memory": host_memory,
        "--device-memory": device_memory,
        "--disk": disk,
        "--port": port,
    }
    run(lambda: local.up_detached(given, as_json=as_json))


@click.command()
@options.as_json
def down(as_json: bool) -> None:
    """End the cluster that `up` started, and stores of it that still wait for a worker."""
    from tensorcast_dask.cli import local

    run(lambda: local.down(as_json=as_json))


@click.command()
@options.scheduler
@click.option(
    "-c",
    "--cluster",
    help="Name of the cluster, where its setting `cluster` is set; default: the scheduler's address.",
)
@click.option(
    "-m",
    "--host-memory",
    help='Budget, such as "1 GiB"; default: that of the worker that adopts it.',
)
@click.option("--disk", type=_FOLDER, help="Folder of the disk tier.")
@click.option(
    "-l",
    "--label",
    "labels",
    multiple=True,
    callback=options.pairs,
    help="key=value; default: those of the worker that adopts it.",
)
@click.option(
    "--run-dir", type=_FOLDER, help="Run directory; workers must have the same one."
)
@click.option("-d", "--detach", is_flag=True, help="Return when it is ready.")
@options.as_json
def store(
    scheduler: str | None,
    cluster: str | None,
    host_memory: str | None,
    disk: str | None,
    labels: dict[str, str],
    run_dir: str | None,
    detach: bool,
    as_json: bool,
) -> None:
    """Run a store of its own, which the next worker on this host adopts.

    It then lives outside of the worker's container or systemd unit. Ctrl-C or SIGTERM
    ends it; with --detach, `kill` of the printed pid does. While no worker has adopted it
    nothing else ends it, but `tensorcast down` where `up` started its cluster.
    """
    from tensorcast_dask.cli import stores

    run(
        lambda: stores.store(
            scheduler=scheduler,
            cluster=cluster,
            own=stores.Own(
                host_memory=host_memory, disk=disk, labels=labels, run_dir=run_dir
            ),
            detach=detach,
            as_json=as_json,
        )
    )


@click.command()
@options.as_json
def doctor(as_json: bool) -> None:
    """Say what this machine can do, and what to fix."""
    from tensorcast_dask.cli.doctor import doctor as examine

    run(lambda: examine(as_json=as_json))


@click.command()
@click.option(
    "--model",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A safetensors file.",
)
@options.as_json
def demo(model: Path | None, as_json: bool) -> None:
    """Show the main job on a real model, start to end."""
    from tensorcast_dask.cli.demo import demo as show_all

    run(lambda: show_all(model, as_json=as_json))
