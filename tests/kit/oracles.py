"""Promises of the catalog, one function each, to be asked after every step.

Each takes the `Catalog` (and what was told of it so far) and raises AssertionError with
the promise that is broken. Used from unit, property and simulation tests alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tensorcast_dask.scheduler_plugin.state.catalog import Catalog
from tensorcast_dask.scheduler_plugin.state.events import Reply
from tensorcast_dask.tensors.ids import ArtifactId, Generation, Version
from tensorcast_dask.tensors.messages import (
    ArtifactInfo,
    Listed,
    Stage,
)

__all__ = ["Told", "check_catalog"]


@dataclass
class Told:
    """What the outside has been told, for promises that span time."""

    #: Content of each version that anybody was told of.
    content: dict[tuple[ArtifactId, Version], tuple[Generation, str, int]] = field(
        default_factory=dict
    )
    published: set[Generation] = field(default_factory=set)
    destroyed: set[Generation] = field(default_factory=set)
    epoch: int = 0
    latest: dict[ArtifactId, Version] = field(default_factory=dict)

    def answered(self, catalog: Catalog, reply: Reply, durable: int) -> None:
        """Take note of an answer that goes out while `durable` is on disk."""
        match reply.value:
            case ArtifactInfo() as info:
                self._info(catalog, info, durable)
            case Listed() as listed:
                for info in listed.infos:
                    self._info(catalog, info, durable)
            case _:
                pass

    def _info(self, catalog: Catalog, info: ArtifactInfo, durable: int) -> None:
        if info.base or info.stage is Stage.CREATING:
            return
        nothing_told_that_is_not_on_disk(catalog, info, durable)
        key = (info.id, info.version)
        content = (info.generation, info.index_digest, info.nbytes)
        assert self.content.setdefault(key, content) == content, (
            f"version {key} was told with two contents"
        )
        if info.stage is Stage.PUBLISHED:
            self.published.add(info.generation)


def check_catalog(catalog: Catalog, told: Told) -> None:
    """Ask every oracle."""
    records_and_names_agree(catalog)
    replicas_mirror_holders(catalog)
    epochs_grow(catalog, told)
    numbers_are_used_once(catalog, told)
    published_stays_published(catalog, told)
    destroyed_never_returns(catalog, told)
    spare_replicas_have_another_copy(catalog)


def nothing_told_that_is_not_on_disk(
    catalog: Catalog, info: ArtifactInfo, durable: int
) -> None:
    """Durable before told."""
    pending = max(
        catalog.outbox.pending(info.id), catalog.outbox.pending(info.generation)
    )
    record = catalog.names.versions.get(info.generation)
    if record is not None and record.published == (info.stage is Stage.PUBLISHED):
        assert pending <= durable, (
            f"{info.id} v{info.version} was told at {durable}, its change is {pending}"
        )


def records_and_names_agree(catalog: Catalog) -> None:
    """At most one content of each (id, version); every index of names is exact."""
    names = catalog.names
    count = 0
    for name, artifact in names.artifacts.items():
        assert artifact.versions, f"{name!r} has no version"
        shown = {n for n, r in artifact.versions.items() if not r.creating}
        public = {n for n in shown if artifact.versions[n].published}
        assert artifact.newest == max(shown, default=0)
        assert artifact.latest == max(public, default=0)
        for number, record in artifact.versions.items():
            assert (record.id, record.version) == (name, number)
            assert names.versions[record.generation] is record
            if not record.creating:
                assert names.numbers.issued(name) >= number, (
                    "a version without its number"
                )
            count += 1
        assert name not in names.views
        alias = names.aliases.get(name)
        assert alias is None or not alias.target
    assert count == len(names.versions)
    listed = list(names.listed.starting("", at=""))
    assert listed == sorted(n for n, a in names.artifacts.items() if a.newest)
    assert all(view.base in names.versions for view in names.views.values())


def replicas_mirror_holders(catalog: Catalog) -> None:
    """The holders of each version are the versions of each holder."""
    forward = {
        (record.generation, node)
        for record in catalog.names.versions.values()
        for node in record.holders
    }
    back = {
        (generation, node)
        for node, held in catalog.replicas.by_node.items()
        for generation in held
    }
    assert forward == back
    assert all(
        replica.tiers
        for record in catalog.names.versions.values()
        for replica in record.holders.values()
    )


def epochs_grow(catalog: Catalog, told: Told) -> None:
    """An epoch never goes back."""
    assert catalog.epoch >= told.epoch
    told.epoch = catalog.epoch


def numbers_are_used_once(catalog: Catalog, told: Told) -> None:
    """A number that was told with one content never gets another, also after a destroy."""
    for (name, version), content in told.content.items():
        artifact = catalog.names.artifacts.get(name)
        record = artifact.versions.get(version) if artifact is not None else None
        if record is not None and not record.creating:
            assert (
                record.generation,
                record.index_digest,
                record.nbytes,
            ) == content, f"version {version} of {name!r} was issued twice"


def published_stays_published(catalog: Catalog, told: Told) -> None:
    """Published is final while the version exists."""
    for generation in told.published:
        record = catalog.names.versions.get(generation)
        assert record is None or record.published


def destroyed_never_returns(catalog: Catalog, told: Told) -> None:
    """A generation that was seen and is gone stays gone."""
    for generation in told.destroyed:
        assert generation not in catalog.names.versions
    known = {generation for generation, _, _ in told.content.values()}
    told.destroyed |= known - set(catalog.names.versions)


def spare_replicas_have_another_copy(catalog: Catalog) -> None:
    """Never the last copy: what a node was told is spare is listed elsewhere too."""
    for record in catalog.names.versions.values():
        listed = catalog.holders.listed(record)
        for node in listed:
            told = record.holders[node.node].told
            if told is not None and told[1]:
                assert len(listed) > 1, (
                    f"the last copy of {record.id!r} v{record.version} was called spare"
                )
