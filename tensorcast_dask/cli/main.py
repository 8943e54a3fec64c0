"""Commands on a running cluster, and those that start one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import tensorcast_dask
from tensorcast_dask.cli.output import human_bytes, run, show_json, show_table, success
from tensorcast_dask.exceptions import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "demo",
    "doctor",
    "down",
    "get",
    "ls",
    "main",
    "nodes",
    "put",
    "rm",
    "show",
    "sql",
    "up",
]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(tensorcast_dask.__version__, prog_name="tensorcast")
def main() -> None:
    """Long-lived tensors as first-class citizens of a Dask cluster."""


def _on_cluster(function: Callable[..., None]) -> Callable[..., None]:
    """Options that every command on a running cluster takes."""
    function = click.option(
        "--json", "as_json", is_flag=True, help="Print JSON for programs."
    )(function)
    return click.option(
        "-s",
        "--scheduler",
        envvar=["TENSORCAST_SCHEDULER", "DASK_SCHEDULER_ADDRESS"],
        help="Scheduler address; default: the one that `tensorcast up` started.",
    )(function)


def _session(scheduler: str | None) -> Any:
    from tensorcast_dask.api.connecting import connect
    from tensorcast_dask.cli.local import running_address

    address = scheduler or running_address()
    if address is None:
        message = (
            "no cluster is named: give --scheduler, or start one with `tensorcast up`"
        )
        raise InvalidArgument(message)
    return connect(address, deadline=10.0)


@main.command()
@click.argument("prefix", default="")
@click.option(
    "-l", "--label", "labels", multiple=True, help="key=value that it must carry."
)
@click.option(
    "-a", "--all-versions", is_flag=True, help="Every version, not the newest."
)
@_on_cluster
def ls(
    prefix: str,
    labels: tuple[str, ...],
    all_versions: bool,
    scheduler: str | None,
    as_json: bool,
) -> None:
    """List artifacts whose id begins with PREFIX."""

    def work() -> None:
        with _session(scheduler) as cast:
            found = cast.list(prefix, labels=_pairs(labels), all_versions=all_versions)
            if as_json:
                show_json([artifact.info for artifact in found])
                return
            show_table(
                "",
                ("id", "version", "stage", "owner", "tensors", "bytes", "labels"),
                (
                    (
                        a.id,
                        a.version,
                        a.info.stage,
                        a.owner,
                        a.info.tensors,
                        human_bytes(a.nbytes),
                        " ".join(f"{k}={v}" for k, v in a.labels.items()),
                    )
                    for a in found
                ),
            )

    run(work)


@main.command()
@click.argument("id_")
@click.option("-v", "--version", type=int, help="That version.")
@_on_cluster
def show(id_: str, version: int | None, scheduler: str | None, as_json: bool) -> None:
    """Show one artifact: its tensors, and where its replicas are."""

    def work() -> None:
        with _session(scheduler) as cast:
            artifact = cast.artifact(id_, version=version)
            places = artifact.locations()
            meta = artifact.tensor_meta()
            if as_json:
                tensors = [
                    {
                        "name": s.name,
                        "dtype": s.dtype.name,
                        "shape": s.shape,
                        "bytes": s.nbytes,
                    }
                    for s in meta.values()
                ]
                show_json(
                    {"artifact": artifact.info, "replicas": places, "tensors": tensors}
                )
                return
            click.echo(repr(artifact))
            show_table(
                "replicas",
                ("node", "tier", "host", "worker"),
                (
                    (p.card.name or p.card.node, p.tier, p.card.host, p.card.worker)
                    for p in places
                ),
            )
            show_table(
                "tensors",
                ("name", "dtype", "shape", "bytes"),
                (
                    (s.name, s.dtype.name, list(s.shape), human_bytes(s.nbytes))
                    for s in meta.values()
                ),
            )

    run(work)


@main.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.argument("id_")
@click.option("-l", "--label", "labels", multiple=True, help="key=value to find it by.")
@click.option(
    "-r", "--replicas", default=1, show_default=True, help="On how many hosts."
)
@click.option(
    "--next", "next_version", is_flag=True, help="As the next version of the id."
)
@click.option("--publish", is_flag=True, help="Make it visible to `latest`.")
@_on_cluster
def put(
    path: Path,
    id_: str,
    labels: tuple[str, ...],
    replicas: int,
    next_version: bool,
    publish: bool,
    scheduler: str | None,
    as_json: bool,
) -> None:
    """Import a safetensors file, directory or index as artifact ID."""

    def work() -> None:
        with _session(scheduler) as cast:
            artifact = cast.load(
                path,
                id_,
                labels=_pairs(labels),
                replicas=replicas,
                version="next" if next_version else None,
            ).result()
            if publish:
                artifact.publish()
            if as_json:
                show_json(artifact.info)
            else:
                success(f"{artifact!r}")

    run(work)


@main.command()
@click.argument("id_")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("-v", "--version", type=int, help="That version.")
@click.option("--max-shard", default=0, help="Bytes of a shard; 0 = one file.")
@_on_cluster
def get(
    id_: str,
    path: Path,
    version: int | None,
    max_shard: int,
    scheduler: str | None,
    as_json: bool,
) -> None:
    """Write an artifact as safetensors (on a holder's host)."""

    def work() -> None:
        with _session(scheduler) as cast:
            artifact = cast.artifact(id_, version=version)
            artifact.save(str(path), max_shard_bytes=max_shard)
            if as_json:
                show_json({"path": str(path.absolute()), "artifact": artifact.info})
            else:
                success(f"{path}: {human_bytes(artifact.nbytes)}")

    run(work)


@main.command()
@click.argument("id_")
@click.option("-v", "--version", type=int, help="Only that version.")
@_on_cluster
def rm(id_: str, version: int | None, scheduler: str | None, as_json: bool) -> None:
    """Destroy an artifact, all versions unless one is named."""

    def work() -> None:
        with _session(scheduler) as cast:
            what = id_ if version is None else cast.artifact(id_, version=version)
            ended = cast.destroy(what).result()
            if as_json:
                show_json(ended)
            else:
                success(f"{id_}: {len(ended.versions)} versions ended")

    run(work)


@main.command()
@click.argument("query")
@_on_cluster
def sql(query: str, scheduler: str | None, as_json: bool) -> None:
    """Run one SELECT over the catalog.

    Tables: artifacts, versions, replicas, nodes, leases, pins, operations, transfers, events.
    """

    def work() -> None:
        with _session(scheduler) as cast:
            found = cast.sql(query)
            if as_json:
                show_json(
                    [dict(zip(found.columns, row, strict=True)) for row in found.rows]
                )
            else:
                show_table("", found.columns, found.rows)

    run(work)


@main.command()
@_on_cluster
def nodes(scheduler: str | None, as_json: bool) -> None:
    """List nodes and what their tiers hold."""

    def work() -> None:
        with _session(scheduler) as cast:
            states = cast.nodes()
            if as_json:
                show_json(states)
                return
            rows = [
                (
                    state.card.name or state.card.node[:8],
                    "yes" if state.attended else "no",
                    tier,
                    human_bytes(use.used_bytes),
                    human_bytes(use.capacity_bytes),
                    use.replicas,
                )
                for state in states
                for tier, use in state.uses.items()
            ]
            columns = ("node", "worker alive", "tier", "used", "capacity", "replicas")
            show_table("", columns, rows)

    run(work)


@main.command()
@click.option("-n", "--workers", type=int, help="How many nodes; default: one a core.")
@click.option("-m", "--host-memory", help='Budget of each node, such as "1 GiB".')
@click.option("--disk", help="Folder of the disk tier.")
@click.option("-p", "--port", default=0, help="Port of the scheduler; 0 = any.")
@click.option("-d", "--detach", is_flag=True, help="Return when it runs; see `down`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def up(
    workers: int | None,
    host_memory: str | None,
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
                disk=disk,
                port=port,
                as_json=as_json,
            )
        )
        return
    given = {
        "--workers": workers,
        "--host-memory": host_memory,
        "--disk": disk,
        "--port": port,
    }
    arguments = [
        part for k, v in given.items() if v is not None for part in (k, str(v))
    ]
    run(lambda: local.up_detached(arguments, as_json=as_json))


@main.command()
def down() -> None:
    """End the cluster that `up` started."""
    from tensorcast_dask.cli import local

    run(local.down)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def doctor(as_json: bool) -> None:
    """Say what this machine can do, and what to fix."""
    from tensorcast_dask.cli.doctor import doctor as examine

    run(lambda: examine(as_json=as_json))


@main.command()
@click.option(
    "--model", type=click.Path(exists=True, path_type=Path), help="A safetensors file."
)
def demo(model: Path | None) -> None:
    """Show the main job on a real model, start to end."""
    from tensorcast_dask.cli.demo import demo as show_all

    run(lambda: show_all(model))


def _pairs(labels: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for label in labels:
        key, equals, value = label.partition("=")
        if not equals:
            message = f"label {label!r} is not key=value"
            raise InvalidArgument(message)
        pairs[key] = value
    return pairs
