"""Starting a store process and waiting for its card.

Rules:

1. A store is detached: a session of its own, no inherited stdio, no inherited descriptors.
   A child that held our stdout would keep a pipe open after we have ended.
2. Settings and secrets go over its stdin, once; never in arguments or the environment.
3. Nobody waits for a store for longer than told; one that did not come up is ended.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.dataplane import hosts
from tensorcast_dask.exceptions import PeerLost
from tensorcast_dask.tensors.ids import NodeId
from tensorcast_dask.tensors.messages import (
    LinkTarget,
    NodeCard,
    StoreSettings,
    Wire,
    encode,
)

if TYPE_CHECKING:
    import subprocess

__all__ = ["LOG_NAME", "StoreStart", "folder_of", "launch", "start"]

LOG_NAME: Final = "log"
_POLL_S: Final = 0.002
_FREE_TTL_S: Final = 60.0


class StoreStart(Wire, frozen=True, kw_only=True):
    """What a store is told over its stdin."""

    node: NodeId
    settings: StoreSettings
    link: LinkTarget | None = None
    #: How long it waits for its first worker; 0 = for ever.
    free_ttl_s: float = 0.0
    #: Fields of the settings that a person gave for this store: no worker changes them.
    own: tuple[str, ...] = ()


def folder_of(settings: StoreSettings, node: NodeId) -> Path:
    """Return the folder of a store in the run directory, made when it is missing.

    Raises
    ------
    OwnershipError
        When the run directory is not ours.
    """
    run = hosts.run_directory(settings.run_dir)
    return hosts.node_folder(hosts.cluster_folder(run, settings.cluster_name), node)


def launch(settings: StoreSettings, timeout_s: float) -> NodeCard:
    """Start a store for a worker that will adopt it at once; its card.

    Raises
    ------
    PeerLost
        When it does not come up in time.
    """
    return start(settings, timeout_s=timeout_s, free_ttl_s=_FREE_TTL_S)


def start(
    settings: StoreSettings,
    *,
    timeout_s: float = 10.0,
    link: LinkTarget | None = None,
    free_ttl_s: float = 0.0,
    own: tuple[str, ...] = (),
) -> NodeCard:
    """Start a detached store process and wait until it can be adopted.

    Parameters
    ----------
    settings : StoreSettings
        What it is told.
    timeout_s : float
        How long it may take.
    link : LinkTarget, optional
        The catalog, where the store shall not wait for a worker to tell it.
    free_ttl_s : float
        How long it waits for its first worker before it ends; 0 = for ever.
    own : tuple of str
        Fields of the settings that stay when a worker adopts it with others.

    Returns
    -------
    NodeCard
        How to reach it.

    Raises
    ------
    PeerLost
        When it does not come up in time; the end of its log is in the message.
    """
    node = NodeId(os.urandom(16).hex())  # the starter mints the identity
    folder = folder_of(settings, node)
    hosts.socket_path(folder)
    told = StoreStart(
        node=node, settings=settings, link=link, free_ttl_s=free_ttl_s, own=own
    )
    import subprocess  # noqa: PLC0415 - a store starts without it

    process = subprocess.Popen(
        [sys.executable, "-m", "tensorcast_dask.store"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        close_fds=True,
        start_new_session=True,
        cwd="/",
        env=_environment(),
    )
    assert process.stdin is not None, "store: Popen was asked for a pipe"
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(encode(told))
    _reap(process)
    try:
        return _await_card(process, folder, timeout_s)
    except BaseException:  # also an interrupt: nobody else knows of it yet
        process.kill()
        raise


def _environment() -> dict[str, str]:
    """Let the store import what we import, wherever that came from."""
    package = str(Path(__file__).resolve().parents[2])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    known = [path for path in paths if path and path != package]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([package, *known])}


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Collect the store's exit status whenever it comes: no zombie, and no wait."""
    threading.Thread(target=process.wait, name="tensorcast-reap", daemon=True).start()


def _await_card(
    process: subprocess.Popen[bytes], folder: Path, timeout_s: float
) -> NodeCard:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        card = hosts.read_card(folder)
        if card is not None and card.pid == process.pid:
            return msgspec.structs.replace(card)
        if process.returncode is not None:
            break
        time.sleep(_POLL_S)
    message = f"the store did not come up within {timeout_s:g} s; its log ends: {_log(folder)}"
    raise PeerLost(message)


def _log(folder: Path) -> str:
    try:
        return (folder / LOG_NAME).read_text(errors="replace")[-2000:] or "(empty)"
    except OSError:
        return "(there is none)"
