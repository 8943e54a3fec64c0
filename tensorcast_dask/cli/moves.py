"""Commands that move bytes between nodes."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import click

from tensorcast_dask.cli import completing
from tensorcast_dask.cli.options import of_artifact, of_version, on_cluster, session
from tensorcast_dask.cli.output import run, show_json, show_table, success
from tensorcast_dask.exceptions import InvalidArgument
from tensorcast_dask.tensors.quantities import human_bytes

if TYPE_CHECKING:
    from tensorcast_dask.tensors.messages import Drained, Moved

__all__ = ["cp", "drain", "mv"]


@click.command()
@of_artifact
@click.argument("node", shell_complete=completing.nodes)
@of_version
@on_cluster
def cp(
    id_: str, node: str, version: int | None, scheduler: str | None, as_json: bool
) -> None:
    """Make a further replica of an artifact at NODE (its name, identity or address)."""

    def work() -> None:
        with session(scheduler) as cast:
            artifact = cast.artifact(id_, version=version)
            waiting = {"deadline": math.inf, "progress": not as_json}
            copied = cast.replicate(artifact, node, **waiting)
            _tell(id_, copied.result(), as_json=as_json)

    run(work)


@click.command()
@of_artifact
@click.argument("node", shell_complete=completing.nodes)
@click.option(
    "--from",
    "source",
    shell_complete=completing.nodes,
    help="The node that it leaves; may be left out where one has it.",
)
@of_version
@on_cluster
def mv(
    id_: str,
    node: str,
    source: str | None,
    version: int | None,
    scheduler: str | None,
    as_json: bool,
) -> None:
    """Move a replica of an artifact to NODE; the one that it leaves goes when that has it."""

    def work() -> None:
        with session(scheduler) as cast:
            artifact = cast.artifact(id_, version=version)
            left = source or _only_holder(artifact)
            waiting = {"deadline": math.inf, "progress": not as_json}
            moved = cast.migrate(artifact, left, node, **waiting)
            _tell(id_, moved.result(), as_json=as_json)

    run(work)


def _only_holder(artifact: Any) -> str:
    held = {at.card.node: at.card.name for at in artifact.locations()}
    if len(held) != 1:
        names = ", ".join(name or node for node, name in held.items())
        message = f"{artifact.id!r} lies on {names}; say which it leaves with --from"
        raise InvalidArgument(message)
    (node,) = map(str, held)
    return node


def _tell(id_: str, moved: Moved, *, as_json: bool) -> None:
    if as_json:
        show_json(moved)
        return
    at = moved.location
    success(
        f"{id_}: on {at.card.name or at.card.node} ({at.tier}), "
        f"{human_bytes(moved.moved_bytes)} in {moved.seconds:.3f} s by {moved.via}"
    )


@click.command()
@click.argument("node", shell_complete=completing.nodes)
@click.option("--keep", is_flag=True, help="The node stays, empty; else it ends.")
@click.option(
    "--retire", is_flag=True, help="Its worker goes too, when nothing stayed."
)
@on_cluster
def drain(
    node: str, keep: bool, retire: bool, scheduler: str | None, as_json: bool
) -> None:
    """Move everything off NODE and show the receipt; status 1 when something stayed.

    A worker that runs on begins a new, empty node, which takes what comes: --retire before
    you take a machine away.
    """

    def work() -> None:
        if keep and retire:
            message = "--keep and --retire are two different things"
            raise click.UsageError(message)
        with session(scheduler) as cast:
            named = {
                one: worker.address
                for worker in cast.workers()
                for one in (worker.name, worker.node, worker.address)
            }
            leaves = named.get(node) if retire else None
            end = not keep and leaves is None
            receipt = cast.drain(node, end=end, deadline=math.inf).result()
            if leaves is not None and not receipt.stayed:
                cast.client.retire_workers([leaves])
            if as_json:
                show_json(receipt)
            else:
                _show_receipt(cast, node, receipt)
        if receipt.stayed:
            sys.exit(1)

    run(work)


def _show_receipt(cast: Any, node: str, receipt: Drained) -> None:
    rows = cast.sql("SELECT generation, id, version FROM versions").rows
    names = {generation: f"{id_} v{version}" for generation, id_, version in rows}
    stayed = dict(receipt.stayed)
    show_table(
        "",
        ("artifact", "what became of it", "why"),
        [
            *((names.get(one, one), "moved", "") for one in receipt.moved),
            *((names.get(one, one), "stayed", why) for one, why in stayed.items()),
        ],
    )
    success(
        f"{node}: {len(receipt.moved)} moved ({human_bytes(receipt.moved_bytes)}), "
        f"{len(stayed)} stayed"
    )
