"""The result journal: what a request id was answered, so that a repeat does nothing.

Rules:

1. The first request of an id is carried out; repeats of the same payload wait for, or
   get, its answer; another payload under the id is a Mismatch.
2. An answer is kept `ttl_s` from when it was given, a running request for ever.
3. What was refused for want of something that may change (a retryable error) is not
   kept: the repeat is a new try.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import TYPE_CHECKING, Final

from tensorcast_dask.exceptions import Mismatch
from tensorcast_dask.tensors.messages import Refused, StoreReply

if TYPE_CHECKING:
    from tensorcast_dask.tensors.ids import RequestId

__all__ = ["NEW", "RUNNING", "Begun", "Results"]


class Begun(Enum):
    """What `begin` found, when there is no answer yet."""

    NEW = "new"  # carry it out, then `finish` or `forget`
    RUNNING = "running"  # another thread does; ask again


NEW: Final = Begun.NEW
RUNNING: Final = Begun.RUNNING


class Results:
    """Answers by request id.

    Parameters
    ----------
    ttl_s : float
        How long an answer is kept.
    """

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._running: dict[RequestId, int] = {}
        #: Oldest answer first: (payload digest, answer, end of its life).
        self._done: OrderedDict[RequestId, tuple[int, StoreReply, float]] = (
            OrderedDict()
        )

    def __len__(self) -> int:
        return len(self._done)

    @property
    def running(self) -> int:
        """How many requests are being carried out."""
        return len(self._running)

    def begin(self, rid: RequestId, *, digest: int, now_s: float) -> StoreReply | Begun:
        """Start a request, or return what it was answered.

        Raises
        ------
        Mismatch
            When the id was used for another payload.
        """
        self._expire(now_s)
        done = self._done.get(rid)
        known = self._running.get(rid) if done is None else done[0]
        if known is None:
            self._running[rid] = digest
            return NEW
        if known != digest:
            message = (
                f"request id {rid!r} was used for another request; mint a new id for "
                "each change"
            )
            raise Mismatch(message, {"rid": rid})
        return RUNNING if done is None else done[1]

    def finish(self, rid: RequestId, answer: StoreReply, *, now_s: float) -> None:
        """Record the answer of a running request."""
        digest = self._running.pop(rid)
        if isinstance(answer, Refused) and answer.fault.error().retryable:
            return  # rule 3
        self._done[rid] = (digest, answer, now_s + self.ttl_s)

    def forget(self, rid: RequestId) -> None:
        """Give a running request up without an answer: its repeat is a new try."""
        self._running.pop(rid, None)

    def _expire(self, now_s: float) -> None:
        while self._done:
            rid = next(iter(self._done))
            if self._done[rid][2] > now_s:
                return
            del self._done[rid]
