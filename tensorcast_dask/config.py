"""Settings: from `dask.config`, the environment and arguments to one frozen struct.

Rules:

1. Four sources, later ones win: `tensorcast.yaml` beside this file, the section
   `tensorcast` of `dask.config`, variables `TENSORCAST_<SECTION>__<KEY>`, arguments.
2. A setting that is unknown or out of range raises InvalidArgument and names the setting
   with what it takes; nothing has been started by then.
3. The scheduler's settings hold for the cluster. `node.*`, `http.*`, `host`, `device` and `run-dir`
   are a host's own: there a worker's configuration wins over the scheduler's, and arguments
   (`LocalCluster(host_memory=...)`) win over both.
4. Only `local_tree` imports Dask, and only when it is called.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tensorcast_dask.exceptions import InvalidArgument
from tensorcast_dask.tensors.devices import DeviceSpec, parse_devices
from tensorcast_dask.tensors.messages import StoreSettings
from tensorcast_dask.tensors.quantities import (
    BYTE_UNITS,
    parse_bytes,
    parse_ports,
    parse_quantity,
    parse_seconds,
)

if TYPE_CHECKING:
    from tensorcast_dask.tensors.ids import HostId

__all__ = [
    "HOSTS_OWN",
    "NodeSettings",
    "Settings",
    "Tree",
    "hosts_own",
    "local_tree",
    "merged",
]

log = logging.getLogger(__name__)

#: Settings as written, nested by section; keys with `-`.
Tree = dict[str, Any]

ENVIRONMENT_PREFIX: Final = "TENSORCAST_"
#: Variables of that prefix that belong to other rooms.
_OTHERS_VARIABLES: Final = re.compile(r"(FAULTS|TESTS?|NANNY|SCHEDULER|LOG)($|_)")
#: What a host decides for itself (rule 3).
HOSTS_OWN: Final = ("node", "host", "device", "http", "run-dir")


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        message = f"takes text, not {value!r}"
        raise ValueError(message)  # noqa: TRY004
    return str(value)


def _flag(value: object) -> bool:
    known = {
        "true": True,
        "1": True,
        "yes": True,
        "false": False,
        "0": False,
        "no": False,
    }
    found = known.get(str(value).strip().lower())
    if found is None:
        message = f"takes true or false, not {value!r}"
        raise ValueError(message)
    return found


def _share(value: object) -> float:
    share = parse_quantity(value, {"": 1.0}, "0.05")
    if share >= 1:
        message = f"takes a share below 1, not {value!r}"
        raise ValueError(message)
    return share


def _count(value: object, *, least: int = 0) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not text.isdecimal() or int(text) < least:
        message = f"takes a whole number of at least {least}, not {value!r}"
        raise ValueError(message)
    return int(text)


def _connections(value: object) -> int:
    return 0 if value is None else _count(value, least=1)


def _some(value: object) -> int:
    return _count(value, least=1)


def _rate(value: object) -> float:
    return parse_quantity(value, BYTE_UNITS, "200 MiB")


def _memory(value: object) -> int | float | None:
    """Bytes, a share of the machine below 1, or None."""
    if value is None or value == "":
        return None
    amount = parse_quantity(value, BYTE_UNITS, "1 GiB")
    return amount if 0 < amount < 1 else round(amount)


def _device_memory(value: object) -> float:
    """Bytes, a share of the device below 1, or 0 for none."""
    if value is None or value == "":
        return 0.0
    return parse_quantity(value, BYTE_UNITS, "1 GiB")


def _ordinal(value: object) -> int:
    """Take the number of a device; -1 = by rule."""
    return -1 if value is None or value == "" else _count(value)


def _warm(value: object) -> int:
    return -1 if value is None else parse_bytes(value)


def _some_bytes(value: object) -> int:
    nbytes = parse_bytes(value)
    if nbytes < 4096:
        message = f"takes at least 4096 bytes, not {value!r}"
        raise ValueError(message)
    return nbytes


def _names(value: object) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(
        isinstance(p, str) for p in parts
    ):
        message = f"takes a list of names, not {value!r}"
        raise ValueError(message)
    return tuple(part.strip() for part in parts if part.strip())


def _uids(value: object) -> tuple[int, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        message = f"takes a list of user ids, not {value!r}"
        raise ValueError(message)  # noqa: TRY004
    return tuple(_count(part) for part in parts)


def _labels(value: object) -> dict[str, str]:
    if isinstance(value, str):
        pairs = (part.partition("=") for part in value.split(",") if part.strip())
        return {name.strip(): text.strip() for name, _, text in pairs}
    if not isinstance(value, Mapping):
        message = f'takes a mapping of names to text, or "a=1,b=2", not {value!r}'
        raise ValueError(message)  # noqa: TRY004
    return {_text(name): _text(text) for name, text in value.items()}


def _on_close(value: object) -> str:
    if value is None:
        return ""
    if value not in {"end", "keep"}:
        message = f'takes "end" or "keep", not {value!r}'
        raise ValueError(message)
    return str(value)


def _ucx(value: object) -> str:
    if isinstance(value, bool):  # YAML reads off and on as truth values
        value = "on" if value else "off"
    if value not in {"off", "auto", "on"}:
        message = f'takes "off", "auto" or "on", not {value!r}'
        raise ValueError(message)
    return str(value)


def _folder(value: object) -> str:
    """Take an absolute path: another process's working directory is another."""
    text = _text(value)
    if text and not Path(text).is_absolute():
        message = f"takes an absolute path, not {value!r}"
        raise ValueError(message)
    return text


def _http_ports(value: object) -> tuple[int, int] | None:
    """Ports, or None: no gateway."""
    return None if value is None or value == "" else parse_ports(value)


def _journal(value: object) -> str:
    text = _text(value)
    if not text:
        message = 'takes "temporary", ":memory:" or the path of a file'
        raise ValueError(message)
    return text


#: Each setting: where it is written, and what reads it. The field's name is the path
#: with `_` for `.` and `-`, with the unit added where it has one.
_READERS: Final[dict[str, tuple[str, Callable[[object], Any]]]] = {
    "cluster": ("cluster", _text),
    "run-dir": ("run_dir", _folder),
    "host": ("host", _text),
    "separate-hosts": ("separate_hosts", _flag),
    "device": ("device", parse_devices),
    "journal": ("journal", _journal),
    "on-close": ("on_close", _on_close),
    "dashboard.pages": ("dashboard_pages", _flag),
    "deadline.default": ("deadline_default_s", parse_seconds),
    "drain.timeout": ("drain_timeout_s", parse_seconds),
    "recovery.timeout": ("recovery_timeout_s", parse_seconds),
    "session.refused-timeout": ("refused_timeout_s", parse_seconds),
    "session.grace": ("session_grace_s", parse_seconds),
    "session.outcome-ttl": ("outcome_ttl_s", parse_seconds),
    "plan.result-ttl": ("plan_result_ttl_s", parse_seconds),
    "pin.limit": ("pin_limit_fraction", _share),
    "link.host": ("link_host", _text),
    "link.ports": ("link_ports", parse_ports),
    "lease.ttl": ("lease_ttl_s", parse_seconds),
    "lease.reservation-ttl": ("reservation_ttl_s", parse_seconds),
    "store.start-timeout": ("start_timeout_s", parse_seconds),
    "store.released-ttl": ("released_ttl_s", parse_seconds),
    "store.orphan-ttl": ("orphan_ttl_s", parse_seconds),
    "store.result-ttl": ("result_ttl_s", parse_seconds),
    "store.max-descriptors": ("max_descriptors", _count),
    "store.allow-uids": ("allow_uids", _uids),
    "segment.own-bytes": ("own_segment_bytes", _some_bytes),
    "segment.slab-bytes": ("slab_bytes", _some_bytes),
    "segment.step-bytes": ("alloc_step_bytes", _some_bytes),
    "segment.warm-bytes": ("warm_bytes", _warm),
    "memory.reserve": ("reserve_fraction", _share),
    "memory.reserve-min": ("reserve_min_bytes", parse_bytes),
    "transfer.chunk-bytes": ("chunk_bytes", _some_bytes),
    "transfer.connections": ("connections", _connections),
    "transfer.congestion": ("congestion", _text),
    "transfer.inflight-bytes": ("inflight_bytes", _some_bytes),
    "transfer.bandwidth": ("bandwidth_bytes_per_s", _rate),
    "transfer.stall": ("stall_s", parse_seconds),
    "transfer.ucx": ("ucx", _ucx),
    "http.dashboard": ("http_dashboard", _flag),
    "http.token-file": ("http_token_file", _folder),
    "http.connections": ("http_connections", _some),
    "http.watchers": ("http_watchers", _count),
    "http.reads": ("http_reads", _some),
    "node.host-memory": ("host_memory", _memory),
    "node.device-memory": ("device_memory", _device_memory),
    "node.device": ("device_number", _ordinal),
    "node.disk-dir": ("disk_dir", _folder),
    "node.disk-memory": ("disk_bytes", parse_bytes),
    "node.disk-dir-allow-tmpfs": ("disk_dir_allow_tmpfs", _flag),
    "node.disk-direct": ("disk_direct", _flag),
    "node.data-host": ("data_host", _text),
    "node.data-ports": ("data_ports", parse_ports),
    "node.http-host": ("http_host", _text),
    "node.http-ports": ("http_ports", _http_ports),
    "node.roles": ("roles", _names),
    "node.labels": ("labels", _labels),
}
#: Settings whose value is a mapping, not a section.
_MAPPINGS: Final = {"node.labels"}


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What belongs to one node (section `tensorcast.node`)."""

    #: Bytes when at least 1, a share of the machine below, None = by rule.
    host_memory: int | float | None
    #: Bytes when at least 1, a share of the device below, 0 = no device tier.
    device_memory: float
    #: Which device is the node's; -1 = by rule.
    device_number: int
    disk_dir: str
    disk_bytes: int
    disk_dir_allow_tmpfs: bool
    disk_direct: bool
    data_host: str
    data_ports: tuple[int, int]
    http_host: str
    #: None = no gateway.
    http_ports: tuple[int, int] | None
    roles: tuple[str, ...]
    labels: dict[str, str]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting, read and checked. Bytes and seconds; "" where a text is not set."""

    cluster: str
    run_dir: str
    host: str
    separate_hosts: bool
    device: DeviceSpec
    dashboard_pages: bool
    journal: str
    on_close: str
    deadline_default_s: float
    drain_timeout_s: float
    recovery_timeout_s: float
    refused_timeout_s: float
    session_grace_s: float
    outcome_ttl_s: float
    plan_result_ttl_s: float
    pin_limit_fraction: float
    link_host: str
    link_ports: tuple[int, int]
    lease_ttl_s: float
    reservation_ttl_s: float
    start_timeout_s: float
    released_ttl_s: float
    orphan_ttl_s: float
    result_ttl_s: float
    max_descriptors: int
    allow_uids: tuple[int, ...]
    own_segment_bytes: int
    slab_bytes: int
    alloc_step_bytes: int
    warm_bytes: int
    reserve_fraction: float
    reserve_min_bytes: int
    chunk_bytes: int
    connections: int
    congestion: str
    inflight_bytes: int
    bandwidth_bytes_per_s: float
    stall_s: float
    ucx: str
    http_dashboard: bool
    http_token_file: str
    http_connections: int
    http_watchers: int
    http_reads: int
    node: NodeSettings

    @classmethod
    def read(cls, arguments: Tree | None = None) -> Settings:
        """Read this process's settings, with `arguments` over them.

        Raises
        ------
        InvalidArgument
            When a setting is unknown or out of range.
        """
        return cls.of(merged(local_tree(), arguments or {}))

    @classmethod
    def of(cls, tree: Tree) -> Settings:
        """Check a tree of settings, the defaults filling what it leaves out.

        Raises
        ------
        InvalidArgument
            When a setting is unknown or out of range.
        """
        given = _flat(merged(tree))
        for path in given.keys() - _READERS.keys():
            near = get_close_matches(path, _READERS, n=1)
            hint = f"; did you mean tensorcast.{near[0]}?" if near else ""
            message = f"there is no setting tensorcast.{path}{hint}"
            raise InvalidArgument(message)
        given = _flat(_defaults()) | given
        cluster: dict[str, Any] = {}
        node: dict[str, Any] = {}
        for path, (field, reader) in _READERS.items():
            try:
                value = reader(given[path])
            except ValueError as error:
                message = f"setting tensorcast.{path} {error}"
                raise InvalidArgument(message) from error
            (node if path.startswith("node.") else cluster)[field] = value
        settings = cls(node=NodeSettings(**node), **cluster)
        _check_together(settings)
        return settings

    @property
    def ends_stores(self) -> bool:
        """Whether a clean stop of the scheduler ends the stores too."""
        if self.on_close:
            return self.on_close == "end"
        return self.journal in {"temporary", ":memory:"}

    def for_store(
        self,
        *,
        host_memory_bytes: int,
        cluster_name: str,
        host: HostId,
        data_host: str,
    ) -> StoreSettings:
        """Make what a store is told; what depends on the worker comes as arguments."""
        node = self.node
        return StoreSettings(
            run_dir=self.run_dir,
            cluster_name=cluster_name,
            host=host,
            host_memory_bytes=host_memory_bytes,
            reserve_fraction=self.reserve_fraction,
            reserve_min_bytes=self.reserve_min_bytes,
            own_segment_bytes=self.own_segment_bytes,
            slab_bytes=self.slab_bytes,
            alloc_step_bytes=self.alloc_step_bytes,
            warm_bytes=self.warm_bytes,
            chunk_bytes=self.chunk_bytes,
            connections=self.connections,
            congestion=self.congestion,
            inflight_bytes=self.inflight_bytes,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            stall_s=self.stall_s,
            ucx=self.ucx,
            lease_ttl_s=self.lease_ttl_s,
            reservation_ttl_s=self.reservation_ttl_s,
            released_ttl_s=self.released_ttl_s,
            orphan_ttl_s=self.orphan_ttl_s,
            result_ttl_s=self.result_ttl_s,
            data_host=node.data_host or data_host,
            data_ports=node.data_ports,
            disk_dir=node.disk_dir,
            disk_bytes=node.disk_bytes,
            disk_dir_allow_tmpfs=node.disk_dir_allow_tmpfs,
            disk_direct=node.disk_direct,
            allow_uids=self.allow_uids,
            max_descriptors=self.max_descriptors,
            roles=node.roles,
            labels=node.labels,
        )


def _check_together(settings: Settings) -> None:
    """Refuse settings that contradict one another."""
    if settings.own_segment_bytes > settings.slab_bytes:
        message = (
            "setting tensorcast.segment.own-bytes must not be above segment.slab-bytes: "
            "what has no segment of its own must fit a slab"
        )
        raise InvalidArgument(message)
    if settings.lease_ttl_s < 0.5:
        message = "setting tensorcast.lease.ttl takes at least 500ms"
        raise InvalidArgument(message)


def merged(*trees: Tree) -> Tree:
    """Merge trees of settings, later ones over earlier ones; keys with `-`."""
    result: Tree = {}
    for tree in trees:
        for raw_key, value in tree.items():
            key = str(raw_key).replace("_", "-")
            before = result.get(key)
            if isinstance(value, Mapping) and key != "labels":
                base = before if isinstance(before, dict) else {}
                result[key] = merged(base, dict(value))
            else:
                result[key] = value
    return result


def local_tree() -> Tree:
    """Give what this process's `dask.config` and environment say, unread and unchecked."""
    import dask.config  # noqa: PLC0415  (rule 4)

    section = dask.config.get("tensorcast", None) or {}
    return merged(dict(section), _from_environment(os.environ))


def hosts_own(tree: Tree) -> Tree:
    """Give the part of a tree that a host decides for itself (rule 3)."""
    return {key: value for key, value in merged(tree).items() if key in HOSTS_OWN}


def _from_environment(environment: Mapping[str, str]) -> Tree:
    tree: Tree = {}
    for variable, value in environment.items():
        rest = variable.removeprefix(ENVIRONMENT_PREFIX)
        if rest == variable or _OTHERS_VARIABLES.match(rest):
            continue
        path = rest.lower().replace("__", ".").replace("_", "-")
        if path not in _READERS:
            log.warning("%s names no setting of tensorcast and is ignored", variable)
            continue
        section, _, key = path.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[key] = value or None
    return tree


@cache
def _defaults() -> Tree:
    import yaml  # noqa: PLC0415  (PyYAML comes with Dask)

    path = Path(__file__).with_name("tensorcast.yaml")
    return merged(yaml.safe_load(path.read_text())["tensorcast"])


def _flat(tree: Tree, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and path not in _MAPPINGS:
            flat |= _flat(dict(value), f"{path}.")
        else:
            flat[path] = value
    return flat
