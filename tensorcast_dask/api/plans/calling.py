"""Steps that call an instance, as a task of a plan carries them out.

Rules:

1. A call goes to the life of the instance that was seen when the plan was handed over, by way of
   the node that it is attached to. The catalog holds the step to that life.
2. Its key is made of the plan's life, the step, the run in which it was begun, and how many times
   the instance has said for sure that it failed. So whoever makes the step again, the instance
   carries it out once.
3. When nobody can say whether it was made, it ends as Unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.api.actions import instances
from tensorcast_dask.api.artifact import Artifact
from tensorcast_dask.exceptions import (
    AbsentError,
    Mismatch,
    NotFound,
    OwnerGone,
    ReachError,
    TensorCastError,
    Unknown,
)
from tensorcast_dask.tensors import values
from tensorcast_dask.tensors.messages import (
    ArtifactInfo,
    CallInstance,
    StepOutcome,
    StepStatus,
)
from tensorcast_dask.tensors.plans import ArtifactRef

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.api.connection.core import Core
    from tensorcast_dask.api.connection.deadlines import Deadline
    from tensorcast_dask.tensors.messages import NodeCard
    from tensorcast_dask.tensors.plans import Step

__all__ = ["CARRIED_OUT", "Caller", "arguments"]

#: In the data of an error: the instance says that it has carried the call out.
CARRIED_OUT: Final = "carried_out"


class Caller:
    """One step's calls, over all its attempts in one task.

    Parameters
    ----------
    core : Core
        The worker's own session.
    step : Step
        What is to be called.
    attachment : str
        Of which life; "" where none was found when the plan was handed over.
    key : str
        Begins the names of its calls.
    card : NodeCard, optional
        This worker's own node, where the instance is attached to it.
    again : bool
        Somebody may have made it before.
    """

    def __init__(
        self,
        core: Core,
        step: Step,
        attachment: str,
        key: str,
        *,
        card: NodeCard | None,
        again: bool,
    ) -> None:
        self._own = card
        self._core = core
        self._step = step
        self._attachment = attachment
        self._key = key
        self._doubt = again
        self._failures = 0

    def make(self, args: bytes, limit: Deadline) -> StepOutcome:
        """Make the call.

        Raises
        ------
        TensorCastError
            What it came to; Unknown where that cannot be told.
        """
        step = self._step
        try:
            card = self._own or self._core.bridge(self._card, limit)
        except AbsentError as error:
            raise self._gone(error) from error
        request = CallInstance(
            rid=self._core.link.next_rid(),
            instance=step.instance,
            attachment=self._attachment,
            function=str(step.options["function"]),
            args=args,
            key=f"{self._key}/{self._failures}",
            deadline_s=0.0,
        )
        try:
            value = instances.call(self._core, card, request, limit)
        except TensorCastError as error:
            if error.data.get(CARRIED_OUT):
                self._failures += 1
                self._doubt = False
            elif isinstance(error, OwnerGone | NotFound):
                raise self._gone(error) from error
            elif isinstance(error, ReachError):
                self._doubt = True
            raise
        return StepOutcome(
            status=StepStatus.DONE, kind="plain", value=value, node=card.node
        )

    async def _card(self, limit: Deadline) -> Any:
        name = self._step.instance
        state = await instances.find(self._core, name, limit)
        if state.record.attachment != self._attachment:
            was = "the process that was" if self._attachment else "there was no"
            message = (
                f"{was} instance {name!r} when the plan was handed over"
                f"{' is gone' if self._attachment else ''}; the one that is there now is asked "
                "by a plan of its own"
            )
            raise NotFound(message, {"instance": name})
        return state.card

    def _gone(self, error: TensorCastError) -> TensorCastError:
        if self._doubt:
            message = (
                f"instance {self._step.instance!r} is gone, and step {self._step.name!r} may "
                "have been carried out by it; look at its effects before you go on"
            )
            return Unknown(message, {"instance": self._step.instance})
        if self._attachment:
            return OwnerGone(error.message, error.data)
        return error


def arguments(
    step: Step,
    target: Artifact | None,
    value_of: Callable[[str], Any],
) -> bytes:
    """Give the arguments of a call, with what earlier steps gave in its place."""

    def meet(reference: values.Reference) -> object:
        match reference:
            case ArtifactRef():
                return reference.info()
            case ArtifactInfo():
                return reference
            case _:
                value = value_of(reference.step)
                return value.info if isinstance(value, Artifact) else value

    given = values.unpack(step.args, meet)
    if not isinstance(given, list) or len(given) != 2:
        message = f"step {step.name!r}: a call has a list of arguments and a dict"
        raise Mismatch(message)
    args, kwargs = given
    before = [] if target is None else [target.info]
    return values.pack([[*before, *args], kwargs], what="the arguments")
