"""`tensorcast plan`: runs of plans that were written as JSON."""

from __future__ import annotations

import sys
from typing import Any

import click
import msgspec

from tensorcast_dask.cli import completing
from tensorcast_dask.cli.options import POSITIVE, Seconds, on_cluster, session
from tensorcast_dask.cli.output import run, show_json, show_table, success
from tensorcast_dask.tensors.quantities import human_bytes

__all__ = ["plan"]

_STATUSES = ("steps", "done", "failed", "skipped", "cancelled")


@click.group()
def plan() -> None:
    """Run plans, and look after runs."""


@plan.command("run")
@click.argument("file", type=click.File("rb"))
@click.option("-k", "--key", help="Idempotency key, in place of the plan's own.")
@click.option(
    "--ddl",
    type=Seconds(min=0),
    help="Seconds for all of it, in place of the plan's own.",
)
@click.option("-c", "--concurrency", type=POSITIVE, help="Most steps at once.")
@click.option("--no-wait", is_flag=True, help="Return when it has begun.")
@click.option("--dry-run", is_flag=True, help="Only say what it would take.")
@on_cluster
def _run(
    file: Any,
    key: str | None,
    ddl: float | None,
    concurrency: int | None,
    no_wait: bool,
    dry_run: bool,
    scheduler: str | None,
    as_json: bool,
) -> None:
    """Run the plan in FILE (JSON, "-" for standard input); status 1 when it failed.

    Under a key that is known its run is shown, and nothing is done again.
    """

    def work() -> None:
        from tensorcast_dask.tensors.plans import PlanSpec

        text = file.read()
        context = PlanSpec.from_json(text).context
        given = {"key": key, "ddl": ddl}
        changed = {name: value for name, value in given.items() if value is not None}
        context = msgspec.structs.replace(context, **changed)
        with session(scheduler) as cast:
            made = cast.plan(context).load_spec(text)
            if dry_run:
                _show_price(made.dry_run(), as_json=as_json)
                return
            begun = made.submit(concurrency)
            ended = begun.state() if no_wait else begun.outcome()
            _show(ended, as_json=as_json)

    run(work)


@plan.command("ls")
@click.argument("prefix", default="", shell_complete=completing.plans)
@on_cluster
def _list(prefix: str, scheduler: str | None, as_json: bool) -> None:
    """List runs whose key begins with PREFIX."""

    def work() -> None:
        with session(scheduler) as cast:
            found = cast.signals.snapshot(f"plan/{prefix}", limit=10_000)
            rows = [
                {
                    "key": name.removeprefix("plan/"),
                    "status": one["status"],
                    **{field: one.value.get(field, 0) for field in _STATUSES},
                }
                for name, one in found.items()
            ]
        if as_json:
            show_json(rows)
        else:
            columns = ("key", "status", *_STATUSES)
            show_table("", columns, [tuple(row.values()) for row in rows])

    run(work)


@plan.command("show")
@click.argument("key", shell_complete=completing.plans)
@click.option("--wait", is_flag=True, help="Wait for its end.")
@on_cluster
def _show_run(key: str, wait: bool, scheduler: str | None, as_json: bool) -> None:
    """Show how the run of KEY stands, step by step; status 1 when it failed."""

    def work() -> None:
        with session(scheduler) as cast:
            found = cast.plan_run(key)
            _show(found.outcome() if wait else found.state(), as_json=as_json)

    run(work)


@plan.command("cancel")
@click.argument("key", shell_complete=completing.plans)
@on_cluster
def _cancel(key: str, scheduler: str | None, as_json: bool) -> None:
    """Begin no further step of the run of KEY; what is done stays, or is undone as it says."""

    def work() -> None:
        with session(scheduler) as cast:
            found = cast.plan_run(key)
            found.cancel()
            state = found.state()
        if as_json:
            show_json(_facts(state))
        else:
            success(f"{key}: {state.status}")

    run(work)


def _facts(result: Any) -> dict[str, Any]:
    steps = {}
    for name in result:
        one = result[name]
        fault = one.fault
        steps[name] = {
            "status": one.status,
            "node": one.node,
            "bytes": one.bytes,
            "seconds": one.seconds,
            "attempts": one.attempts,
            "error": "" if fault is None else f"{fault.kind}: {fault.message}",
        }
    return {
        "key": result.key,
        "status": result.status,
        "message": result.message,
        "steps": steps,
    }


def _show(result: Any, *, as_json: bool) -> None:
    facts = _facts(result)
    if as_json:
        show_json(facts)
    else:
        show_table(
            f"{facts['key']}: {facts['status']}",
            ("step", "status", "node", "bytes", "seconds", "attempts", "error"),
            [
                (
                    name,
                    step["status"],
                    step["node"][:8],
                    human_bytes(step["bytes"]),
                    f"{step['seconds']:.3f}",
                    step["attempts"],
                    step["error"],
                )
                for name, step in facts["steps"].items()
            ],
        )
    if facts["status"] not in {"done", "running"}:
        if facts["message"]:
            click.echo(facts["message"], err=True)
        sys.exit(1)


def _show_price(price: Any, *, as_json: bool) -> None:
    if as_json:
        facts = {
            "bytes": price.bytes,
            "seconds": price.seconds,
            "links": price.links,
            "refusals": price.refusals,
        }
        show_json(facts)
    else:
        click.echo(str(price))
    if price.refusals:
        sys.exit(1)
