"""Artifacts, versions, aliases and views: what a name means.

Rules:

1. One name means one thing: an artifact, an alias or a view.
2. `newest` of an artifact is over committed versions; a version that is being created is
   found by its number and generation only.
3. A generation that is not here and could have been minted is Gone, any other NotFound.
4. Nothing here knows of nodes, sessions or time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tensorcast_dask.exceptions import (
    AlreadyExists,
    Gone,
    Incomplete,
    Mismatch,
    NotFound,
    TensorCastError,
)
from tensorcast_dask.scheduler_plugin.state.listing import SortedIds
from tensorcast_dask.scheduler_plugin.state.numbers import Numbers
from tensorcast_dask.scheduler_plugin.state.records import (
    NO_VERSION,
    AliasRecord,
    VersionRecord,
    ViewRecord,
)
from tensorcast_dask.tensors.ids import (
    ArtifactId,
    Generation,
    Version,
)

__all__ = ["Artifact", "Names"]


@dataclass(slots=True)
class Artifact:
    """All versions of one id."""

    #: Creating and committed ones, by number; never empty.
    versions: dict[Version, VersionRecord] = field(default_factory=dict)
    #: Highest committed number, 0 = none.
    newest: Version = NO_VERSION
    #: Highest published number, 0 = none.
    latest: Version = NO_VERSION

    def look(self) -> None:
        """Find `newest` and `latest` again after a version went away."""
        self.newest = self.latest = Version(0)
        for number, record in self.versions.items():
            if not record.creating:
                self.newest = max(self.newest, number)
                if record.published:
                    self.latest = max(self.latest, number)


class Names:
    """The name table.

    Attributes
    ----------
    numbers : Numbers
        What was given out.
    versions : dict
        Every version record, by generation.
    artifacts : dict
        By id; exactly the ids of `versions`.
    aliases, views : dict
        By name; `views` only of bases in `versions`.
    """

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers
        self.versions: dict[Generation, VersionRecord] = {}
        self.artifacts: dict[ArtifactId, Artifact] = {}
        self.aliases: dict[ArtifactId, AliasRecord] = {}
        self.views: dict[ArtifactId, ViewRecord] = {}
        self._views_of: dict[Generation, dict[ArtifactId, None]] = {}
        #: Ids with a committed version.
        self.listed = SortedIds()
        #: Told of each version that came, has another size now, or went.
        self.on_change: Callable[[VersionRecord], None] = _nobody

    # ------------------------------------------------------------ look-ups
    def get(self, generation: Generation) -> VersionRecord:
        """Find a version, creating or committed.

        Raises
        ------
        Gone, NotFound
            See rule 3.
        """
        record = self.versions.get(generation)
        if record is not None:
            return record
        if self.numbers.minted(generation):
            message = (
                f"generation {generation} is gone: it was destroyed, given back or never "
                "completed; ask for the artifact by its name again"
            )
            raise Gone(message, {"generation": generation})
        message = f"no artifact version has generation {generation}"
        raise NotFound(message, {"generation": generation})

    def committed(self, generation: Generation) -> VersionRecord:
        """Find a committed version.

        Raises
        ------
        Gone, NotFound, Incomplete
            When there is none.
        """
        record = self.get(generation)
        if record.creating:
            raise self._incomplete(record)
        return record

    def resolve(
        self, name: ArtifactId, version: int, *, published: bool
    ) -> tuple[VersionRecord, ViewRecord | None]:
        """Find what a name means now (`messages.Resolve`).

        Raises
        ------
        NotFound, Gone, Incomplete
            When it means nothing that can be read.
        """
        artifact = self.artifacts.get(name)
        if artifact is not None:
            return self._version_of(name, artifact, version, published=published), None
        view = self.views.get(name)
        if view is not None:
            base = self.versions[view.base]
            self._check_derived(base, version, published=published)
            return base, view
        alias = self.aliases.get(name)
        if alias is not None and alias.target:
            target = self.versions.get(alias.target)
            if target is None:
                message = (
                    f"alias {name!r} means a version of {alias.target_id!r} that was "
                    "destroyed; move the alias"
                )
                raise Gone(message, {"generation": alias.target})
            self._check_derived(target, version, published=published)
            return target, None
        raise self._absent(name, version)

    def _version_of(
        self, name: ArtifactId, artifact: Artifact, version: int, *, published: bool
    ) -> VersionRecord:
        number = version or artifact.latest or (0 if published else artifact.newest)
        record = artifact.versions.get(Version(number))
        if record is not None and not record.creating:
            self._check_derived(record, 0, published=published)
            return record
        if record is not None:
            raise self._incomplete(record)
        if number:
            raise self._absent(name, version)
        if artifact.newest:
            message = f"no version of {name!r} is published yet; publish one"
            raise NotFound(message, {"newest": artifact.newest})
        raise self._incomplete(next(iter(artifact.versions.values())))

    def _check_derived(
        self, record: VersionRecord, version: int, *, published: bool
    ) -> None:
        if version not in (0, record.version):
            message = f"this name means version {record.version}, not {version}"
            raise NotFound(message, {"version": record.version})
        if published and not record.published:
            message = f"version {record.version} of {record.id!r} is not published"
            raise NotFound(message, {"version": record.version})

    def _absent(self, name: ArtifactId, version: int) -> TensorCastError:
        highest = self.numbers.issued(name)
        if version > highest or (not highest and not version):
            what = f"version {version} of {name!r}" if version else repr(name)
            message = (
                f"nobody has made {what}; list() (`tensorcast ls`) shows what there is"
            )
            return NotFound(message, {"highest": highest})
        what = f"version {version}" if version else "every version"
        return Gone(f"{what} of {name!r} was destroyed", {"highest": highest})

    def _incomplete(self, record: VersionRecord) -> Incomplete:
        message = (
            f"version {record.version} of {record.id!r} is still being made; try again "
            "when its writer has finished"
        )
        return Incomplete(message, {"generation": record.generation})

    # ------------------------------------------------------------ numbers
    def free_number(self, name: ArtifactId, version: int) -> Version:
        """Find the number that a creation gets (`messages.Create.version`).

        Raises
        ------
        AlreadyExists
            When the id, or that version of it, is taken.
        Mismatch
            When the number has been used before, or will never be.
        """
        self.check_unaliased(name)
        artifact = self.artifacts.get(name)
        taken = artifact.versions if artifact is not None else {}
        if version == 0 and artifact is not None:
            raise self._taken(taken[artifact.latest or artifact.newest or max(taken)])
        highest = self.numbers.issued(name)
        if version <= 0:
            return Version(max([highest, *taken]) + 1)
        record = taken.get(Version(version))
        if record is not None:
            raise self._taken(record)
        if version <= highest:
            message = (
                f"version {version} of {name!r} cannot be made: numbers only go up, the "
                f"next is {highest + 1}"
            )
            raise Mismatch(message, {"highest": highest})
        return Version(version)

    def check_unaliased(self, name: ArtifactId) -> None:
        """Refuse a name that is an alias or a view.

        Raises
        ------
        AlreadyExists
            Then.
        """
        alias = self.aliases.get(name)
        if alias is not None and alias.target:
            message = f"{name!r} is an alias; remove it first or take another name"
            raise AlreadyExists(message, {"generation": alias.target})
        if name in self.views:
            message = f"{name!r} is a view; destroy it first or take another name"
            raise AlreadyExists(message, {"generation": self.views[name].base})

    def _taken(self, record: VersionRecord) -> AlreadyExists:
        state = "is being made" if record.creating else "exists"
        message = (
            f"version {record.version} of {record.id!r} {state}; destroy it, or put with "
            'version="next" (--next)'
        )
        return AlreadyExists(
            message,
            {
                "generation": record.generation,
                "version": record.version,
                "index_digest": record.index_digest,
                "nbytes": record.nbytes,
                "creating": record.creating,
            },
        )

    # ------------------------------------------------------------ changes
    def add(self, record: VersionRecord) -> None:
        """Put a record in; its number is free (`free_number`)."""
        artifact = self.artifacts.setdefault(record.id, Artifact())
        assert record.version not in artifact.versions, "catalog: a number given twice"
        assert record.generation not in self.versions, (
            "catalog: a generation used twice"
        )
        artifact.versions[record.version] = record
        self.versions[record.generation] = record
        if not record.creating:
            self._show(record, artifact)
        self.on_change(record)

    def resize(self, record: VersionRecord, nbytes: int) -> None:
        """Take the size of a creation that nobody knew before."""
        record.nbytes = nbytes
        self.on_change(record)

    def commit(self, record: VersionRecord) -> None:
        """Let a complete creation be seen."""
        record.creating = False
        self._show(record, self.artifacts[record.id])

    def _show(self, record: VersionRecord, artifact: Artifact) -> None:
        if not artifact.newest:
            self.listed.add(record.id)
        artifact.newest = max(artifact.newest, record.version)
        if record.published:
            artifact.latest = max(artifact.latest, record.version)

    def publish(self, record: VersionRecord) -> None:
        """Make a committed version visible to `latest`."""
        record.published = True
        artifact = self.artifacts[record.id]
        artifact.latest = max(artifact.latest, record.version)

    def remove(self, record: VersionRecord) -> list[ViewRecord]:
        """Take a record out, with the views on it; returns these."""
        del self.versions[record.generation]
        artifact = self.artifacts[record.id]
        del artifact.versions[record.version]
        artifact.look()
        if not artifact.newest:
            self.listed.discard(record.id)
        if not artifact.versions:
            del self.artifacts[record.id]
        self.on_change(record)
        names = self._views_of.pop(record.generation, {})
        return [self.views.pop(name) for name in names]

    def add_view(self, view: ViewRecord) -> None:
        """Make a view findable."""
        self.views[view.id] = view
        self._views_of.setdefault(view.base, {})[view.id] = None

    def remove_view(self, name: ArtifactId) -> None:
        """Forget a view; its base stays."""
        view = self.views.pop(name)
        del self._views_of[view.base][name]


def _nobody(record: VersionRecord) -> None:
    """Nobody counts."""
