"""What an engine offers to plans, and what is done around it.

Rules:

1. Each method of `Engine` is optional; what is not there answers Unimplemented.
2. `transform_into` checks names, dtypes, shapes and versions, and has all bytes here, before the
   first of them is written. What fails after that leaves the instance poisoned: it says so, and
   takes no work until all of its weights were given anew.
3. The engine's own methods run in the instance's thread. One that must not meet a forward pass
   says so itself: `pause` and `resume` are called around every change of weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from tensorcast_dask.dataplane import arrays
from tensorcast_dask.dataplane.arrays.copying import check_targets
from tensorcast_dask.exceptions import (
    InvalidArgument,
    Mismatch,
    Poisoned,
    Unimplemented,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tensorcast_dask.instance.artifacts import Artifacts
    from tensorcast_dask.instance.handles import Artifact, Registered
    from tensorcast_dask.tensors.specs import Index

__all__ = ["CONTRACT", "Contract", "Engine"]

#: The contract, and the method of the engine that each part needs.
CONTRACT: Final = {
    "transform_into": "weights",
    "transform_register": "weights",
    "manifest": "manifest",
    "publish_session": "publish_session",
    "hydrate": "hydrate",
    "evict_local": "evict_local",
}


class Engine(Protocol):
    """All that an engine may offer; nothing of it must be."""

    def weights(self) -> Mapping[str, Any]:
        """Give its live weights by name: arrays of this process, for reading and writing."""
        ...

    def pause(self) -> object:
        """Let no forward pass begin, and end those under way."""
        ...

    def resume(self) -> object:
        """Go on."""
        ...

    def manifest(self) -> Mapping[str, Any]:
        """Say of itself what callers may want to know, in plain values."""
        ...

    def publish_session(self, session: str) -> Mapping[str, Any]:
        """Give all that another engine needs to go on with a session: arrays by name."""
        ...

    def hydrate(self, session: str, tensors: Mapping[str, Any]) -> object:
        """Take a session in; plain values of interest to the caller come back."""
        ...

    def evict_local(self, session: str) -> object:
        """Forget a session."""
        ...


class _Owner(Protocol):
    """What is asked of the instance."""

    name: str

    @property
    def poisoned(self) -> str: ...

    @property
    def holds(self) -> dict[str, int]: ...

    def poison(self, why: str) -> None: ...

    def applied(self, artifact: str, version: int, *, whole: bool) -> None: ...


class Contract:
    """The engine's contract, carried out.

    Parameters
    ----------
    engine : object
        Whatever the program gave; None offers nothing.
    artifacts : Artifacts
        How artifacts are made and read.
    owner : Instance
        Who says what is held, and what is poisoned.
    """

    def __init__(self, engine: object, artifacts: Artifacts, owner: _Owner) -> None:
        self._engine: Any = engine
        self._artifacts = artifacts
        self._owner = owner
        self._registered: dict[str, Registered] = {}

    @property
    def offered(self) -> tuple[str, ...]:
        """What the engine offers."""
        if self._engine is None:
            return ()
        return tuple(
            name
            for name, method in CONTRACT.items()
            if callable(getattr(self._engine, method, None))
            or (name == "manifest" and self._has("weights"))
        )

    def _has(self, method: str) -> bool:
        return callable(getattr(self._engine, method, None))

    def find(self, name: str) -> Callable[..., Any] | None:
        """Give what carries a part of the contract out.

        Raises
        ------
        Unimplemented
            When the engine does not offer it.
        """
        if name not in CONTRACT:
            return None
        if name not in self.offered:
            message = (
                f"the engine of instance {self._owner.name!r} does not offer {name!r}"
            )
            raise Unimplemented(message)
        found: Callable[..., Any] = getattr(self, f"_{name}")
        return found

    # ------------------------------------------------------------ weights
    @contextlib.contextmanager
    def _still(self) -> Iterator[None]:
        """Hold the engine, and whoever reads what it lends, for a change of weights."""
        if self._has("pause"):
            self._engine.pause()
        try:
            with self._artifacts.fence():
                yield
        finally:
            if self._has("resume"):
                self._engine.resume()

    def _found(self, artifact: Artifact | str) -> Artifact:
        if isinstance(artifact, str):
            return self._artifacts.find(artifact, version=0, within_s=60.0)
        if not callable(getattr(artifact, "read", None)):
            message = (
                f"transform_into takes an artifact or its id, not a {type(artifact).__name__}; "
                "put the tensors first"
            )
            raise InvalidArgument(message)
        return artifact

    def _transform_into(
        self,
        artifact: Artifact | str,
        *,
        names: Mapping[str, str] | None = None,
        partial: bool = False,
        expect: int | None = None,
    ) -> dict[str, Any]:
        """Write an artifact (or a view of one) over the live weights (rule 2)."""
        artifact = self._found(artifact)
        targets = self._engine.weights()
        self._check_version(artifact, expect, partial=partial)
        index, content = artifact.read()
        chosen = self._chosen(index, targets, names or {}, partial=partial)
        check_targets(index, chosen)
        with self._still():
            try:
                arrays.copy_out(content, index, chosen)
            except BaseException as error:
                why = f"{artifact.id} v{artifact.version} was written in part: {error}"
                self._owner.poison(why)
                message = (
                    f"instance {self._owner.name!r} holds half of an update: {why}; give it "
                    "all of its weights by transform_into, or start it anew"
                )
                raise Poisoned(message) from error
        self._owner.applied(artifact.id, artifact.version, whole=not partial)
        return {
            "applied": sorted((names or {}).get(one, one) for one in chosen),
            "version": artifact.version,
            "bytes": index.nbytes,
        }

    def _check_version(
        self, artifact: Artifact, expect: int | None, *, partial: bool
    ) -> None:
        held = self._owner.holds.get(artifact.id, 0)
        if expect is not None and held != expect:
            message = (
                f"instance {self._owner.name!r} holds version {held} of {artifact.id!r}, not "
                f"{expect}; nothing was written"
            )
            raise Mismatch(message, {"holds": held})
        if partial and self._owner.poisoned:
            message = (
                f"instance {self._owner.name!r} holds half of an update; only all of its "
                "weights mend it, not a part"
            )
            raise Poisoned(message)

    @staticmethod
    def _chosen(
        index: Index,
        targets: Mapping[str, Any],
        names: Mapping[str, str],
        *,
        partial: bool,
    ) -> dict[str, Any]:
        """Give the target of each tensor; names that are on one side only are refused together."""
        called = {name: names.get(name, name) for name in index.names}
        extra = sorted(one for one in called.values() if one not in targets)
        missing = sorted(set(targets) - set(called.values()))
        twice = len(set(called.values())) != len(called)
        wrong = []
        if extra:
            wrong.append(f"the engine has no {', '.join(map(repr, extra))}")
        if missing and not partial:
            wrong.append(f"the update has no {', '.join(map(repr, missing))}")
        if twice:
            wrong.append("two tensors go to one name")
        if set(names) - set(called):
            wrong.append(f"names has unknown {sorted(set(names) - set(called))}")
        if wrong:
            chosen = {n: targets[at] for n, at in called.items() if at in targets}
            try:
                check_targets(index, chosen)
            except Mismatch as error:
                wrong.append(error.message)
            message = f"nothing was written: {'; '.join(wrong)}"
            raise Mismatch(message)
        return {name: targets[at] for name, at in called.items()}

    def _transform_register(
        self,
        id: str,  # noqa: A002
        *,
        names: list[str] | None = None,
        version: int | str | None = None,
        labels: dict[str, str] | None = None,
    ) -> Registered:
        """Lend the live weights (or some of them) under an id."""
        weights = self._engine.weights()
        unknown = sorted(set(names or ()) - set(weights))
        if unknown:
            message = f"the engine has no {', '.join(map(repr, unknown))}"
            raise Mismatch(message)
        chosen = dict(weights) if names is None else {n: weights[n] for n in names}
        before = self._registered.pop(id, None)
        if before is not None and version is None:
            before.release()  # the name is this engine's own: lent anew as it is now
        registered = self._artifacts.register(
            chosen, id, labels=labels, version=version, within_s=600.0
        )
        self._registered[id] = registered
        return registered

    # ------------------------------------------------------------ sessions
    def _manifest(self) -> dict[str, Any]:
        """Say what the instance holds."""
        told: dict[str, Any] = {
            "holds": self._owner.holds,
            "poisoned": self._owner.poisoned,
        }
        if self._has("weights"):
            index, _ = arrays.canonical(self._engine.weights())
            told["weights"] = {
                spec.name: [spec.dtype.name, list(spec.shape)] for spec in index.specs()
            }
        if self._has("manifest"):
            told |= dict(self._engine.manifest())
        return told

    def _publish_session(
        self,
        session: str,
        id: str | None = None,  # noqa: A002
        *,
        labels: dict[str, str] | None = None,
        version: int | str | None = None,
    ) -> Artifact:
        """Put all that another engine needs to go on with a session."""
        tensors = self._engine.publish_session(session)
        if not isinstance(tensors, Mapping):
            message = "publish_session of an engine gives arrays by name"
            raise InvalidArgument(message)
        return self._artifacts.put(
            tensors,
            id or f"session/{session}",
            labels={"session": session, **(labels or {})},
            version=version,
            within_s=600.0,
        )

    def _hydrate(self, artifact: Artifact | str, session: str) -> Any:
        """Hand a session's arrays to the engine."""
        tensors = self._found(artifact).tensor_dict(
            framework=getattr(self._engine, "framework", None)
        )
        return self._engine.hydrate(session, tensors)

    def _evict_local(self, session: str) -> Any:
        """Have the engine forget a session."""
        return self._engine.evict_local(session)
