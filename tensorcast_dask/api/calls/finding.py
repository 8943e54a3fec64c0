"""Calls that find, name and end artifacts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorcast_dask.api.actions import names
from tensorcast_dask.api.artifact import Artifact
from tensorcast_dask.api.calls.base import Calls, ref_of
from tensorcast_dask.tensors.requests import check_version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tensorcast_dask.api.connection.operation import Operation


__all__ = ["Finding"]


class Finding(Calls):
    """What finds, names and ends artifacts."""

    def artifact(
        self,
        id: str,  # noqa: A002
        *,
        version: int | None = None,
        deadline: float | None = None,
    ) -> Any:
        """Give a handle: the newest published version, the newest committed one while none is.

        Parameters
        ----------
        id : str
            Name of an artifact, alias or view.
        version : int, optional
            That version.
        deadline : float, optional
            Seconds for the catalog's answer. A name that is not there, or is being made, is
            told at once: nothing waits for it.

        Raises
        ------
        NotFound, Gone, Incomplete
        """
        limit = self._core.deadline(deadline)

        async def work() -> Artifact:
            number = check_version(version)
            return Artifact(
                await names.resolve(self._core, id, version=number, limit=limit),
                self._session,
            )

        return self._core.call(work)

    def latest(self, id: str, *, deadline: float | None = None) -> Any:  # noqa: A002
        """Give the newest published version; never an incomplete one.

        It does not wait for one: `deadline` is for the catalog's answer. To see a new version
        come, `signals.watch` its `artifact/<id>`, or ask again from time to time.

        Raises
        ------
        NotFound
            While none is published.
        """
        limit = self._core.deadline(deadline)

        async def work() -> Artifact:
            return Artifact(
                await names.resolve(self._core, id, published=True, limit=limit),
                self._session,
            )

        return self._core.call(work)

    def exists(
        self,
        id: str,  # noqa: A002
        *,
        version: int | None = None,
        deadline: float | None = None,
    ) -> Any:
        """Whether it can be read; takes no pin, lease or touch."""
        limit = self._core.deadline(deadline)
        number = check_version(version)
        return self._core.call(
            lambda: names.exists(self._core, id, version=number, limit=limit)
        )

    def list(
        self,
        prefix: str = "",
        *,
        labels: Mapping[str, str] | None = None,
        all_versions: bool = False,
        after: tuple[str, int] | None = None,
        limit: int | None = None,
        deadline: float | None = None,
    ) -> Any:
        """Artifacts whose id begins with `prefix` and that carry all `labels`, by id.

        Of each the newest published version, the newest committed one while none is published;
        `all_versions` gives every committed one. `limit` gives a page of so many at most,
        `after` the one that begins behind an id and version, the last ones of the page before.
        """
        within = self._core.deadline(deadline)

        async def work() -> list[Artifact]:
            infos = await names.list_artifacts(
                self._core,
                prefix=prefix,
                labels=labels,
                all_versions=all_versions,
                after=after,
                most=limit,
                limit=within,
            )
            return [Artifact(info, self._session) for info in infos]

        return self._core.call(work)

    def locations(
        self, artifact: Artifact | str, *, deadline: float | None = None
    ) -> Any:
        """Where its replicas are."""
        limit = self._core.deadline(deadline)

        async def work() -> list[Any]:
            info = await self._info(artifact, limit)
            return list(await names.locate(self._core, info.generation, limit))

        return self._core.call(work)

    def publish(
        self,
        artifact: Artifact | str,
        version: int | None = None,
        *,
        deadline: float | None = None,
        wait: bool = True,
    ) -> Any:
        """Make a version visible to `latest`, in one commit.

        Parameters
        ----------
        artifact : Artifact or str
            What; an id means what `artifact(id)` gives.
        version : int, optional
            Must be the artifact's own; another number is Mismatch.
        deadline : float, optional
            Seconds.
        wait : bool
            Whether to return only when it holds.

        Returns
        -------
        Operation
            Its result is the published `Artifact`: for a caller-leased one, the
            system-owned copy that was made of its present content.
        """
        limit = self._core.deadline(deadline)

        async def action(operation: Operation[Artifact]) -> Artifact:
            info = await self._info(artifact, limit)
            published = await names.publish(self._core, operation, info, version, limit)
            return Artifact(published, self._session)

        return self._operate("publish", ref_of(artifact), action, wait=wait)

    def alias(
        self,
        name: str,
        artifact: Artifact | str | None,
        *,
        expect: int | None = None,
        deadline: float | None = None,
    ) -> Any:
        """Point a name at an artifact version, by compare-and-set.

        Parameters
        ----------
        name : str
            The alias.
        artifact : Artifact, str or None
            None removes it.
        expect : int, optional
            Alias generation that the caller saw, 0 for "must not exist".
        deadline : float, optional
            Seconds.

        Returns
        -------
        AliasState
            With the new `alias_generation`.

        Raises
        ------
        Mismatch
            When the alias is at another generation (`error.data["generation"]`).
        """
        limit = self._core.deadline(deadline)

        async def work() -> Any:
            info = None if artifact is None else await self._info(artifact, limit)
            generation = 0 if info is None else info.generation
            return await names.set_alias(self._core, name, generation, expect, limit)

        return self._core.call(work)

    def destroy(
        self,
        artifact: Artifact | str,
        *,
        deadline: float | None = None,
        wait: bool = True,
    ) -> Any:
        """End a version (handle) or all versions (id); idempotent and final.

        An id that nobody ever made is no error either: it is not there afterwards. A pin does
        not hold it: pins are about eviction, and end with their version. Readers that hold tensors keep them. Returns an `Operation` of `Destroyed`, whose
        `versions` are those that this call ended: none where they were gone already, also
        when it was a call like this, answered or not, before a restart of the scheduler.
        """
        limit = self._core.deadline(deadline)
        generation = artifact.generation if isinstance(artifact, Artifact) else 0

        async def action(operation: Operation[Any]) -> Any:
            ended = await names.destroy(
                self._core, operation, ref_of(artifact), generation, limit
            )
            if not ended.versions:
                operation.note = "nothing was there"
            return ended

        return self._operate("destroy", ref_of(artifact), action, wait=wait)
