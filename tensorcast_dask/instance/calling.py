"""One call, carried out: arguments in, a function of this process, its value or error out."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from tensorcast_dask.dataplane import tracing
from tensorcast_dask.exceptions import (
    CallFailed,
    InvalidArgument,
    TensorCastError,
    Unknown,
)
from tensorcast_dask.instance.handles import Artifact
from tensorcast_dask.tensors import values
from tensorcast_dask.tensors.messages import ArtifactInfo, Call, CallEnded, Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.instance.artifacts import Artifacts

__all__ = ["outcome_of"]

logger = logging.getLogger(__name__)


def outcome_of(
    call: Call, find: Callable[[str], Callable[..., Any]], artifacts: Artifacts
) -> CallEnded:
    """Carry a call out; never raises what the function did.

    Parameters
    ----------
    call : Call
        What is asked.
    find : callable
        Gives the function of a name, or raises Unimplemented.
    artifacts : Artifacts
        What references to artifacts become.
    """

    def meet(reference: values.Reference) -> object:
        if isinstance(reference, ArtifactInfo):
            return Artifact(reference, artifacts)
        message = "the caller sent a reference that it should have looked up"
        raise Unknown(message)

    try:
        args, kwargs = _arguments(values.unpack(call.args, meet))
        function = find(call.function)
        if call.trace:
            with tracing.span(f"instance {call.function}", call.trace):
                result = function(*args, **kwargs)
        else:
            result = function(*args, **kwargs)
        value = values.pack(_lowered(result), what=f"what {call.function} returns")
    except TensorCastError as error:
        return _failed(call, error)
    except Exception as error:
        logger.warning("%s failed", call.function, exc_info=True)
        said = f"{call.function!r} raised {type(error).__name__}: {error}"
        failure = CallFailed(said, {"exception": type(error).__name__})
        return _failed(call, failure)
    return CallEnded(number=call.number, value=value)


def _failed(call: Call, error: TensorCastError) -> CallEnded:
    """End a call with an error that is for sure: it was carried out, and failed."""
    fault = Fault.of(error)
    data = {**fault.data, "carried_out": True}
    return CallEnded(
        number=call.number, fault=msgspec.structs.replace(fault, data=data)
    )


def _arguments(given: object) -> tuple[list[Any], dict[str, Any]]:
    if isinstance(given, list) and len(given) == 2:
        args, kwargs = given
        if isinstance(args, list) and isinstance(kwargs, dict):
            return args, kwargs
    message = "a call carries a list of arguments and a dict of named ones"
    raise InvalidArgument(message)


def _lowered(value: Any) -> object:
    if isinstance(value, Artifact):
        return value.info
    if isinstance(value, list | tuple):
        return [_lowered(one) for one in value]
    if isinstance(value, dict):
        return {name: _lowered(one) for name, one in value.items()}
    return getattr(value, "info", value)
