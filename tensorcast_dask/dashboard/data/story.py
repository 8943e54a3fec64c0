"""The page *story* of one artifact (or node, or plan): how it stands, and what happened to it."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.dashboard.data.shared import (
    Columns,
    Told,
    columns,
    duration,
    public,
    short,
    text,
)
from tensorcast_dask.scheduler_plugin.state.records import info_of
from tensorcast_dask.tensors.ids import ArtifactId
from tensorcast_dask.tensors.quantities import human_bytes

if TYPE_CHECKING:
    from tensorcast_dask.scheduler_plugin.state.catalog import Catalog

__all__ = ["VERSIONS", "Subject", "story"]

#: Most versions that are listed.
VERSIONS: Final = 64


class Subject(msgspec.Struct, frozen=True):
    """Of what: an id of an artifact, an identity of a node, or `plan:KEY`."""

    ref: str = ""


def story(catalog: Catalog, subject: Subject, *, zero_s: float) -> Told:
    """Make the page; `zero_s` as for `events`."""
    now_s = catalog.outbox.now_s
    ref = subject.ref
    versions = _versions(catalog, ref)
    lines = columns("at", "what")
    for ago_s, line in reversed(catalog.stories.of(ref, now_s=now_s)):
        lines["at"].append(round((zero_s + now_s - ago_s) * 1000))
        lines["what"].append(short(line, 400))
    present = catalog.explaining.now(ref) if ref else []
    empty = ""
    if not (lines["at"] or versions["version"] or present):
        empty = (
            "Open this page by a click on an artifact of the page Placement."
            if not ref
            else "Nothing is known of what is called so, or not any more."
        )
    return Told(
        columns={"versions": versions, "lines": lines},
        texts={
            "title": text(ref, 200) or "no artifact is chosen",
            "now": "<br>".join(text(line) for line in present),
            "empty": empty,
        },
        counts={"versions": len(versions["version"]), "lines": len(lines["at"])},
    )


def _versions(catalog: Catalog, ref: str) -> Columns:
    found = columns(
        "version", "stage", "bytes", "tensors", "owner", "copies", "pinned", "labels"
    )
    artifact = catalog.names.artifacts.get(ArtifactId(ref))
    if artifact is None:
        return found
    now_s = catalog.outbox.now_s
    for record in islice(reversed(artifact.versions.values()), VERSIONS):
        info = info_of(record, lost=catalog.holders.is_lost(record))
        where = [
            f"{node.label} ({'+'.join(record.holders[node.node].tiers)})"
            for node in catalog.holders.listed(record)
        ]
        until_s = max(
            (catalog.pins.until_s(record.generation, one) for one in record.holders),
            default=0.0,
        )
        left_s = until_s - now_s
        found["version"].append(record.version)
        found["stage"].append(str(info.stage))
        found["bytes"].append(human_bytes(record.nbytes))
        found["tensors"].append(record.tensors)
        found["owner"].append(str(record.owner))
        found["copies"].append(short(", ".join(where) or "none", 200))
        found["pinned"].append(
            "" if not until_s else duration(left_s) if left_s < 1e9 else "yes"
        )
        found["labels"].append(public(record.labels))
    return found
