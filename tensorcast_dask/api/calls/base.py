"""What the calls of a session share."""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tensorcast_dask.api.actions import names
from tensorcast_dask.api.artifact import Artifact
from tensorcast_dask.api.worker import Worker
from tensorcast_dask.tensors.requests import find_node

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tensorcast_dask.api.connection.core import Core
    from tensorcast_dask.api.connection.deadlines import Deadline
    from tensorcast_dask.api.connection.operation import Operation
    from tensorcast_dask.tensors.messages import ArtifactInfo

__all__ = ["Calls", "Node", "ref_of", "whole"]

T = TypeVar("T")

#: How a call names a node: a handle, a name, a Dask address, or by policy.
Node = Worker | str | None


class Calls:
    """Base of the groups of calls that make up a session."""

    _core: Core

    @property
    def _session(self) -> Any:
        # Only `Session` is ever made; its parts hand it to the handles that they make.
        return self

    def _operate(
        self,
        kind: str,
        ref: str,
        action: Callable[[Operation[Any]], Coroutine[Any, Any, Any]],
        *,
        wait: bool,
        progress: bool = False,
    ) -> Any:
        return self._core.operate(kind, ref, action, wait=wait, progress=progress)

    async def _info(self, artifact: Artifact | str, limit: Deadline) -> ArtifactInfo:
        if isinstance(artifact, Artifact):
            return artifact.info
        return await names.resolve(self._core, artifact, limit=limit)

    async def _node(self, worker: Node, limit: Deadline) -> str:
        if worker is None:
            return ""
        if isinstance(worker, Worker):
            return worker.node
        return find_node(await names.nodes(self._core, limit), worker)


def ref_of(artifact: Artifact | str) -> str:
    """Give the id that a handle or an id means."""
    return artifact.id if isinstance(artifact, Artifact) else artifact


def whole(cls: type[T]) -> type[T]:
    """Make one class of a class and its parts: nobody meets the parts' names.

    Python's own messages, `help` and tracebacks then speak of the class that a program knows.
    """
    space: dict[str, Any] = {}
    for part in reversed(cls.__mro__[:-1]):
        space |= vars(part)
    for own in ("__dict__", "__weakref__"):
        space.pop(own, None)
    for name, value in space.items():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(function, FunctionType):
            function.__qualname__ = f"{cls.__qualname__}.{name}"
    return cast("type[T]", type(cls.__name__, (), space))
