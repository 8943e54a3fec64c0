"""What this machine can do, and what to fix.

Rules:

1. Every finding says what it means for this package, and what to do when it is not well.
2. Nothing is changed, nothing of another process is touched, nothing is imported that
   would start a driver.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.cli.output import show_json, show_table
from tensorcast_dask.config import Settings
from tensorcast_dask.dataplane import congestion, hosts, segments
from tensorcast_dask.exceptions import TensorCastError
from tensorcast_dask.tensors.quantities import human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Finding", "doctor", "findings"]

_PACKAGES: Final = (
    "dask",
    "distributed",
    "duckdb",
    "numpy",
    "msgspec",
    "xxhash",
    "torch",
    "ml_dtypes",
    "cupy-cuda12x",
    "ucxx-cu12",
)
_LOW_DESCRIPTORS: Final = 4096
_INSTALL: Final = {
    "cupy": "cupy (pip install cupy-cuda12x)",
    "torch": "torch with CUDA",
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    what: str
    found: str
    #: `ok`, `limited` (works, with a loss) or `broken`.
    verdict: str = "ok"
    #: What to do, when it is not ok.
    fix: str = ""


def _system() -> Finding:
    release = platform.release()
    text = f"{platform.system()} {release}, Python {platform.python_version()}"
    if sys.platform != "linux":
        return Finding(
            what="system",
            found=text,
            verdict="limited",
            fix="nodes need Linux; sessions work here over TCP",
        )
    major, minor = (int(part) for part in release.split(".")[:2])
    if (major, minor) < (5, 10):
        return Finding(
            what="system",
            found=text,
            verdict="broken",
            fix="nodes need Linux 5.10 or newer",
        )
    return Finding(what="system", found=text)


def _run_directory() -> Finding:
    path = hosts.run_directory(Settings.read().run_dir)
    hosts.check_length(path)
    return Finding(what="run directory", found=f"{path}, host {hosts.host_id(path)}")


def _memory_files() -> Finding:
    if segments.leases_work():
        return Finding(
            what="memory files",
            found="leases on them are granted: freed segments are used again, warm",
        )
    return Finding(
        what="memory files",
        found="no leases on them: segments are sealed and never used again",
        verdict="limited",
        fix="use a kernel that grants F_SETLEASE on memory files",
    )


def _memory() -> Finding:
    facts = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines()
    )
    total, free = (
        int(facts[k].split()[0]) * 1024 for k in ("MemTotal", "MemAvailable")
    )
    return Finding(
        what="memory",
        found=f"{human_bytes(total)} in all, {human_bytes(free)} available",
    )


def _cgroups() -> Finding:
    limits = {
        "v2": Path("/sys/fs/cgroup/memory.max"),
        "v1": Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    }
    for version, path in limits.items():
        if path.exists():
            text = path.read_text().strip()
            unlimited = text == "max" or int(text) > 1 << 60
            limit = "no limit" if unlimited else human_bytes(int(text))
            return Finding(what="memory cgroup", found=f"{version}, {limit}")
    return Finding(what="memory cgroup", found="none that can be read")


def _budget() -> Finding:
    from tensorcast_dask.worker_plugin.dask_private import machine_bytes
    from tensorcast_dask.worker_plugin.state.budgets import excess_of, oversold

    asked, has_bytes = Settings.read().node.host_memory, machine_bytes()
    if asked is None:
        text = f"half of a worker's share of {human_bytes(has_bytes)}"
    else:
        text = f"{asked:.0%} of the machine" if 0 < asked < 1 else human_bytes(asked)
    given = hosts.budgets(hosts.run_directory(Settings.read().run_dir))
    if given:
        text += f"; the {len(given)} that live here may take {human_bytes(sum(given))}"
    excess = excess_of(asked, machine_bytes=has_bytes) or oversold(
        given, machine_bytes=has_bytes
    )
    return Finding(
        what="host memory of a node",
        found=text,
        verdict="limited" if excess else "ok",
        fix=excess,
    )


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} now, {hard} at most"
    if hard < _LOW_DESCRIPTORS:
        return Finding(
            what="descriptors",
            found=text,
            verdict="limited",
            fix="raise the hard limit of open files: each large segment takes one",
        )
    return Finding(what="descriptors", found=text)


def _maps() -> Finding:
    count = int(Path("/proc/sys/vm/max_map_count").read_text())
    return Finding(what="memory maps", found=f"{count} a process (vm.max_map_count)")


def _congestion() -> Finding:
    allowed = congestion.allowed_congestion()
    return Finding(what="TCP congestion control", found=", ".join(allowed))


def _ptrace() -> Finding:
    path = Path("/proc/sys/kernel/yama/ptrace_scope")
    scope = path.read_text().strip() if path.exists() else "absent"
    return Finding(
        what="reading other processes",
        found=f"Yama {scope}; registered memory is served by its owner's own thread",
    )


def _direct_io() -> Finding:
    path = Path.cwd()
    probe = path / f".tensorcast-doctor-{os.getpid()}"
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    except OSError as error:
        return Finding(
            what="O_DIRECT", found=f"not on {path} ({error.strerror}): buffered reads"
        )
    os.close(fd)
    probe.unlink()
    return Finding(what="O_DIRECT", found=f"works on {path}")


def _cuda() -> Finding:
    if not Path("/proc/driver/nvidia/version").exists():
        return Finding(what="CUDA", found="no driver: host and disk tiers only")
    line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    return Finding(what="CUDA", found=line)


def _devices() -> Finding:
    """Say what the setting `device` comes to; no library is imported for it."""
    settings = Settings.read()
    spec, asked = settings.device, settings.node.device_memory
    if spec.kind == "emulated":
        each = human_bytes(spec.nbytes)
        return Finding(
            what="devices", found=f"{spec.count} emulated, {each} each{_tier(asked)}"
        )
    kinds = [spec.kind] if spec.kind else ["cupy", "torch"]
    kind = next((k for k in kinds if importlib.util.find_spec(k) is not None), "")
    missing = []
    if not Path("/proc/driver/nvidia/version").exists():
        missing.append("the NVIDIA driver")
    if not kind:
        missing.append(" or ".join(_INSTALL[k] for k in kinds))
    if not missing:
        return Finding(
            what="devices", found=f"those of CUDA, through {kind}{_tier(asked)}"
        )
    fix = (
        f"install {' and '.join(missing)}, or set tensorcast.device to emulated:1x1GiB"
    )
    if not (spec.kind or asked):  # nobody asked for any
        return Finding(what="devices", found=f"none: {' and '.join(missing)} missing")
    return Finding(what="devices", found="none", verdict="limited", fix=fix)


def _tier(asked: float) -> str:
    """Say what a node takes of its device."""
    if not asked:
        return "; no device tier (tensorcast.node.device-memory is 0)"
    much = f"{asked:.0%}" if asked < 1 else human_bytes(int(asked))
    return f"; a node takes {much} of one"


def _ucx() -> Finding:
    if importlib.util.find_spec("ucxx") is None:
        return Finding(
            what="UCX", found="ucxx is not installed: TCP and shared memory are used"
        )
    from tensorcast_dask.dataplane.transports import ucx_line

    lanes, mode = ucx_line.offered(), Settings.read().ucx
    rdma = {"rc", "dc"}.intersection(lanes)
    text = (
        f"{ucx_line.version()}: {', '.join(lanes)}; tensorcast.transfer.ucx is {mode}"
    )
    if rdma:
        text += "; it has RDMA, over which this package was never run"
    else:
        text += "; no RDMA (the wheel is built without verbs: use a system UCX for it)"
    return Finding(what="UCX", found=text)


def _versions() -> Finding:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} -")
    return Finding(what="packages", found=", ".join(found))


_LOOKS: Final[tuple[Callable[[], Finding], ...]] = (
    _system,
    _run_directory,
    _memory_files,
    _memory,
    _cgroups,
    _budget,
    _descriptors,
    _maps,
    _congestion,
    _ptrace,
    _direct_io,
    _cuda,
    _devices,
    _ucx,
    _versions,
)


def findings() -> list[Finding]:
    """Look at everything; what cannot be looked at is a finding too."""
    found = []
    for look in _LOOKS:
        try:
            found.append(look())
        except (OSError, ValueError, KeyError, TensorCastError) as error:
            what = look.__name__.strip("_").replace("_", " ")
            found.append(
                Finding(
                    what=what, found=str(error), verdict="broken", fix="see the message"
                )
            )
    return found


def doctor(*, as_json: bool) -> None:
    """Print what was found; exit with 1 when something is broken."""
    found = findings()
    if as_json:
        show_json(found)
    else:
        show_table(
            "",
            ("what", "verdict", "found", "to do"),
            ((each.what, each.verdict, each.found, each.fix) for each in found),
        )
    if any(each.verdict == "broken" for each in found):
        sys.exit(1)
