"""An artifact, and a registration, as a process that is an instance meets them."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, Protocol, Self

from tensorcast_dask.dataplane import arrays
from tensorcast_dask.exceptions import LeaseExpired

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tensorcast_dask.dataplane.arrays import Source
    from tensorcast_dask.dataplane.reading import Found
    from tensorcast_dask.tensors.messages import ArtifactInfo, Lend
    from tensorcast_dask.tensors.specs import Index

__all__ = ["Artifact", "Registered"]


class _Artifacts(Protocol):
    """What is used of `instance.artifacts.Artifacts`."""

    def read(self, info: ArtifactInfo, *, within_s: float) -> Found:
        """Give an artifact's bytes."""
        ...

    def lends(self, registered: Registered) -> bool:
        """Whether it is lent still."""
        ...

    def mutating(self, registered: Registered) -> None:
        """Tell the store that the content changes, or has changed."""
        ...

    def release(self, registered: Registered) -> None:
        """Lend it no more."""
        ...


class Artifact:
    """An artifact as an instance's function meets it.

    Attributes
    ----------
    info : ArtifactInfo
        What the catalog says of it.
    """

    def __init__(self, info: ArtifactInfo, artifacts: _Artifacts) -> None:
        self.info = info
        self._artifacts = artifacts

    @property
    def id(self) -> str:
        """Its id."""
        return self.info.id

    @property
    def version(self) -> int:
        """Its version."""
        return self.info.version

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.info.nbytes

    def tensor_dict(
        self, *, framework: str | None = None, deadline: float = 600.0
    ) -> dict[str, Any]:
        """Give its tensors, private to this process; mapped where the node holds them."""
        found = self._artifacts.read(self.info, within_s=deadline)
        made: dict[str, Any] = arrays.materialise(
            found.buffer, found.index, framework=framework, view=found.view
        )
        return made

    def read(self, *, deadline: float = 600.0) -> tuple[Index, Any]:
        """Give its content and what lies where, complete and checked."""
        return self._artifacts.read(self.info, within_s=deadline).packed()

    def __repr__(self) -> str:
        return f"<Artifact {self.id!r} v{self.version}>"


class Registered:
    """Tensors that this process lends.

    Attributes
    ----------
    info : ArtifactInfo
        What the catalog says of them.
    """

    def __init__(
        self,
        artifacts: _Artifacts,
        lend: Lend,
        index: Index,
        sources: Sequence[Source],
        *,
        settle: Callable[[], None],
    ) -> None:
        self._artifacts = artifacts
        self._settle = settle
        self.lend = lend
        self._content = arrays.RangeReader(sources, index)
        self._lock = threading.Lock()
        self._inside = 0
        self.stamp = 0
        self.info: ArtifactInfo

    @contextlib.contextmanager
    def mutate(self) -> Iterator[None]:
        """Fence: this process may write to them inside the block.

        Raises
        ------
        LeaseExpired
            When they are lent no more.
        """
        if not self._artifacts.lends(self):
            message = f"{self.lend.id!r} is no longer registered"
            raise LeaseExpired(message)
        self._step(into=True)
        try:
            yield
        finally:
            self._step(into=False)

    def _step(self, *, into: bool) -> None:
        with self._lock:
            before = self._inside
            self._inside += 1 if into else -1
            if bool(before) == bool(self._inside):
                return
            if not into:
                self._settle()
            self.stamp += 1
            self._artifacts.mutating(self)

    def read(self, offset: int, room: memoryview) -> None:
        """Copy a range of them, for who cannot read this process."""
        self._content.read_into(offset, room)

    def release(self) -> None:
        """Lend them no more; readers get Gone. Idempotent."""
        self._artifacts.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
