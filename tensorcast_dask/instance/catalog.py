"""The catalog, as an instance asks it: its node carries the session.

Rules:

1. The session is opened when it is first needed, and opened again under its id whenever the
   catalog is heard of anew; what was not answered is then asked again under its old id.
2. A change that was sent and never answered is Unknown to its caller.
"""

from __future__ import annotations

import itertools
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tensorcast_dask.dataplane import tracing
from tensorcast_dask.exceptions import (
    CatalogUnavailable,
    DeadlineExceeded,
    PeerLost,
    TensorCastError,
    Unknown,
)
from tensorcast_dask.instance.line import Waiter
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
    from tensorcast_dask.instance.line import Line
    from tensorcast_dask.tensors.ids import HostId
    from tensorcast_dask.tensors.messages import Message

__all__ = ["CatalogSession"]

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Asked:
    """A request without an answer."""

    raw: bytes
    waiter: Waiter
    sent: bool = False


class CatalogSession:
    """Ask the catalog.

    Parameters
    ----------
    line : Line
        To the node that carries it.
    session : str
        Its id.
    host : HostId
        This process's host.
    """

    def __init__(self, line: Line, session: str, host: HostId) -> None:
        self._line = line
        self._session = SessionId(session)
        self._host = host
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._asked: dict[RequestId, _Asked] = {}
        #: Whether the catalog listens; whether this session is open there.
        self._up = False
        self._open = False
        self._opening: RequestId | None = None
        self.greeting: SessionOpen | None = None

    def next_rid(self) -> RequestId:
        """Mint the id of a request."""
        return RequestId(rid_of(self._session, next(self._numbers), tracing.here()))

    def ask(
        self, request: Message, kind: type[T], *, within_s: float, change: bool = False
    ) -> T:
        """Ask, and wait for the answer.

        Raises
        ------
        TensorCastError
            What the catalog answered; CatalogUnavailable, Unknown, DeadlineExceeded when it
            did not.
        """
        rid: RequestId = request.rid  # type: ignore[attr-defined]
        asked = _Asked(encode(request), Waiter())
        with self._lock:
            self._asked[rid] = asked
            self._flush()
        try:
            self._line.wait(asked.waiter, within_s, what=type(request).__name__)
            answer: Answer = asked.waiter.result()
        except (DeadlineExceeded, PeerLost) as error:
            raise self._doubt(request, asked, error, change=change) from error
        finally:
            with self._lock:
                self._asked.pop(rid, None)
        if answer.fault is not None:
            raise answer.fault.error()
        return decode(answer.value, kind)

    def _doubt(
        self, request: Message, asked: _Asked, error: TensorCastError, *, change: bool
    ) -> TensorCastError:
        name = type(request).__name__
        if change and asked.sent:
            return Unknown(
                f"{name} was not answered; look whether it happened, then repeat"
            )
        if self._open and isinstance(error, DeadlineExceeded):
            return DeadlineExceeded(
                f"{name} was not answered in time; give it longer with deadline="
            )
        return CatalogUnavailable(
            f"the catalog does not answer ({name}); does the scheduler run?"
        )

    # ------------------------------------------------------------ the line's thread
    def heard_of(self, *, up: bool) -> None:
        """Take the news that the catalog listens anew, or does not."""
        with self._lock:
            if up and self._up:
                return  # heard before
            self._up, self._open, self._opening = up, False, None
            for asked in self._asked.values():
                asked.sent = asked.sent and not up
            if up and (self._asked or self.greeting is not None):
                self._flush()

    def answered(self, raw: bytes) -> None:
        """Take an answer."""
        answer = decode(raw, Answer)
        with self._lock:
            if answer.rid == self._opening:
                self._opening = None
                if answer.fault is None:
                    self.greeting = decode(answer.value, SessionOpen)
                    self._open = True
                    self._flush()
                else:
                    error = answer.fault.error()
                    for asked in self._asked.values():
                        asked.waiter.give(error=error)
                return
            known = self._asked.get(answer.rid)
        if known is not None:
            known.waiter.give(answer)

    # ------------------------------------------------------------ small parts
    def _flush(self) -> None:
        """Send what can be sent; under the lock."""
        if not self._up:
            return
        if not self._open:
            if self._opening is None:
                self._opening = self.next_rid()
                settled = min(
                    int(one.rpartition(":")[2]) for one in (self._opening, *self._asked)
                )
                hello = OpenSession(
                    rid=self._opening,
                    session=self._session,
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
        try:
            self._line.tell(SessionIn(session=self._session, raw=raw))
        except PeerLost:
            self._up = False  # it is heard of anew after the next attachment

    def greeted(self, within_s: float) -> SessionOpen:
        """Give the catalog's greeting, asking for it where it did not come yet.

        Raises
        ------
        CatalogUnavailable
            When it does not come.
        """
        if self.greeting is None:
            from tensorcast_dask.tensors.messages import Nodes, NodesAsked  # noqa: PLC0415

            self.ask(NodesAsked(rid=self.next_rid()), Nodes, within_s=within_s)
        greeting: Any = self.greeting
        assert isinstance(greeting, SessionOpen), (
            "catalog: an answer follows a greeting"
        )
        return greeting
