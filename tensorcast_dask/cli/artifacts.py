"""Commands on the artifacts of a running cluster."""

from __future__ import annotations

import math
from pathlib import Path

import click

from tensorcast_dask.cli import completing
from tensorcast_dask.cli.options import (
    POSITIVE,
    Seconds,
    of_artifact,
    of_version,
    on_cluster,
    pairs,
    session,
)
from tensorcast_dask.cli.output import run, show_json, show_table, success
from tensorcast_dask.exceptions import NotFound
from tensorcast_dask.tensors.quantities import human_bytes

__all__ = [
    "alias",
    "explain",
    "get",
    "instances",
    "ls",
    "nodes",
    "pin",
    "publish",
    "put",
    "rm",
    "show",
    "sql",
    "unpin",
]


@click.command()
@click.argument("prefix", default="", shell_complete=completing.ids)
@click.option(
    "-l",
    "--label",
    "labels",
    multiple=True,
    callback=pairs,
    help="key=value that it must carry.",
)
@click.option(
    "-a",
    "--all-versions",
    is_flag=True,
    help="Every version, not the newest published.",
)
@on_cluster
def ls(
    prefix: str,
    labels: dict[str, str],
    all_versions: bool,
    scheduler: str | None,
    as_json: bool,
) -> None:
    """List artifacts whose id begins with PREFIX: of each the newest published version.

    Of one that has none published the newest committed one.
    """

    def work() -> None:
        with session(scheduler) as cast:
            found = cast.list(prefix, labels=labels, all_versions=all_versions)
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


@click.command()
@of_artifact
@of_version
@on_cluster
def show(id_: str, version: int | None, scheduler: str | None, as_json: bool) -> None:
    """Show one artifact: its tensors, and where its replicas are."""

    def work() -> None:
        with session(scheduler) as cast:
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


@click.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@of_artifact
@click.option(
    "-l",
    "--label",
    "labels",
    multiple=True,
    callback=pairs,
    help="key=value to find it by.",
)
@click.option(
    "-r",
    "--replicas",
    type=POSITIVE,
    default=1,
    show_default=True,
    help="On how many hosts.",
)
@click.option(
    "--next", "next_version", is_flag=True, help="As the next version of the id."
)
@click.option("--publish", is_flag=True, help="Make it visible to `latest`.")
@on_cluster
def put(
    path: Path,
    id_: str,
    labels: dict[str, str],
    replicas: int,
    next_version: bool,
    publish: bool,
    scheduler: str | None,
    as_json: bool,
) -> None:
    """Import a safetensors file, directory or index as artifact ID.

    Where ID holds the same content already nothing is changed, and that is said.
    """

    def work() -> None:
        with session(scheduler) as cast:
            loading = cast.load(
                path,
                id_,
                labels=labels,
                replicas=replicas,
                version="next" if next_version else None,
                deadline=math.inf,  # who waits sees how far it is, and has Ctrl-C
                progress=not as_json,
            )
            artifact = loading.result()
            if publish:
                artifact.publish()
            if as_json:
                show_json(artifact.info)
            else:
                success(f"{artifact!r}")
            if (
                loading.note and not artifact.degraded
            ):  # that is in the log, which is here
                success(f"{id_}: {loading.note}")

    run(work)


@click.command()
@of_artifact
@click.argument("path", type=click.Path(path_type=Path))
@of_version
@click.option(
    "--max-shard",
    default="0",
    help='Bytes of a shard, such as "5 GB"; 0 = one file.',
)
@on_cluster
def get(
    id_: str,
    path: Path,
    version: int | None,
    max_shard: str,
    scheduler: str | None,
    as_json: bool,
) -> None:
    """Write an artifact as safetensors (on a holder's host)."""

    def work() -> None:
        with session(scheduler) as cast:
            artifact = cast.artifact(id_, version=version)
            artifact.save(
                str(path),
                max_shard_bytes=max_shard,
                deadline=math.inf,
                progress=not as_json,
            )
            if as_json:
                show_json({"path": str(path.absolute()), "artifact": artifact.info})
            else:
                success(f"{path}: {human_bytes(artifact.nbytes)}")

    run(work)


@click.command()
@of_artifact
@click.option(
    "-v",
    "--version",
    type=POSITIVE,
    shell_complete=completing.versions,
    help="Only that version.",
)
@on_cluster
def rm(id_: str, version: int | None, scheduler: str | None, as_json: bool) -> None:
    """Destroy an artifact, all versions unless one is named."""

    def work() -> None:
        with session(scheduler) as cast:
            what = id_ if version is None else cast.artifact(id_, version=version)
            ended = cast.destroy(what).result()
            if not ended.versions:
                message = f"there was no {id_!r} to destroy; `tensorcast ls` shows what there is"
                raise NotFound(message)
            if as_json:
                show_json(ended)
            else:
                numbers = ", ".join(str(number) for number in ended.versions)
                success(f"{id_}: ended version {numbers}")

    run(work)


@click.command()
@of_artifact
@of_version
@on_cluster
def publish(
    id_: str, version: int | None, scheduler: str | None, as_json: bool
) -> None:
    """Make a version visible to `latest`; without -v the newest there is."""

    def work() -> None:
        with session(scheduler) as cast:
            newest = version or max(
                (a.version for a in cast.list(id_, all_versions=True) if a.id == id_),
                default=None,
            )
            artifact = cast.artifact(id_, version=newest).publish().result()
            if as_json:
                show_json(artifact.info)
            else:
                success(f"{artifact!r} is published")

    run(work)


@click.command()
@click.argument("name", shell_complete=completing.ids)
@click.argument("id_", metavar="ID", required=False, shell_complete=completing.ids)
@of_version
@on_cluster
def alias(
    name: str,
    id_: str | None,
    version: int | None,
    scheduler: str | None,
    as_json: bool,
) -> None:
    """Have NAME mean a version of ID; without ID the name is removed."""

    def work() -> None:
        with session(scheduler) as cast:
            what = None if id_ is None else cast.artifact(id_, version=version)
            state = cast.alias(name, what)
            if as_json:
                show_json(state)
            else:
                success(f"{name}: {'removed' if what is None else repr(what)}")

    run(work)


@click.command()
@of_artifact
@of_version
@click.option(
    "--ttl", type=Seconds(min=0, min_open=True), help="Seconds; else for ever."
)
@on_cluster
def pin(
    id_: str,
    version: int | None,
    ttl: float | None,
    scheduler: str | None,
    as_json: bool,
) -> None:
    """Promise not to evict an artifact's replicas; print the pin's number."""

    def work() -> None:
        with session(scheduler) as cast:
            artifact = cast.artifact(id_, version=version)
            pinned = cast.pin(artifact, ttl=math.inf if ttl is None else ttl)
            if as_json:
                show_json(pinned)
            else:
                click.echo(pinned.pin)

    run(work)


@click.command()
@of_artifact
@click.argument("number", type=int, default=0)
@of_version
@on_cluster
def unpin(
    id_: str,
    number: int,
    version: int | None,
    scheduler: str | None,
    as_json: bool,
) -> None:
    """Take pin NUMBER of an artifact back, or all of them."""

    def work() -> None:
        with session(scheduler) as cast:
            artifact = cast.artifact(id_, version=version)
            cast.unpin(artifact, number)
            if as_json:
                show_json(artifact.info)
            else:
                success(
                    f"{id_}: {f'pin {number}' if number else 'all pins'} taken back"
                )

    run(work)


@click.command()
@click.argument("ref", shell_complete=completing.refs)
@on_cluster
def explain(ref: str, scheduler: str | None, as_json: bool) -> None:
    """Say why it is as it is; REF is an artifact, a node or a request."""

    def work() -> None:
        with session(scheduler) as cast:
            lines = cast.explain(ref)
            if as_json:
                show_json(lines)
            else:
                click.echo("\n".join(lines))

    run(work)


@click.command()
@click.argument("query")
@on_cluster
def sql(query: str, scheduler: str | None, as_json: bool) -> None:
    """Run one SELECT over the catalog.

    Tables: artifacts, versions, replicas, nodes, leases, pins, aliases, views, plans,
    steps, instances, operations, transfers, events.
    """

    def work() -> None:
        with session(scheduler) as cast:
            found = cast.sql(query)
            if as_json:
                show_json(
                    [dict(zip(found.columns, row, strict=True)) for row in found.rows]
                )
            else:
                show_table("", found.columns, found.rows)

    run(work)


@click.command()
@on_cluster
def nodes(scheduler: str | None, as_json: bool) -> None:
    """List nodes and what their tiers hold."""

    def work() -> None:
        with session(scheduler) as cast:
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


@click.command()
@on_cluster
def instances(scheduler: str | None, as_json: bool) -> None:
    """List processes that are attached to nodes."""

    def work() -> None:
        with session(scheduler) as cast:
            states = cast.instances()
            if as_json:
                show_json([state.state for state in states])
                return
            rows = [
                (
                    one.name,
                    one.state.card.name or one.node[:8],
                    "yes" if one.routable else one.poisoned or "draining",
                    ", ".join((*one.engine, *one.functions)),
                    ", ".join(f"{name} v{v}" for name, v in one.holds.items()),
                    ", ".join(
                        f"{name} {number:g}" for name, number in one.load.items()
                    ),
                )
                for one in states
            ]
            columns = ("instance", "node", "routable", "offers", "holds", "load")
            show_table("", columns, rows)

    run(work)
