"""What belongs in a worker's own log: its store began, its store was let go, its limit changed.

Dask shows INFO of its own loggers only, so these few lines go to a child of the worker's.
What goes wrong is logged where it is found, by the logger of that module.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from tensorcast_dask.tensors.quantities import human_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from tensorcast_dask.tensors.messages import DeviceTold, NodeCard, StoreSettings

__all__ = [
    "device_attends",
    "gateway_attends",
    "limit_lowered",
    "store_attends",
    "store_left",
]

_LOG: Final = logging.getLogger("distributed.worker.tensorcast")


def store_attends(
    card: NodeCard, settings: StoreSettings, folder: Path, *, how: str
) -> None:
    """Say that a store was started or adopted, and what it may take."""
    _LOG.info(
        "Store %s %s (pid %d): up to %s of host memory, disk %s, socket and log in %s",
        card.node,
        how,
        card.pid,
        human_bytes(settings.host_memory_bytes),
        settings.disk_dir or "none",
        folder / card.node,
    )


def device_attends(told: DeviceTold) -> None:
    """Say that a device process was started, and what it may take."""
    _LOG.info(
        "Device %s (%s): up to %s, process %d",
        told.name,
        told.device,
        human_bytes(told.capacity_bytes),
        told.pid,
    )


def gateway_attends(url: str) -> None:
    """Say where the gateway answers."""
    _LOG.info("Gateway at %s", url)


def store_left(node: str, *, how: str, why: str) -> None:
    """Say that a store was ended or let go."""
    _LOG.info("Store %s %s: %s", node, how, why)


def limit_lowered(before_bytes: int, after_bytes: int) -> None:
    """Say that an automatic memory limit makes room for the store."""
    _LOG.info(
        "Memory limit %s, which Dask chose, is lowered to %s: the rest is the store's "
        "(give --memory-limit to keep it)",
        human_bytes(before_bytes),
        human_bytes(after_bytes),
    )
