"""What the scheduler keeps in its cluster's folder of the run directory.

Rules:

1. `link.json` says where nodes find the catalog now: no secrets, for stores of this host
   that outlived a scheduler on another port.
2. `cluster.json` holds id and token (mode 0600, in a folder of mode 0700), so that a
   scheduler that starts without its journal is still the same cluster to the stores.
3. A journal that begins empty begins above every epoch that this folder or the calendar
   knows: no generation of a lost catalog is minted twice.
4. Files are written whole or not at all. Both go when the cluster ends for good.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from typing import TYPE_CHECKING

import msgspec

from tensorcast_dask.dataplane import bearer
from tensorcast_dask.dataplane.auth import mint_token
from tensorcast_dask.scheduler_plugin.state.numbers import begin_of
from tensorcast_dask.tensors.ids import ClusterId

if TYPE_CHECKING:
    from pathlib import Path

    from tensorcast_dask.scheduler_plugin.journal import Journal
    from tensorcast_dask.scheduler_plugin.state.events import Recovered
    from tensorcast_dask.tensors.messages import LinkTarget

__all__ = [
    "forget_cluster",
    "fresh_epoch",
    "name_cluster",
    "take_cluster",
    "write_link",
]

_LINK = "link.json"
_CLUSTER = "cluster.json"
_YEAR_2025_S = 1_735_689_600
_SAID = (
    "this cluster's journal is gone: artifacts are taken back from the nodes that hold "
    "them; aliases, pins and what no node holds are lost"
)


class _Cluster(msgspec.Struct, frozen=True):
    cluster: ClusterId
    token: bytes
    epoch: int = 0


def fresh_epoch(folder: Path, *, wall_s: float) -> int:
    """Give the epoch for a journal that begins empty (rule 3)."""
    known = _read(folder / _CLUSTER)
    minutes = int(wall_s - _YEAR_2025_S) // 60
    return max(1, minutes, 0 if known is None else known.epoch + 1)


def name_cluster(journal: Journal, folder: Path) -> tuple[Recovered, bytes]:
    """Give what was recovered, with a cluster id and token: the journal's, this folder's, or new."""
    recovered, token = journal.recovered, journal.token
    known = _read(folder / _CLUSTER)
    cluster = recovered.cluster
    if not (cluster and token):
        if known is not None and cluster in {"", known.cluster}:
            cluster, token = known.cluster, known.token
            recovered = msgspec.structs.replace(recovered, lost=True, said=_SAID)
        else:
            cluster = cluster or ClusterId(secrets.token_hex(16))
            token = mint_token()
        journal.name_cluster(cluster, token)
    named = _Cluster(cluster, token, int(recovered.epoch))
    if named != known:
        _write(folder / _CLUSTER, msgspec.json.encode(named))
    begin = begin_of(cluster)
    return msgspec.structs.replace(recovered, cluster=cluster, begin=begin), token


def take_cluster(folder: Path, cluster: str, token: bytes, epoch: int) -> None:
    """Keep the id and token that a store brought, as if they had been kept here (rule 2)."""
    taken = _Cluster(ClusterId(cluster), token, epoch)
    _write(folder / _CLUSTER, msgspec.json.encode(taken))


def write_link(folder: Path, link: LinkTarget) -> None:
    """Say where nodes find the catalog."""
    where = {
        "host": link.host,
        "port": link.port,
        "cluster": link.cluster,
        "epoch": link.epoch,
    }
    _write(folder / _LINK, json.dumps(where).encode())


def forget_cluster(folder: Path) -> None:
    """Remove these files, and the folder when no store is in it: the cluster has ended."""
    for name in (_LINK, _CLUSTER, bearer.FILE):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # a store that still ends removes it
        folder.rmdir()


def _read(path: Path) -> _Cluster | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Cluster)
    except (OSError, msgspec.DecodeError):
        return None


def _write(path: Path, content: bytes) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, content)
    finally:
        os.close(fd)
    fresh.replace(path)
