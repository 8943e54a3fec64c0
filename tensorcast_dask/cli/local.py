"""`up` and `down`: one local cluster of this user, found again by its file.

Rules:

1. The file in the run directory names address, pid and the pid's start time: another
   process that got the same pid is never taken for the cluster.
2. `down` ends the cluster that `up` started and no other.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import click

from tensorcast_dask.cli.output import show_json, success
from tensorcast_dask.config import Settings
from tensorcast_dask.dataplane import hosts
from tensorcast_dask.exceptions import AlreadyExists, NotFound, PeerLost

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tensorcast_dask.api.cluster import LocalCluster
    from tensorcast_dask.tensors.messages import NodeCard

__all__ = ["down", "interruptible", "running_address", "up", "up_detached"]

_START_S: Final = 60.0
_STOP_S: Final = 30.0


def _run_directory() -> Path:
    return hosts.run_directory(Settings.read().run_dir)


def _file() -> Path:
    return _run_directory() / hosts.UP_NAME


def _running() -> dict[str, Any] | None:
    return hosts.running_up(_run_directory())


def running_address() -> str | None:
    """Give the scheduler's address of the cluster that `up` started, if it runs."""
    known = _running()
    return None if known is None else str(known["scheduler"])


def up(
    *,
    workers: int | None,
    host_memory: str | None,
    device_memory: str | None,
    disk: str | None,
    port: int,
    as_json: bool,
) -> None:
    """Run a cluster in the foreground until it is interrupted.

    Raises
    ------
    AlreadyExists
        When one runs.
    """
    _check_free(host_memory, device_memory, disk)
    with (
        interruptible(),
        _started(
            n_workers=workers,
            host_memory=host_memory,
            device_memory=device_memory,
            disk=disk or False,
            scheduler_port=port,
        ) as cluster,
    ):
        facts = {
            "scheduler": cluster.scheduler_address,
            "dashboard": cluster.dashboard_link,
            "pid": os.getpid(),
            "pid_start": hosts.process_start(os.getpid()),
        }
        fresh = _file().with_suffix(".new")
        fresh.write_text(json.dumps(facts))
        fresh.replace(_file())
        try:
            if as_json:
                show_json(facts)
            else:
                click.echo(
                    f"scheduler  {facts['scheduler']}\ndashboard  {facts['dashboard']}"
                )
                success("stop it with Ctrl-C, or `tensorcast down`")
            sys.stdout.flush()
            signal.pause()
        except KeyboardInterrupt:
            pass
        finally:
            _file().unlink(missing_ok=True)


def _started(**options: Any) -> LocalCluster:
    from tensorcast_dask.api.cluster import LocalCluster

    try:
        return LocalCluster(**options)
    except RuntimeError as error:  # Dask's, around what really happened
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        message = f"the cluster did not start: {cause}"
        raise PeerLost(message) from error


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _check_free(
    host_memory: str | None, device_memory: str | None, disk: str | None
) -> None:
    """Refuse wrong settings, then a second cluster."""
    given = {
        "host-memory": host_memory,
        "device-memory": device_memory,
        "disk-dir": disk,
    }
    Settings.read({"node": {k: v for k, v in given.items() if v is not None}})
    if (known := _running()) is not None:
        message = (
            f"a cluster runs at {known['scheduler']}; end it with `tensorcast down`"
        )
        raise AlreadyExists(message)


def up_detached(options: dict[str, Any], *, as_json: bool) -> None:
    """Start `up` as a process of its own and wait until it answers.

    Raises
    ------
    PeerLost
        When it did not come up; its log says why.
    """
    _check_free(options["--host-memory"], options["--device-memory"], options["--disk"])
    arguments = [
        part for k, v in options.items() if v is not None for part in (k, str(v))
    ]
    success("starting a cluster on this machine ...")
    log = _run_directory() / "up.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "tensorcast_dask.cli", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    until_s = time.monotonic() + _START_S
    while (known := _running()) is None:
        if process.poll() is not None or time.monotonic() > until_s:
            message = f"the cluster did not start: {_end_of(log)}"
            raise PeerLost(message)
        time.sleep(0.05)
    if as_json:
        show_json(known)
    else:
        click.echo(f"scheduler  {known['scheduler']}\ndashboard  {known['dashboard']}")


def _end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"{lines[-1]} ({log})" if lines else f"see {log}"


def _never_adopted(scheduler: str) -> list[NodeCard]:
    """List the stores of the cluster that `tensorcast store` started and no worker took."""
    name = Settings.read().cluster or scheduler
    cards = hosts.cards(hosts.cluster_folder(_run_directory(), name))
    return [card for card in cards if card.incarnation == 0]


def down(*, as_json: bool) -> None:
    """End the cluster that `up` started, and stores of it that still wait for a worker.

    Raises
    ------
    NotFound
        When none runs.
    PeerLost
        When it does not end.
    """
    known = _running()
    if known is None:
        message = "no cluster of `tensorcast up` runs here"
        raise NotFound(message)
    waiting = _never_adopted(known["scheduler"])
    os.kill(known["pid"], signal.SIGTERM)
    for card in waiting:
        with contextlib.suppress(ProcessLookupError):
            os.kill(card.pid, signal.SIGTERM)
    until_s = time.monotonic() + _STOP_S
    while hosts.process_start(known["pid"]) == known["pid_start"]:
        if time.monotonic() > until_s:
            message = f"process {known['pid']} does not end; kill it by hand"
            raise PeerLost(message)
        time.sleep(0.05)
    if as_json:
        show_json({"ended": known["scheduler"]})
    else:
        success(f"{known['scheduler']} ended")
