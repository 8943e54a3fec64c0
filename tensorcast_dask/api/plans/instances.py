"""The steps that an instance can carry out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorcast_dask.api.artifact import Artifact
from tensorcast_dask.api.plans.handles import StepHandle
from tensorcast_dask.exceptions import InvalidArgument
from tensorcast_dask.tensors import values
from tensorcast_dask.tensors.plans import ArtifactRef, Kind, NameRef, Step, StepRef

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tensorcast_dask.api.instance import InstanceHandle
    from tensorcast_dask.tensors.plans import Target

__all__ = ["InstanceSteps"]

#: What every step takes besides the arguments of its call.
_EVERY = ("name", "after", "retries")


class InstanceSteps:
    """Adds steps to a plan that an instance carries out, each once.

    Every call takes `name=` (of the step), `after=` (steps that must be over before) and
    `retries=` (of errors that may pass; 2), and gives the step's handle. Steps among its
    arguments come to the instance as their results.
    """

    def __init__(
        self, plan: Any, instance: InstanceHandle | str, *, undoes: str = ""
    ) -> None:
        name = instance if isinstance(instance, str) else instance.name
        if not name:
            message = (
                f"on_instance takes an instance's handle or name, not {instance!r}"
            )
            raise InvalidArgument(message)
        self._plan = plan
        self._instance = name
        self._undoes = undoes

    def transform_into(
        self,
        artifact: Any,
        *,
        names: Mapping[str, str] | None = None,
        partial: bool = False,
        expect: int | None = None,
        **more: Any,
    ) -> StepHandle:
        """Write an artifact over the live weights; see `InstanceHandle.transform_into`.

        Gives what was applied, in a dict.
        """
        given: dict[str, Any] = {"partial": partial}
        if names is not None:
            given["names"] = dict(names)
        if expect is not None:
            given["expect"] = expect
        return self._add("transform_into", artifact, (), given, more)

    def transform_register(
        self,
        id: str,  # noqa: A002
        *,
        names: Iterable[str] | None = None,
        version: int | str | None = None,
        **more: Any,
    ) -> StepHandle:
        """Lend the live weights (or those of these names) under an id. Gives the artifact."""
        given: dict[str, Any] = {}
        if names is not None:
            given["names"] = list(names)
        if version is not None:
            given["version"] = version
        return self._add("transform_register", None, (id,), given, more)

    def manifest(self, **more: Any) -> StepHandle:
        """Ask what it holds. Gives a dict."""
        return self._add("manifest", None, (), {}, more)

    def publish_session(
        self,
        session: str,
        id: str | None = None,  # noqa: A002
        **more: Any,
    ) -> StepHandle:
        """Put all that another engine needs to go on with a session. Gives the artifact."""
        given = {} if id is None else {"id": id}
        return self._add("publish_session", None, (session,), given, more)

    def hydrate(self, artifact: Any, session: str, **more: Any) -> StepHandle:
        """Take a session in that another instance has put. Gives what the engine returns."""
        return self._add("hydrate", artifact, (session,), {}, more)

    def evict_local(self, session: str, **more: Any) -> StepHandle:
        """Have the engine forget a session. Gives what it returns."""
        return self._add("evict_local", None, (session,), {}, more)

    def call(self, function: str, /, *args: Any, **kwargs: Any) -> StepHandle:
        """Call a function of it by name. Gives what it returns.

        Parameters
        ----------
        function : str
            Its name.
        *args
            Plain values, artifacts and steps, also in lists and dicts.
        **kwargs
            The same by name; `name`, `after` and `retries` are the step's own.
        """
        more = {name: kwargs.pop(name) for name in _EVERY if name in kwargs}
        return self._add(function, None, args, kwargs, more)

    # ------------------------------------------------------------ small parts
    def _add(
        self,
        function: str,
        artifact: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        more: dict[str, Any],
    ) -> StepHandle:
        if not set(more) <= set(_EVERY):
            wrong = ", ".join(sorted(set(more) - set(_EVERY)))
            message = (
                f"{function} takes no {wrong}; every step takes name, after, retries"
            )
            raise InvalidArgument(message)
        uses: dict[str, None] = {}
        given = [self._lowered(list(args), uses), self._lowered(kwargs, uses)]
        after = more.pop("after", ())
        step = Step(
            name=more.pop("name", ""),
            kind=Kind.CALL,
            instance=self._instance,
            target=self._target(artifact),
            options={"function": function},
            args=values.pack(given, what=f"the arguments of {function}"),
            uses=tuple(uses),
            after=tuple(
                self._own(one)
                for one in ((after,) if isinstance(after, StepHandle) else after)
            ),
            compensates=self._undoes,
            **more,
        )
        added: StepHandle = self._plan.add(step)
        return added

    def _own(self, step: Any) -> str:
        if not isinstance(step, StepHandle) or step.plan is not self._plan:
            message = f"{step!r} is no step of this plan"
            raise InvalidArgument(message)
        return step.name

    def _target(self, artifact: Any) -> Target | None:
        match artifact:
            case None:
                return None
            case StepHandle():
                return StepRef(step=self._own(artifact))
            case Artifact():
                return ArtifactRef.of(artifact.info)
            case str():
                return NameRef(id=artifact)
            case _:
                message = (
                    f"a step acts on an artifact, an id or a step, not on {artifact!r}"
                )
                raise InvalidArgument(message)

    def _lowered(self, value: Any, uses: dict[str, None]) -> Any:
        """Put references in the place of artifacts and steps."""
        if isinstance(value, StepHandle):
            uses[self._own(value)] = None
            return StepRef(step=value.name)
        if isinstance(value, Artifact):
            return ArtifactRef.of(value.info)
        if isinstance(value, list | tuple):
            return [self._lowered(one, uses) for one in value]
        if isinstance(value, dict):
            return {name: self._lowered(one, uses) for name, one in value.items()}
        return value
