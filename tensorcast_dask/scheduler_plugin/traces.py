"""Spans of the catalog: from a request to its answer, and what orders follow from it.

Rules:

1. A request that tells of a span gets one here, from when it is heard to when it is answered.
2. An order that goes out while a request is heard follows from it. What the catalog does later
   (a next try, a repair) follows from nobody.
3. At most `MAX_OPEN` requests are followed at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.dataplane import tracing
from tensorcast_dask.scheduler_plugin.state.events import (
    Asked,
    Reply,
    SessionLost,
    ToNodeSend,
)
from tensorcast_dask.tensors.messages import DoLoad, DoPull, DoSave, Fault
from tensorcast_dask.tensors.traces import cause_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.scheduler_plugin.state.events import Event, Instruction
    from tensorcast_dask.tensors.ids import RequestId, SessionId

__all__ = ["MAX_OPEN", "Traces"]

MAX_OPEN: Final = 4096


class Traces:
    """The spans of requests that are not answered yet."""

    def __init__(self) -> None:
        self._open: dict[RequestId, Callable[[str | None], None]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def heard(self, event: Event) -> str:
        """Begin the span of a request; give the cause of what follows from it, as text."""
        if isinstance(event, SessionLost) and self._open:
            self._lost(event.session)
        if not isinstance(event, Asked) or not tracing.active():
            return ""
        rid = event.request.rid
        cause = cause_of(rid)
        if cause and rid not in self._open and len(self._open) < MAX_OPEN:
            name = f"catalog {type(event.request).__name__}"
            self._open[rid] = tracing.begin(name, cause)
        return cause

    def _lost(self, session: SessionId) -> None:
        """End what is asked again, if at all, when the session is back."""
        for rid in [one for one in self._open if one.startswith(f"{session}:")]:
            self._open.pop(rid)("session lost")

    def said(self, instruction: Instruction, cause: str) -> Instruction:
        """End the span of what is answered; give the instruction, with its cause."""
        match instruction:
            case Reply(rid=rid, value=value) if self._open:
                end = self._open.pop(rid, None)
                if end is not None:
                    end(value.kind if isinstance(value, Fault) else None)
            case ToNodeSend(message=DoPull() | DoLoad() | DoSave() as order) if cause:
                return ToNodeSend(
                    link=instruction.link,
                    message=msgspec.structs.replace(order, trace=cause),
                )
        return instruction
