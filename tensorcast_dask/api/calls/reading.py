"""Calls that read artifacts; `Artifact` is their public face."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorcast_dask.api.actions import names, reads
from tensorcast_dask.api.actions.fetching import Part
from tensorcast_dask.api.artifact import Artifact
from tensorcast_dask.api.calls.base import Calls
from tensorcast_dask.exceptions import InvalidArgument, Mismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tensorcast_dask.api.connection.deadlines import Deadline
    from tensorcast_dask.tensors.messages import ArtifactInfo

__all__ = ["Reading"]


class Reading(Calls):
    """What reads artifacts."""

    def tensor_meta(
        self,
        artifact: Artifact,
        name: str | None = None,
        *,
        deadline: float | None = None,
    ) -> Any:
        """See `Artifact.tensor_meta`."""
        limit = self._core.deadline(deadline)
        return self._core.call(
            lambda: reads.meta(self._core, artifact.info, name, limit)
        )

    def _glimpse(self, info: ArtifactInfo) -> tuple[Any, Any]:
        """Give where it lies and what is in it, for a notebook."""

        async def look(limit: Deadline) -> tuple[Any, Any]:
            places = await names.locate(self._core, info.generation, limit)
            specs = await reads.meta(self._core, info, None, limit)
            return places, tuple(specs.values())

        return self._core.glimpse(look) or ((), ())

    def read(
        self,
        artifact: Artifact,
        *,
        framework: str | None = None,
        names: Iterable[str] | None = None,
        device: str | None = None,
        share: bool = False,
        deadline: float | None = None,
    ) -> Any:
        """See `Artifact.tensor_dict`."""
        return reads.read(
            self._core,
            artifact.info,
            framework=framework,
            names=names,
            device=device,
            share=share,
            limit=self._core.deadline(deadline),
        )

    def read_one(
        self,
        artifact: Artifact,
        *,
        framework: str | None = None,
        device: str | None = None,
        share: bool = False,
        deadline: float | None = None,
    ) -> Any:
        """See `Artifact.tensor`."""
        if artifact.info.tensors != 1:
            message = f"{artifact.id!r} has {artifact.info.tensors} tensors; use tensor_dict()"
            raise Mismatch(message)
        limit = self._core.deadline(deadline)
        return reads.read(
            self._core,
            artifact.info,
            framework=framework,
            names=None,
            limit=limit,
            only=True,
            device=device,
            share=share,
        )

    def read_part(
        self,
        artifact: Artifact,
        name: str,
        start: int,
        stop: int,
        *,
        deadline: float | None = None,
    ) -> Any:
        """Give bytes `start` to `stop` of a tensor (C order, little-endian) as a memoryview.

        Where no node of this host has the artifact they alone are brought, from any holder.

        Raises
        ------
        InvalidArgument
            When the tensor has no such bytes.
        """
        limit = self._core.deadline(deadline)

        async def work() -> memoryview:
            spec = await reads.meta(self._core, artifact.info, name, limit)
            whole = type(start) is type(stop) is int
            if not (whole and 0 <= start <= stop <= spec.nbytes):
                message = f"bytes {start} to {stop} are not in a tensor of {spec.nbytes} bytes"
                raise InvalidArgument(message)
            return await reads.part(
                self._core, artifact.info, Part(name, start, stop), limit
            )

        return self._core.call(work)

    def read_into(
        self,
        artifact: Artifact,
        targets: Mapping[str, Any],
        *,
        deadline: float | None = None,
    ) -> Any:
        """See `Artifact.tensor_dict_into`."""
        limit = self._core.deadline(deadline)
        return reads.read_into(self._core, artifact.info, targets, limit)

    def bind(
        self,
        artifact: Artifact,
        targets: Mapping[str, Any],
        *,
        deadline: float | None = None,
    ) -> Any:
        """Fill tensors that this process has: `Artifact.tensor_dict_into`, also on a device.

        Where all targets lie on one device that has a copy, the bytes never leave it.

        Raises
        ------
        Mismatch
            Listing every target that does not fit, or is shared; none was changed.
        """
        limit = self._core.deadline(deadline)
        return reads.read_into(self._core, artifact.info, targets, limit)

    def view(
        self,
        artifact: Artifact,
        what: Any,
        name: str | None = None,
        *,
        deadline: float | None = None,
    ) -> Any:
        """See `Artifact.view`."""
        limit = self._core.deadline(deadline)

        async def work() -> Artifact:
            return Artifact(
                await reads.view(self._core, artifact.info, what, name, limit),
                self._session,
            )

        return self._core.call(work)
