"""Spans of OpenTelemetry around a request, in every process that it comes through.

Rules:

1. Nothing is imported here: spans are made where the process itself has loaded
   `opentelemetry.trace` (its own code, or `opentelemetry-instrument`, which also reaches the
   processes that it starts). Elsewhere a span costs one look-up.
2. A trace travels as text (`tensors.traces`): in the id of a request, and in the orders and
   calls that follow from it. Only traces that are recorded travel.
3. A span never changes how a call ends: an error of ours is noted on it and goes on.
"""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorcast_dask.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["active", "begin", "here", "span"]


def active() -> bool:
    """Whether this process makes spans."""
    return "opentelemetry.trace" in sys.modules


def here() -> str:
    """Give the span that is current, as text; "" without one that is recorded."""
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return ""
    now = api.get_current_span().get_span_context()
    if not (now.is_valid and now.trace_flags.sampled):
        return ""
    return f"{now.trace_id:032x}-{now.span_id:016x}"


def _parent(api: Any, cause: str) -> Any:  # noqa: ANN401
    """Give the context of what caused a span; None when its text says nothing."""
    trace, _, span_id = cause.partition("-")
    try:
        remote = api.SpanContext(
            int(trace, 16),
            int(span_id, 16),
            is_remote=True,
            trace_flags=api.TraceFlags(1),
        )
    except ValueError:
        return None
    return api.set_span_in_context(api.NonRecordingSpan(remote))


def begin(
    name: str, cause: str, **attributes: str | float
) -> Callable[[BaseException | str | None], None]:
    """Begin a span that its caller ends, with the error if there was one.

    Parameters
    ----------
    name : str
        What is done.
    cause : str
        The span that it follows from, as text.
    **attributes
        Said on the span, under `tensorcast.`.

    Returns
    -------
    callable
        Ends the span.
    """
    api: Any = sys.modules.get("opentelemetry.trace")
    parent = None if api is None or not cause else _parent(api, cause)
    if parent is None:
        return _nothing
    made = _tracer(api).start_span(
        name, context=parent, attributes=_attributes(attributes)
    )

    def end(error: BaseException | str | None = None) -> None:
        if error is not None:
            _note(api, made, error)
        made.end()

    return end


@contextlib.contextmanager
def span(
    name: str, cause: str | None = None, **attributes: str | float
) -> Iterator[Callable[[BaseException | str], None]]:
    """Make a block a span; what it gives notes an error that is not raised.

    Parameters
    ----------
    name : str
        What is done.
    cause : str, optional
        The span that it follows from, as text: without one nothing is made. None: the
        current span of this thread or task, if any.
    **attributes
        Said on the span, under `tensorcast.`.
    """
    api: Any = sys.modules.get("opentelemetry.trace")
    context = None
    if api is not None and cause is not None:
        context = _parent(api, cause) if cause else None
    if api is None or (cause is not None and context is None):
        yield _nothing
        return
    with _tracer(api).start_as_current_span(
        name,
        context=context,
        attributes=_attributes(attributes),
        record_exception=False,
        set_status_on_exception=False,
    ) as made:
        try:
            yield partial(_note, api, made)
        except BaseException as error:
            _note(api, made, error)
            raise


def _tracer(api: Any) -> Any:  # noqa: ANN401
    return api.get_tracer("tensorcast_dask", __version__)


def _attributes(given: dict[str, str | float]) -> dict[str, str | float]:
    return {f"tensorcast.{name}": value for name, value in given.items()}


def _note(api: Any, made: Any, error: BaseException | str) -> None:  # noqa: ANN401
    kind = error if isinstance(error, str) else type(error).__name__
    made.set_attribute("error.type", kind)
    made.set_status(api.Status(api.StatusCode.ERROR, str(error)[:1000]))


def _nothing(error: BaseException | str | None = None) -> None:
    """No span was made."""
