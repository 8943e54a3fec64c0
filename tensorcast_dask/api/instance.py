"""An instance, as a program meets it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorcast_dask.api.actions import instances
from tensorcast_dask.notebook.cards import instance_card
from tensorcast_dask.tensors.ids import check_name
from tensorcast_dask.tensors.messages import CallInstance

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tensorcast_dask.api.artifact import Artifact
    from tensorcast_dask.api.connection.core import Core
    from tensorcast_dask.tensors.messages import InstanceState

__all__ = ["InstanceHandle"]


class InstanceHandle:
    """A process that is attached to a node: an engine, a trainer. Made by `Session.instances`.

    Attributes
    ----------
    name : str
        Its name.
    attachment : str
        The life of it that was seen; calls go to that life and no other.
    node : str
        Identity of its node.
    labels : dict of str to str
        What it was attached with.
    functions : tuple of str
        Functions that can be called.
    engine : tuple of str
        What of the engine's contract it offers.
    poisoned : str
        Why it must not be used; "" while it can be.
    holds : dict of str to int
        Versions that were written into its memory last, by artifact id.
    load : dict of str to float
        Numbers that it pushed last.
    load_age_s : float or None
        How old they were when this was asked; None when there are none.
    draining : bool
        It takes nothing new.
    """

    def __init__(self, state: InstanceState, session: Any) -> None:
        record = state.record
        #: All that the catalog said of it.
        self.state = state
        self._session = session
        self.name = record.name
        self.attachment = record.attachment
        self.node = state.card.node
        self.labels = dict(record.labels)
        self.functions = record.functions
        self.engine = record.engine
        self.poisoned = record.poisoned
        self.holds = dict(record.holds)
        self.load = dict(state.load)
        self.load_age_s = state.load_age_s
        self.draining = state.draining

    @property
    def routable(self) -> bool:
        """Whether work may be sent to it."""
        return not (self.poisoned or self.draining)

    def call(
        self,
        function: str,
        /,
        *args: Any,
        deadline: float | None = None,
        key: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a function of it; give what it returns.

        Parameters
        ----------
        function : str
            A function's name, or a part of the engine's contract.
        *args
            Plain values and artifacts.
        deadline : float, optional
            Seconds; None the session's default, 0 refuses unless it is there at once.
        key : str, optional
            Names this call: under one key it is carried out once, and a repeat gets the first
            outcome, as long as the instance lives.
        **kwargs
            Plain values and artifacts, by name.

        Raises
        ------
        CallFailed
            When the function raised what is no error of this package.
        OwnerGone
            When this life of the instance is over; nothing was begun.
        Unknown
            When it ended while the call may have been under way.
        Poisoned, Unimplemented, DeadlineExceeded
            See `docs/instances.md`.
        """
        core: Core = self._session._core  # noqa: SLF001 - the handle's own session
        limit = core.deadline(deadline)
        request = CallInstance(
            rid=core.link.next_rid(),
            instance=self.name,
            attachment=self.attachment,
            function=function,
            args=instances.packed(args, kwargs),
            key="" if key is None else check_name(key, what="the key of a call"),
            deadline_s=0.0,
        )
        if not core.asynchronous:
            # In the caller's thread: no hop to the event loop and back.
            raw = instances.call(core, self.state.card, request, limit)
            return instances.result_of(raw, self._session)

        async def work() -> Any:
            raw = await core.in_thread(
                instances.call, core, self.state.card, request, limit
            )
            return instances.result_of(raw, self._session)

        return core.call(work)

    def transform_into(
        self,
        artifact: Artifact | str,
        *,
        names: Mapping[str, str] | None = None,
        partial: bool = False,
        expect: int | None = None,
        deadline: float | None = None,
    ) -> Any:
        """Write an artifact (or a view of one) over its live weights: all, or nothing.

        Parameters
        ----------
        artifact : Artifact or str
            What to write.
        names : mapping of str to str, optional
            Name of the artifact's tensor -> name of the weight, where they differ.
        partial : bool
            The artifact has only some of the weights.
        expect : int, optional
            The version of it that must be there now.
        deadline : float, optional
            Seconds.

        Raises
        ------
        Mismatch
            Naming everything that does not fit; nothing was written.
        Poisoned
            When it failed after the first byte: the instance takes no work any more.
        """
        more: dict[str, Any] = {"partial": partial}
        if names is not None:
            more["names"] = dict(names)
        if expect is not None:
            more["expect"] = expect
        return self.call("transform_into", artifact, deadline=deadline, **more)

    def transform_register(
        self,
        id: str,  # noqa: A002
        *,
        names: Iterable[str] | None = None,
        deadline: float | None = None,
    ) -> Any:
        """Have it lend its live weights (or those of these names) under an id; the artifact."""
        more: dict[str, Any] = {} if names is None else {"names": list(names)}
        return self.call("transform_register", id, deadline=deadline, **more)

    def manifest(self, deadline: float | None = None) -> Any:
        """Ask what it holds."""
        return self.call("manifest", deadline=deadline)

    def publish_session(
        self,
        session: str,
        id: str | None = None,  # noqa: A002
        *,
        deadline: float | None = None,
    ) -> Any:
        """Have it put all that another engine needs to go on with a session; the artifact."""
        more: dict[str, Any] = {} if id is None else {"id": id}
        return self.call("publish_session", session, deadline=deadline, **more)

    def hydrate(
        self, artifact: Artifact | str, session: str, *, deadline: float | None = None
    ) -> Any:
        """Have it take a session in that another instance has put; what the engine returns."""
        return self.call("hydrate", artifact, session, deadline=deadline)

    def evict_local(self, session: str, *, deadline: float | None = None) -> Any:
        """Have the engine forget a session; what it returns."""
        return self.call("evict_local", session, deadline=deadline)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InstanceHandle) and self.attachment == other.attachment

    def __hash__(self) -> int:
        return hash(self.attachment)

    def __repr__(self) -> str:
        how = f" poisoned: {self.poisoned}" if self.poisoned else ""
        return (
            f"<Instance {self.name!r} at {self.state.card.name or self.node[:8]}{how}>"
        )

    def _repr_html_(self) -> str:
        return instance_card(self.state)
