"""A session with the catalog whose messages a link carries, packed, among its own.

Rules:

1. The session is opened when it is first needed, and opened again under its id whenever the
   catalog is heard of anew; what was not answered is then asked again, in order, under its old id.
   Each greeting of the catalog has a number, where news of it may come late or twice; what is sent
   says after which.
2. Nothing here waits: an answer goes to whoever asked, in the thread that brings it.
"""

from __future__ import annotations

import itertools
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorcast_dask.dataplane import tracing
from tensorcast_dask.tensors.ids import RequestId, SessionId
from tensorcast_dask.tensors.messages import (
    Answer,
    OpenSession,
    SessionIn,
    SessionOpen,
    decode,
    encode,
)
from tensorcast_dask.tensors.traces import rid_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.tensors.ids import HostId
    from tensorcast_dask.tensors.messages import Message

__all__ = ["CarriedSession"]


@dataclass(slots=True, eq=False)
class _Asked:
    """A request without an answer."""

    raw: bytes
    answered: Callable[[Answer], None]
    sent: bool = False


class CarriedSession:
    """One session.

    Parameters
    ----------
    carry : callable
        Sends a message on its way; False when nobody takes it now: then `heard_of` follows.
    session : str
        Its id.
    host : HostId
        This process's host.
    """

    def __init__(
        self, carry: Callable[[SessionIn], bool], session: str, host: HostId
    ) -> None:
        self._carry = carry
        self.session = SessionId(session)
        self._host = host
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._asked: dict[RequestId, _Asked] = {}
        #: Whether the catalog listens, and which of its greetings was heard of last.
        self._up = False
        self._greeting = 0
        #: Whether this session is open there.
        self.open = False
        self._opening: RequestId | None = None
        self.greeting: SessionOpen | None = None

    def next_rid(self, cause: str = "") -> RequestId:
        """Mint the id of a request that follows from `cause`, else from the current span."""
        number = next(self._numbers)
        return RequestId(rid_of(self.session, number, cause or tracing.here()))

    def ask(self, request: Message, answered: Callable[[Answer], None]) -> None:
        """Ask; the answer, or why the session was refused, goes to `answered`."""
        rid: RequestId = request.rid  # type: ignore[attr-defined]
        with self._lock:
            self._asked[rid] = _Asked(encode(request), answered)
            self._flush()

    def forget(self, rid: RequestId) -> bool:
        """Wait no longer for an answer; say whether the request was sent."""
        with self._lock:
            asked = self._asked.pop(rid, None)
        return asked is not None and asked.sent

    # ------------------------------------------------------------ the carrier's thread
    def heard_of(self, *, up: bool, greeting: int = 0) -> None:
        """Take the news that the catalog listens anew, or does not."""
        with self._lock:
            if up and self._up and greeting == self._greeting:
                return  # heard before
            self._up, self.open, self._opening = up, False, None
            self._greeting = greeting
            for asked in self._asked.values():
                asked.sent = asked.sent and not up
            if up and (self._asked or self.greeting is not None):
                self._flush()

    def heard(self, raw: bytes) -> None:
        """Take an answer."""
        answer = decode(raw, Answer)
        refused: list[_Asked] = []
        with self._lock:
            if answer.rid == self._opening:
                self._opening = None
                if answer.fault is None:
                    self.greeting = decode(answer.value, SessionOpen)
                    self.open = True
                    self._flush()
                    return
                refused = list(self._asked.values())
                self._asked.clear()
            known = self._asked.pop(answer.rid, None)
        for asked in refused if known is None else [known]:
            asked.answered(answer)

    # ------------------------------------------------------------ small parts
    def _flush(self) -> None:
        """Send what can be sent; under the lock."""
        if not self._up:
            return
        if not self.open:
            if self._opening is None:
                self._opening = self.next_rid()
                settled = min(
                    int(one.rpartition(":")[2]) for one in (self._opening, *self._asked)
                )
                hello = OpenSession(
                    rid=self._opening,
                    session=self.session,
                    pid=os.getpid(),
                    host=self._host,
                    settled=settled,
                )
                self._say(encode(hello))
            return
        for asked in self._asked.values():
            if not asked.sent:
                asked.sent = True
                self._say(asked.raw)

    def _say(self, raw: bytes) -> None:
        said = SessionIn(session=self.session, raw=raw, greeting=self._greeting)
        if not self._carry(said):
            self._up = False  # it is heard of anew
