"""Quotas: what artifacts of a prefix, or of a tenant, may take together.

Rules:

1. Counted are versions that the cluster owns, with the bytes of one copy, from when their name
   is taken: a creation that is given back gives its part back.
2. A quota is checked before anything is allocated. What is there already stays.
3. Which versions count is kept by generation, so that nothing is subtracted twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from tensorcast_dask.exceptions import QuotaExceeded
from tensorcast_dask.scheduler_plugin.state.checks import check_count, check_name
from tensorcast_dask.scheduler_plugin.state.events import Row
from tensorcast_dask.scheduler_plugin.state.names import Names
from tensorcast_dask.scheduler_plugin.state.outbox import Outbox
from tensorcast_dask.scheduler_plugin.state.records import VersionRecord, packed
from tensorcast_dask.tensors.ids import Generation
from tensorcast_dask.tensors.messages import Fact, Owner, QuotaState, SetQuota
from tensorcast_dask.tensors.signals import Reading

__all__ = ["QuotaRow", "Quotas"]


class QuotaRow(msgspec.Struct, array_like=True, frozen=True):
    """A quota in the journal."""

    name: str = ""
    prefix: str = ""
    tenant: str = ""
    nbytes: int = -1
    artifacts: int = -1


@dataclass(slots=True)
class _Quota:
    row: QuotaRow
    held: dict[Generation, int] = field(default_factory=dict)
    used_bytes: int = 0

    def covers(self, name: str, labels: dict[str, str]) -> bool:
        row = self.row
        ours = not row.tenant or labels.get("tenant") == row.tenant
        return ours and name.startswith(row.prefix)

    def put(self, generation: Generation, nbytes: int | None) -> None:
        self.used_bytes -= self.held.pop(generation, 0)
        if nbytes is not None:
            self.held[generation] = nbytes
            self.used_bytes += nbytes

    @property
    def state(self) -> QuotaState:
        row = self.row
        return QuotaState(
            name=row.name,
            prefix=row.prefix,
            tenant=row.tenant,
            nbytes=row.nbytes,
            artifacts=row.artifacts,
            used_bytes=self.used_bytes,
            used_artifacts=len(self.held),
        )


class Quotas:
    """All quotas."""

    def __init__(self, outbox: Outbox, names: Names) -> None:
        self._outbox = outbox
        self._names = names
        self._quotas: dict[str, _Quota] = {}
        names.on_change = self._changed

    def set(self, ask: SetQuota) -> QuotaState:
        """Make, change or take away a quota.

        Raises
        ------
        InvalidName, InvalidArgument
            When it cannot be.
        """
        check_name(ask.name, what="the quota's name")
        check_count(ask.nbytes, least=-1, most=1 << 62, what="nbytes")
        check_count(ask.artifacts, least=-1, most=1 << 62, what="artifacts")
        row = QuotaRow(ask.name, ask.prefix, ask.tenant, ask.nbytes, ask.artifacts)
        none = ask.nbytes < 0 and ask.artifacts < 0
        self._outbox.persist(
            Row(kind="quota", key=row.name, blob=None)
            if none
            else packed("quota", row.name, row)
        )
        if none:
            self._quotas.pop(row.name, None)
            return _Quota(row).state
        return self._begin(row).state

    def _begin(self, row: QuotaRow) -> _Quota:
        quota = self._quotas[row.name] = _Quota(row)
        for record in self._names.versions.values():
            if _counts(record) and quota.covers(record.id, record.labels):
                quota.put(record.generation, record.nbytes)
        return quota

    def recover(self, rows: Iterable[QuotaRow]) -> None:
        """Take quotas from the journal, after the versions."""
        for row in rows:
            self._begin(row)

    def check(self, name: str, labels: dict[str, str], nbytes: int) -> None:
        """Refuse what would pass a quota.

        Raises
        ------
        QuotaExceeded
            Then.
        """
        for quota in self._quotas.values():
            if not quota.covers(name, labels):
                continue
            row = quota.row
            if 0 <= row.nbytes < quota.used_bytes + nbytes:
                what = f"{nbytes} bytes more than the {quota.used_bytes} of {row.nbytes} bytes"
            elif 0 <= row.artifacts < len(quota.held) + 1:
                what = f"one version more than the {row.artifacts}"
            else:
                continue
            message = (
                f"{name!r} does not fit quota {row.name!r}: it would take {what} that are "
                "allowed; destroy others, or raise the quota"
            )
            data: dict[str, Fact] = {
                "quota": row.name,
                "used": quota.used_bytes,
                "nbytes": nbytes,
            }
            raise QuotaExceeded(message, data)

    def states(self) -> tuple[QuotaState, ...]:
        """List them."""
        return tuple(one.state for one in self._quotas.values())

    def readings(self) -> Iterator[tuple[str, Reading]]:
        """Tell them, for signals."""
        for one in self._quotas.values():
            row = one.row
            yield (
                f"quota/{row.name}",
                {
                    "prefix": row.prefix,
                    "tenant": row.tenant,
                    "used_bytes": one.used_bytes,
                    "limit_bytes": row.nbytes,
                    "used_artifacts": len(one.held),
                    "limit_artifacts": row.artifacts,
                },
            )

    def _changed(self, record: VersionRecord) -> None:
        """Count a version that came, has another size now, or went."""
        if not self._quotas or not _counts(record):
            return
        there = record.generation in self._names.versions
        for quota in self._quotas.values():
            if quota.covers(record.id, record.labels):
                quota.put(record.generation, record.nbytes if there else None)


def _counts(record: VersionRecord) -> bool:
    return record.owner is Owner.SYSTEM
