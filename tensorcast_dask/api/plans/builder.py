"""The steps that a plan can be built of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorcast_dask.api.actions.moves import check_shard
from tensorcast_dask.api.artifact import Artifact
from tensorcast_dask.api.plans.doing import StepArgument
from tensorcast_dask.api.plans.handles import StepHandle
from tensorcast_dask.api.plans.instances import InstanceSteps
from tensorcast_dask.exceptions import InvalidArgument
from tensorcast_dask.tensors.plans import ArtifactRef, Kind, NameRef, Step, StepRef
from tensorcast_dask.tensors.views import View

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from tensorcast_dask.api.instance import InstanceHandle
    from tensorcast_dask.api.worker import Worker
    from tensorcast_dask.tensors.plans import Target

__all__ = ["StepBuilder"]


class StepBuilder:
    """Adds steps to a plan, at one place.

    Every call takes `name=` (of the step), `after=` (steps that must be over before) and
    `retries=` (of errors that may pass; 2), and gives the step's handle.
    """

    def __init__(
        self,
        plan: Any,
        *,
        node: str = "",
        roles: tuple[str, ...] = (),
        undoes: str = "",
    ) -> None:
        self._plan = plan
        self._node = node
        self._roles = roles
        self._undoes = undoes

    def on_worker(self, worker: Worker | str) -> StepBuilder:
        """Go elsewhere: for steps that undo."""
        node = worker if isinstance(worker, str) else worker.node
        return StepBuilder(self._plan, node=node, undoes=self._undoes)

    def on_instance(self, instance: InstanceHandle | str) -> InstanceSteps:
        """Go to an instance: for steps that undo."""
        return InstanceSteps(self._plan, instance, undoes=self._undoes)

    def prefetch(self, artifact: Any, device: str = "host", **more: Any) -> StepHandle:
        """Bring a replica here. Gives the artifact."""
        return self._act(Kind.PREFETCH, artifact, {"device": device}, more)

    def replicate(
        self,
        artifact: Any,
        dst_worker: Worker | str | None = None,
        *,
        device: str = "host",
        **more: Any,
    ) -> StepHandle:
        """Make a replica at `dst_worker`; without one, here. Gives the artifact."""
        there = {} if dst_worker is None else {"node": _node(dst_worker)}
        return self._act(Kind.REPLICATE, artifact, {"device": device}, more | there)

    def migrate(self, *args: Any, device: str = "host", **more: Any) -> StepHandle:
        """Move a replica: `migrate(artifact, dst_worker)` from here, or the paper's
        `migrate(src_worker, dst_worker, artifact)`. Gives the artifact.
        """  # noqa: D205
        if len(args) == 3:
            source, target, artifact = _node(args[0]), _node(args[1]), args[2]
        elif len(args) == 2:
            artifact, target, source = args[0], _node(args[1]), self._node
        else:
            message = "migrate takes (artifact, dst_worker) or (src, dst, artifact)"
            raise InvalidArgument(message)
        places = {"node": target, "source": source}
        return self._act(Kind.MIGRATE, artifact, {"device": device}, more | places)

    def release(self, artifact: Any, **more: Any) -> StepHandle:
        """Drop the replica that is here. Gives the artifact."""
        return self._act(Kind.RELEASE, artifact, {}, more)

    def publish(
        self, artifact: Any, version: int | None = None, **more: Any
    ) -> StepHandle:
        """Make a version visible to `latest`. Gives the published artifact."""
        options = {} if version is None else {"version": version}
        return self._act(Kind.PUBLISH, artifact, options, more)

    def latest(self, artifact: Any, **more: Any) -> StepHandle:
        """Find the newest published version of an id. Gives the artifact."""
        return self._act(Kind.LATEST, artifact, {}, more)

    def destroy(self, artifact: Any, **more: Any) -> StepHandle:
        """End a version (handle, step) or all of an id (text). Gives a `Destroyed`."""
        return self._act(Kind.DESTROY, artifact, {}, more)

    def pin(
        self, artifact: Any, *, ttl: float = float("inf"), **more: Any
    ) -> StepHandle:
        """Promise not to evict it here. Gives a `Pinned`, which `unpin` takes."""
        options = {} if ttl == float("inf") else {"ttl": ttl}
        return self._act(Kind.PIN, artifact, options, more)

    def unpin(self, artifact: Any, pin: Any = 0, **more: Any) -> StepHandle:
        """Take back one pin (its number, or the step that made it), or (0) all."""
        options: dict[str, Any] = {"pin": pin}
        if isinstance(pin, StepHandle):
            options = {"pinned": pin.name}
            more["uses"] = (pin.name,)
        return self._act(Kind.UNPIN, artifact, options, more)

    def alias(
        self, alias: str, artifact: Any, *, expect: int | None = None, **more: Any
    ) -> StepHandle:
        """Point a name at a version, by compare-and-set; None removes it."""
        options: dict[str, Any] = {"name": alias}
        if expect is not None:
            options["expect"] = expect
        return self._act(Kind.ALIAS, artifact, options, more)

    def load(
        self,
        path: str | Path,
        id: str,  # noqa: A002
        *,
        version: int | str | None = None,
        replicas: int = 1,
        **more: Any,
    ) -> StepHandle:
        """Import a safetensors model that this node can read. Gives the artifact."""
        options: dict[str, Any] = {"path": str(path), "id": id, "replicas": replicas}
        if version is not None:
            options["version"] = version
        return self._act(Kind.LOAD, None, options, more)

    def copy(
        self,
        artifact: Any,
        id: str,  # noqa: A002
        *,
        version: int | None = None,
        **more: Any,
    ) -> StepHandle:
        """Put its content under another id here, with a life of its own; of a view, what it shows.

        Gives the new artifact; where the id holds equal content, the one that is there.
        """
        options: dict[str, Any] = {"id": id}
        if version is not None:
            options["version"] = version
        return self._act(Kind.COPY, artifact, options, more)

    def save(
        self,
        artifact: Any,
        path: str | Path,
        *,
        max_shard_bytes: int | str | None = None,
        **more: Any,
    ) -> StepHandle:
        """Write safetensors, atomically. Gives the artifact."""
        options: dict[str, Any] = {"path": str(path)}
        if max_shard_bytes is not None:
            options["max_shard_bytes"] = check_shard(max_shard_bytes)
        return self._act(Kind.SAVE, artifact, options, more)

    def view(
        self, artifact: Any, what: Any, view_name: str | None = None, **more: Any
    ) -> StepHandle:
        """Describe a derived artifact. Gives it.

        Parameters
        ----------
        artifact : Artifact, str or StepHandle
            Of what.
        what : mapping of tensor name to slice, or a slice or tuple
            As for `Artifact.view`; a slice alone needs the tensor's name as `view_name`.
        view_name : str, optional
            With a mapping, an id of the view.
        **more : dict
            `name`, `after`, `retries`.
        """
        if isinstance(what, View):
            cut = what
        elif hasattr(what, "items"):
            cut = View.of(dict(what.items()))
        elif view_name is None:
            message = "say which tensor to slice: view(artifact, {name: slice})"
            raise InvalidArgument(message)
        else:
            cut, view_name = View.of({view_name: what}), None
        options = {} if view_name is None else {"name": view_name}
        return self._act(Kind.VIEW, artifact, options, more | {"view": cut.encode()})

    def drain(
        self, worker: Worker | str | None = None, *, end: bool = False, **more: Any
    ) -> StepHandle:
        """Empty a node (this one). Gives the receipt: what moved and what could not."""
        node = self._node if worker is None else _node(worker)
        return self._act(Kind.DRAIN, None, {"worker": node, "end": end}, more)

    def noop(self, value: Any = None, **more: Any) -> StepHandle:
        """Do nothing; gives what it is given."""
        return self._act(Kind.NOOP, value, {}, more)

    def submit(
        self,
        function: Callable[..., Any],
        *args: Any,
        name: str = "",
        after: Iterable[StepHandle] = (),
        retries: int = 2,
        once: bool = False,
        **kwargs: Any,
    ) -> StepHandle:
        """Run a function of your own here, beside the bytes. Gives what it returns.

        Parameters
        ----------
        function : callable
            It may be run again when its worker dies before it has ended.
        *args
            Its arguments; artifacts and steps among them, also in lists and dicts, come
            to it as artifacts and results.
        name, after, retries
            As for every step.
        once : bool
            Never begin it a second time: when its end is not known the step fails with
            Unknown.
        **kwargs
            Its arguments by name.
        """
        uses: dict[str, None] = {}
        call = (function, self._marked(list(args), uses), self._marked(kwargs, uses))
        step = Step(
            name=name,
            kind=Kind.SUBMIT,
            node=self._node,
            roles=self._roles,
            uses=tuple(uses),
            after=self._names(after),
            retries=retries,
            compensates=self._undoes,
            token="t",  # noqa: S106 - no secret; the plan puts the true one
            once=once,
        )
        added: StepHandle = self._plan.add(step, call)
        return added

    # ------------------------------------------------------------ small parts
    def _act(
        self, kind: Kind, artifact: Any, options: dict[str, Any], more: dict[str, Any]
    ) -> StepHandle:
        known = {"name", "after", "retries", "node", "source", "view", "uses"}
        if not set(more) <= known:
            wrong = ", ".join(sorted(set(more) - known))
            message = f"{kind} takes no {wrong}; every step takes name, after, retries"
            raise InvalidArgument(message)
        step = Step(
            name=more.pop("name", ""),
            kind=kind,
            node=more.pop("node", self._node),
            roles=self._roles,
            target=self._target(artifact),
            options=options,
            after=self._names(more.pop("after", ())),
            compensates=self._undoes,
            **more,
        )
        added: StepHandle = self._plan.add(step)
        return added

    def _names(self, steps: Iterable[StepHandle] | StepHandle) -> tuple[str, ...]:
        if isinstance(steps, StepHandle):
            steps = (steps,)
        return tuple(self._own(step) for step in steps)

    def _own(self, step: Any) -> str:
        if not isinstance(step, StepHandle) or step.plan is not self._plan:
            message = f"{step!r} is no step of this plan"
            raise InvalidArgument(message)
        return step.name

    def _target(self, artifact: Any) -> Target | None:
        if artifact is None:
            return None
        if isinstance(artifact, StepHandle):
            return StepRef(step=self._own(artifact))
        if isinstance(artifact, Artifact):
            return ArtifactRef.of(artifact.info)
        if isinstance(artifact, str):
            return NameRef(id=artifact)
        message = f"a step acts on an artifact, an id or a step, not on {artifact!r}"
        raise InvalidArgument(message)

    def _marked(self, value: Any, uses: dict[str, None]) -> Any:
        """Put a mark in the place of every step among a function's arguments."""
        if isinstance(value, StepHandle):
            uses[self._own(value)] = None
            return StepArgument(value.name)
        if type(value) in {list, tuple, set}:
            return type(value)(self._marked(one, uses) for one in value)
        if type(value) is dict:
            return {key: self._marked(one, uses) for key, one in value.items()}
        return value


def _node(worker: Worker | str) -> str:
    return worker if isinstance(worker, str) else worker.node
