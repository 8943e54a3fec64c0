"""`tensorcast store`: a store that no worker started, to be adopted.

Rules:

1. The store is the process that a worker would start; this one only waits for its end.
2. What was given here stays; the rest follows the worker that adopts it.
3. A signal that ends this process ends the store, as `kill` of the store itself does.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from tensorcast_dask.cli.local import interruptible, running_address
from tensorcast_dask.cli.output import show_json, success
from tensorcast_dask.config import Settings
from tensorcast_dask.dataplane import hosts
from tensorcast_dask.exceptions import PeerLost
from tensorcast_dask.store import launch
from tensorcast_dask.tensors.quantities import human_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tensorcast_dask.tensors.messages import NodeCard, StoreSettings

__all__ = ["Own", "store"]

_STOP_S: Final = 10.0
#: Fields of the store's settings that each option fixes (rule 2).
_FIXED: Final[Mapping[str, tuple[str, ...]]] = {
    "host_memory": ("host_memory_bytes",),
    "disk": ("disk_dir",),
    "labels": ("labels",),
    "run_dir": ("run_dir",),
}


class Own(msgspec.Struct, frozen=True, kw_only=True):
    """What a person gave for this store."""

    host_memory: str | None
    disk: str | None
    labels: dict[str, str]
    run_dir: str | None

    def arguments(self) -> dict[str, Any]:
        """Give them as settings."""
        node = {
            "host-memory": self.host_memory,
            "disk-dir": self.disk,
            "labels": self.labels,
        }
        given: dict[str, Any] = {"node": {k: v for k, v in node.items() if v}}
        return given | ({"run-dir": self.run_dir} if self.run_dir else {})

    def fixed(self) -> tuple[str, ...]:
        """Name the fields that no worker changes."""
        return tuple(
            field
            for option, fields in _FIXED.items()
            if getattr(self, option)
            for field in fields
        )


def store(
    *,
    scheduler: str | None,
    cluster: str | None,
    own: Own,
    detach: bool,
    as_json: bool,
) -> None:
    """Start a store; wait for its end unless `detach`."""
    settings = Settings.read(own.arguments())
    name = cluster or settings.cluster or _address(scheduler or running_address())
    told = _settings(settings, name)
    if detach:
        _show(_start(settings, told, own), told, as_json=as_json)
        return
    with interruptible():  # from before the start: no signal falls between
        card = _start(settings, told, own)
        watch = hosts.PidWatch(card.pid, card.pid_start)
        try:
            _show(card, told, as_json=as_json)
            while not watch.is_gone():
                _wait(watch, None)
        except BaseException as error:
            _end(card, watch)
            if not isinstance(error, KeyboardInterrupt):
                raise
        finally:
            watch.close()
    success("the store ended")


def _start(settings: Settings, told: StoreSettings, own: Own) -> NodeCard:
    return launch.start(told, timeout_s=settings.start_timeout_s, own=own.fixed())


def _show(card: NodeCard, told: StoreSettings, *, as_json: bool) -> None:
    name = told.cluster_name
    facts = {
        "node": card.node,
        "pid": card.pid,
        "cluster": name,
        "socket": card.socket,
        "host_memory_bytes": told.host_memory_bytes,
    }
    if as_json:
        show_json(facts)
    else:
        click.echo(f"store      {card.node}\npid        {card.pid}\ncluster    {name}")
        budget = human_bytes(told.host_memory_bytes)
        success(
            f"up to {budget}; it waits, without end, for a worker of this cluster and host; "
            f"kill {card.pid} ends it"
        )
    sys.stdout.flush()


def _address(address: str | None) -> str:
    if address is None:
        message = (
            "no cluster is named: give --scheduler or --cluster, or start one with "
            "`tensorcast up`"
        )
        raise click.UsageError(message)
    return address if "://" in address else f"tcp://{address}"


def _settings(settings: Settings, cluster: str) -> StoreSettings:
    from tensorcast_dask.worker_plugin.dask_private import machine_bytes
    from tensorcast_dask.worker_plugin.state.budgets import excess_of, node_budget_bytes

    excess = excess_of(settings.node.host_memory, machine_bytes=machine_bytes())
    if excess:
        success(f"warning: {excess}")
    run_dir = hosts.run_directory(settings.run_dir)
    return settings.for_store(
        host_memory_bytes=node_budget_bytes(
            settings.node.host_memory,
            machine_bytes=machine_bytes(),
            share=1.0,
            limit_bytes=None,
        ),
        cluster_name=cluster,
        host=hosts.host_id(run_dir, settings.host),
        data_host="",
    )


def _end(card: NodeCard, watch: hosts.PidWatch) -> None:
    """Pass a signal to end on to the store (rule 3)."""
    if not watch.is_gone():
        os.kill(card.pid, signal.SIGTERM)
        _wait(watch, _STOP_S)
    if not watch.is_gone():
        message = f"store {card.pid} does not end; kill it by hand"
        raise PeerLost(message)


def _wait(watch: hosts.PidWatch, within_s: float | None) -> None:
    if watch.fileno() >= 0:
        poll = select.poll()
        poll.register(watch.fileno(), select.POLLIN)
        poll.poll(None if within_s is None else within_s * 1000)
