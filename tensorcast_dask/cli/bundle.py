"""`tensorcast debug bundle`: what somebody who helps must know, in one file, without secrets.

Rules:

1. What cannot be had is said in its place; a bundle of a sick cluster is a bundle.
2. Values of fields, labels and settings that are secrets by their names are not in it; nor is the
   cluster's token, in any spelling, wherever it might stand.
3. No bytes of any tensor are in it, and of the environment only our own variables.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import sys
import zipfile
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.cli.output import plain
from tensorcast_dask.dataplane import bearer
from tensorcast_dask.exceptions import TensorCastError
from tensorcast_dask.tensors.secrets import HIDDEN, is_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["scrubbed", "spellings", "write"]

_PACKAGES: Final = (
    "tensorcast-dask",
    "dask",
    "distributed",
    "tornado",
    "msgspec",
    "duckdb",
    "numpy",
    "torch",
    "bokeh",
)
_MOST: Final = 10_000
#: What one part may take: a scheduler that does not answer any more holds nobody up for long.
_PART_S: Final = 20.0
#: Of a plan: what it is found by.
_OURS: Final = frozenset({"key"})
_TABLES: Final = (
    "nodes",
    "versions",
    "replicas",
    "leases",
    "pins",
    "aliases",
    "views",
    "plans",
    "steps",
    "operations",
    "transfers",
    "events",
)


def write(cast: Any, path: Path) -> list[str]:
    """Write a bundle; give the names of its parts."""
    core = cast._core  # noqa: SLF001 - its token is to be kept out of it
    secrets = spellings(core.link.greeting.token)
    core.deadline_default_s = _PART_S
    parts: dict[str, Callable[[], Any]] = {
        "versions.json": _versions,
        "settings.json": _settings,
        "doctor.json": _doctor,
        "state.json": cast.debug_state,
        "nodes.json": cast.nodes,
        "instances.json": lambda: [one.state for one in cast.instances()],
        "signals.json": lambda: list(cast.signals.snapshot("", limit=_MOST).values()),
        "policies.json": cast.policies.list,
        **{f"tables/{name}.json": partial(_table, cast, name) for name in _TABLES},
        "story.json": lambda: _stories(cast),
    }
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.fchmod(fd, 0o600)  # of one that was there
    with (
        os.fdopen(fd, "wb") as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as bundle,
    ):
        for name, make in parts.items():
            bundle.writestr(name, _text(make, secrets))
    return list(parts)


def _text(make: Callable[[], Any], secrets: list[str]) -> str:
    try:
        value = plain(make())
    except Exception as error:  # noqa: BLE001 - rule 1
        value = {"not_there": f"{type(error).__name__}: {error}"}
    return json.dumps(scrubbed(value, secrets), indent=1, sort_keys=True)


def scrubbed(value: Any, secrets: Sequence[str] = ()) -> Any:
    """Give a value without those that are secrets, by their names or as they are (rule 2)."""
    if isinstance(value, dict):
        return {
            scrubbed(name, secrets): HIDDEN
            if is_secret(str(name))
            and name not in _OURS
            and not isinstance(each, dict | list)
            else scrubbed(each, secrets)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [scrubbed(each, secrets) for each in value]
    if not isinstance(value, str):
        return value
    for secret in secrets:
        value = value.replace(secret, HIDDEN)
    # Labels and facts stand as JSON in tables, and as Python or YAML in the environment.
    return _scrubbed_text(value, secrets) if value.startswith(("{", "[")) else value


def _scrubbed_text(text: str, secrets: Sequence[str]) -> str:
    try:
        inner = json.loads(text)
    except ValueError:
        return HIDDEN if is_secret(text) else text
    return json.dumps(scrubbed(inner, secrets))


def spellings(token: bytes) -> list[str]:
    """Give every way in which a secret may be written."""
    http = bearer.derived(token)
    return [
        token.hex(),
        token.hex().upper(),
        base64.b64encode(token).decode(),
        base64.urlsafe_b64encode(token).decode(),
        str(token),
        repr(token),
        http,
    ]


# ------------------------------------------------------------------ parts
def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {"python": sys.version, "machine": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _settings() -> dict[str, Any]:
    import dask.config

    from tensorcast_dask.config import Settings

    ours = {
        name: text
        for name, text in os.environ.items()
        if name.startswith("TENSORCAST_")
    }
    return {
        "here": Settings.read(),
        "written": dask.config.get("tensorcast", {}),
        "environment": ours,
    }


def _doctor() -> Any:
    from tensorcast_dask.cli.doctor import findings

    return findings()


def _table(cast: Any, name: str) -> list[dict[str, Any]]:
    found = cast.sql(f"SELECT * FROM {name}", limit=_MOST)  # noqa: S608 - a name of ours
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


def _stories(cast: Any) -> dict[str, Any]:
    """Tell why nodes, plans and running requests are as they are."""
    refs = [one.card.node for one in cast.nodes()]
    refs += [name.replace("/", ":", 1) for name in cast.signals.snapshot("plan/")]
    refs += [
        rid
        for (rid,) in cast.sql(
            "SELECT rid FROM operations WHERE status = 'running' LIMIT 100"
        ).rows
    ]
    found: dict[str, Any] = {}
    for ref in refs:
        try:
            found[ref] = cast.explain(ref)
        except TensorCastError as error:
            found[ref] = [f"{error.kind}: {error.message}"]
    return found
