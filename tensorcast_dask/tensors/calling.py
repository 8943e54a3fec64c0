"""Steps that call an instance.

Rules:

1. A call goes to the life of the instance that was seen when the plan was handed over, by way of
   the node that it is attached to. The catalog holds the step to that life.
2. Its key is made of the plan's life, the step, the run in which it was begun, and how many times
   the instance has said for sure that it failed. So whoever makes the step again, the instance
   carries it out once.
3. When nobody can say whether it was made, it ends as Unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

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
    Instances,
    InstancesAsked,
    InstanceState,
    NodeCard,
    StepOutcome,
    StepStatus,
)
from tensorcast_dask.tensors.plans import ArtifactRef, Step
from tensorcast_dask.tensors.wants import NO_RID, Asking, Call, ask

__all__ = ["Calling", "arguments", "found"]

#: In the data of an error: the instance says that it has carried the call out.
_CARRIED_OUT: Final = "carried_out"


class Calling:
    """One step's calls, over all its attempts by one driver.

    Parameters
    ----------
    step : Step
        What is to be called.
    attachment : str
        Of which life; "" where none was found when the plan was handed over.
    key : str
        Begins the names of its calls.
    card : NodeCard, optional
        The node that the instance is attached to, where that is known.
    again : bool
        Somebody may have made it before.
    """

    def __init__(
        self,
        step: Step,
        attachment: str,
        key: str,
        *,
        card: NodeCard | None,
        again: bool,
    ) -> None:
        self._card = card
        self._step = step
        self._attachment = attachment
        self._key = key
        self._doubt = again
        self._failures = 0

    def make(self, args: bytes) -> Asking[StepOutcome]:
        """Make the call.

        Raises
        ------
        TensorCastError
            What it came to; Unknown where that cannot be told.
        """
        step = self._step
        try:
            card = self._card or (yield from self._where())
        except AbsentError as error:
            raise self._gone(error) from error
        request = CallInstance(
            rid=NO_RID,
            instance=step.instance,
            attachment=self._attachment,
            function=str(step.options["function"]),
            args=args,
            key=f"{self._key}/{self._failures}",
            deadline_s=0.0,
        )
        try:
            value = cast("bytes", (yield Call(card, request)))
        except TensorCastError as error:
            if error.data.get(_CARRIED_OUT):
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

    def _where(self) -> Asking[NodeCard]:
        name = self._step.instance
        there = yield from ask(InstancesAsked(rid=NO_RID), Instances)
        state = found(there.instances, name)
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


def found(there: tuple[InstanceState, ...], name: str) -> InstanceState:
    """Find an instance by its name.

    Raises
    ------
    NotFound
        When none is attached under it.
    """
    for state in there:
        if state.record.name == name:
            return state
    known = ", ".join(repr(state.record.name) for state in there) or "none"
    message = f"no instance {name!r} is attached; there are: {known}"
    raise NotFound(message, {"instance": name})


def arguments(
    step: Step,
    target: ArtifactInfo | None,
    look: Callable[[str], object],
) -> bytes:
    """Give the arguments of a call, with what earlier steps gave in its place."""

    def meet(reference: values.Reference) -> object:
        match reference:
            case ArtifactRef():
                return reference.info()
            case ArtifactInfo():
                return reference
            case _:
                return look(reference.step)

    given = values.unpack(step.args, meet)
    if not isinstance(given, list) or len(given) != 2:
        message = f"step {step.name!r}: a call has a list of arguments and a dict"
        raise Mismatch(message)
    args, kwargs = given
    before = [] if target is None else [target]
    return values.pack([[*before, *args], kwargs], what="the arguments")
