"""The stores of this host, and the one to attach to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.dataplane import hosts
from tensorcast_dask.instance.state.choosing import Found, choose

if TYPE_CHECKING:
    from pathlib import Path

    from tensorcast_dask.tensors.messages import NodeCard

__all__ = ["find_store"]

_LINK_NAME: Final = "link.json"


class _Address(msgspec.Struct):
    """Where a cluster's scheduler listens; written by it beside its stores."""

    host: str = ""
    port: int = 0
    cluster: str = ""


def find_store(
    *, cluster: str | None, node: str | None, run_dir: str = ""
) -> tuple[NodeCard, str]:
    """Choose a store of this host; give its card and why.

    Parameters
    ----------
    cluster, node : str or None
        As asked for; None looks at TENSORCAST_CLUSTER and TENSORCAST_NODE.
    run_dir : str
        The run directory, where it is not that of the environment.

    Raises
    ------
    NotFound, InvalidArgument
        When there is none, or more than one that fits.
    """
    wanted = os.environ.get("TENSORCAST_CLUSTER", "") if cluster is None else cluster
    named = os.environ.get("TENSORCAST_NODE", "") if node is None else node
    folder = hosts.run_directory(run_dir)
    found = [_found(one, wanted) for one in sorted(folder.iterdir()) if one.is_dir()]
    return choose(found, cluster=wanted, node=named)


def _found(folder: Path, wanted: str) -> Found:
    try:
        address = msgspec.json.decode((folder / _LINK_NAME).read_bytes(), type=_Address)
    except (OSError, msgspec.DecodeError):
        address = _Address()
    names = [folder.name, address.cluster]
    # The folder's name is a digest of what people call the cluster: its scheduler's address.
    if wanted and hosts.cluster_name(wanted) == folder.name:
        names.append(wanted)
    cards = [card for card in hosts.cards(folder) if card.kind == "store"]
    return Found(names=tuple(names), cards=tuple(cards))
