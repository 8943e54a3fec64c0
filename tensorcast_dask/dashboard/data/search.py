"""Which artifacts a page shows: found, grouped and put in order, a few at a time.

Rules:

1. A search is advanced by who has time: so many artifacts a call, however many there are.
   What comes or goes meanwhile is found by the next search.
2. One artifact costs the same however many versions it has: it is judged by its latest version.
3. A search that runs already tells what it has found so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.tensors.secrets import is_secret

if TYPE_CHECKING:
    from tensorcast_dask.scheduler_plugin.state.catalog import Catalog
    from tensorcast_dask.scheduler_plugin.state.records import VersionRecord
    from tensorcast_dask.tensors.ids import ArtifactId, NodeId
    from tensorcast_dask.tensors.messages import Tier

__all__ = ["NO_TENANT", "Group", "Grouping", "Search", "Sort", "Wanted"]

#: Most groups and tenants that are kept apart; what comes later goes into the last one.
MOST_GROUPS: Final = 2000
MOST_TENANTS: Final = 100
REST: Final = "(others)"
NO_TENANT: Final = "(none)"
TENANT: Final = "tenant"


class Grouping(StrEnum):
    """What makes artifacts one row."""

    NONE = "none"
    NAME = "name"  # up to the first "/"
    TENANT = "tenant"
    OWNER = "owner"


class Sort(StrEnum):
    """What comes first."""

    NAME = "name"
    SIZE = "size"
    COPIES = "copies"
    READS = "reads"


class Wanted(msgspec.Struct, frozen=True):
    """What somebody looks for.

    Attributes
    ----------
    name : str
        Part of the id; its beginning after "^". Upper and lower case are the same.
    label : str
        `key` or `key=value` of a label that is shown.
    tenant : str
        Value of the label `tenant`; "" any.
    group : Grouping
        What makes one row.
    sort : Sort
        What comes first.
    """

    name: str = ""
    label: str = ""
    tenant: str = ""
    group: Grouping = Grouping.NONE
    sort: Sort = Sort.NAME


@dataclass(slots=True)
class Group:
    """Some artifacts as one row."""

    name: str
    artifacts: int = 0
    nbytes: int = 0
    lost: int = 0
    #: Of each node and tier: replicas and bytes.
    held: dict[tuple[NodeId, Tier], list[int]] = field(default_factory=dict)


class Search:
    """One look through all artifacts.

    Attributes
    ----------
    ids : list
        What fits, in order once it is `over`.
    groups : list
        The same in groups, where groups are wanted; filled when it is `over`.
    tenants : list
        All tenants that there are; filled when it is `over`.
    nbytes : int
        Of the latest versions of what fits.
    seen, total : int
        How far it is.
    """

    def __init__(self, catalog: Catalog, wanted: Wanted) -> None:
        self._catalog = catalog
        self.wanted = wanted
        self._name = wanted.name.removeprefix("^").casefold()
        self._begins = wanted.name.startswith("^")
        key, equals, value = wanted.label.partition("=")
        self._key, self._value = key.strip(), value.strip() if equals else None
        self._todo = _all_ids(catalog)
        self._ranks: list[float] = []
        self._groups: dict[str, Group] = {}
        self._tenants: dict[str, None] = {}
        self.ids: list[ArtifactId] = []
        self.groups: list[Group] = []
        self.tenants: list[str] = []
        self.nbytes = self.seen = 0
        self.total = len(self._todo)
        self.over = False

    def advance(self, count: int) -> bool:
        """Look at so many more; True when it is over."""
        if self.over:
            return True
        until = self.seen + count
        for name in self._todo[self.seen : until]:
            self._look(name)
        self.seen = min(until, self.total)
        if self.seen == self.total:
            self._settle()
        return self.over

    def _settle(self) -> None:
        """Put in order what is found."""
        self.over = True
        self._todo = []
        if self.wanted.sort is not Sort.NAME:  # by name they are
            order = sorted(range(len(self.ids)), key=self._ranks.__getitem__)
            self.ids = [self.ids[at] for at in order]
        self._ranks = []
        self.tenants = sorted(self._tenants)
        if self.wanted.sort is Sort.NAME:
            self.groups = sorted(self._groups.values(), key=lambda one: one.name)
        else:
            self.groups = sorted(
                self._groups.values(), key=lambda one: (-one.nbytes, one.name)
            )

    def _look(self, name: ArtifactId) -> None:
        artifact = self._catalog.names.artifacts.get(name)
        if artifact is None:
            return
        number = artifact.latest or artifact.newest or next(iter(artifact.versions))
        record = artifact.versions[number]
        tenant = record.labels.get(TENANT, "")
        if len(self._tenants) < MOST_TENANTS:
            self._tenants[tenant or NO_TENANT] = None
        if not self._fits(name, record, tenant):
            return
        self.nbytes += record.nbytes
        self.ids.append(name)
        self._ranks.append(self._rank(name, record))
        if self.wanted.group is not Grouping.NONE:
            self._put(self._group_of(name, record, tenant), record)

    def _fits(self, name: ArtifactId, record: VersionRecord, tenant: str) -> bool:
        wanted = self.wanted
        if self._name:
            folded = name.casefold()
            found = (
                folded.startswith(self._name) if self._begins else self._name in folded
            )
            if not found:
                return False
        if wanted.tenant and wanted.tenant != (tenant or NO_TENANT):
            return False
        if not self._key:
            return True
        value = None if is_secret(self._key) else record.labels.get(self._key)
        return value is not None and self._value in (None, value)

    def _rank(self, name: ArtifactId, record: VersionRecord) -> float:
        match self.wanted.sort:
            case Sort.SIZE:
                return -record.nbytes
            case Sort.COPIES:
                return len(record.holders)  # what has few is looked for
            case Sort.READS:
                usage, now_s = self._catalog.observed.usage, self._catalog.outbox.now_s
                return -usage.heat(name, now_s=now_s)
            case Sort.NAME:
                return 0.0

    # ------------------------------------------------------------ groups
    def _group_of(self, name: ArtifactId, record: VersionRecord, tenant: str) -> Group:
        match self.wanted.group:
            case Grouping.TENANT:
                key = tenant or NO_TENANT
            case Grouping.OWNER:
                key = str(record.owner)
            case _:
                head, slash, _ = name.partition("/")
                key = head + slash
        if key not in self._groups and len(self._groups) >= MOST_GROUPS:
            key = REST
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(key)
        return group

    def _put(self, group: Group, record: VersionRecord) -> None:
        group.artifacts += 1
        group.nbytes += record.nbytes
        group.lost += record.said_lost
        for node, replica in record.holders.items():
            if not replica.suspect:
                held = group.held.setdefault((node, replica.nearest), [0, 0])
                held[0] += 1
                held[1] += record.nbytes


def _all_ids(catalog: Catalog) -> list[ArtifactId]:
    """Give all ids in order: those that are listed, and the first versions in the making."""
    names = catalog.names
    ids = list(names.listed.starting("", at=""))
    if len(names.artifacts) > len(ids):
        ids += [name for name, one in names.artifacts.items() if not one.newest]
        ids.sort()
    return ids
