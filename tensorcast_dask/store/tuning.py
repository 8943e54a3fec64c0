"""The congestion control of the data port, found out once a boot and kept.

Rules:

1. Only where the port is on the loopback: for another host the kernel's default stays.
2. The first store of a run directory measures, beside its work; those that come later read what
   it found. A note of another boot or kernel is measured again, and so is what was measured
   on a machine too busy for its turns to agree.
"""

from __future__ import annotations

import ipaddress
import logging
from pathlib import Path
from typing import Final

import msgspec

from tensorcast_dask.dataplane.congestion import allowed_congestion, probe_congestion

__all__ = ["congestion_for"]

logger = logging.getLogger(__name__)

_NOTE_NAME: Final = "congestion.json"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class _Note(msgspec.Struct):
    boot: str
    allowed: tuple[str, ...]
    name: str


def congestion_for(run_dir: Path, host: str, *, scratch: Path) -> str:
    """Return what a data port on `host` shall use; "" = the kernel's default.

    It may take some tenths of a second. `scratch` is a folder of the store's own.
    """
    if not _is_loopback(host):
        return ""
    path = run_dir / _NOTE_NAME
    here = _Note(boot=_boot(), allowed=allowed_congestion(), name="")
    try:
        known = msgspec.json.decode(path.read_bytes(), type=_Note)
    except (OSError, msgspec.DecodeError):
        known = None
    if known is not None and (known.boot, known.allowed) == (here.boot, here.allowed):
        return known.name
    here.name, sure = probe_congestion()
    if sure:
        _write(path, here, scratch)
    return here.name


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _boot() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _write(path: Path, note: _Note, scratch: Path) -> None:
    fresh = scratch / path.name
    try:
        fresh.write_bytes(msgspec.json.encode(note))
        fresh.replace(path)
    except OSError as error:
        logger.info("what was found is not kept: %s", error)
