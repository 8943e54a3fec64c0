"""The catalog, as an instance asks it: its node carries the session.

Rule: a change that was sent and never answered is Unknown to its caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from tensorcast_dask.dataplane.carried import CarriedSession
from tensorcast_dask.exceptions import (
    CatalogUnavailable,
    DeadlineExceeded,
    PeerLost,
    TensorCastError,
    Unknown,
)
from tensorcast_dask.instance.line import Waiter
from tensorcast_dask.tensors.messages import Answer, SessionOpen, decode

if TYPE_CHECKING:
    from tensorcast_dask.instance.line import Line
    from tensorcast_dask.tensors.ids import HostId, RequestId
    from tensorcast_dask.tensors.messages import Message, SessionIn

__all__ = ["CatalogSession"]

T = TypeVar("T")


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
        self._session = CarriedSession(self._carry, session, host)
        self.next_rid = self._session.next_rid
        self.heard_of = self._session.heard_of
        self.answered = self._session.heard

    @property
    def greeting(self) -> SessionOpen | None:
        """What the catalog said when it was opened last."""
        return self._session.greeting

    def _carry(self, message: SessionIn) -> bool:
        try:
            self._line.tell(message)
        except PeerLost:
            return False
        return True

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
        waiter = Waiter()
        self._session.ask(request, waiter.give)
        try:
            self._line.wait(waiter, within_s, what=type(request).__name__)
            answer: Answer = waiter.result()
        except (DeadlineExceeded, PeerLost) as error:
            sent = self._session.forget(rid)
            raise self._doubt(request, error, in_doubt=change and sent) from error
        except BaseException:
            self._session.forget(rid)
            raise
        if answer.fault is not None:
            raise answer.fault.error()
        return decode(answer.value, kind)

    def _doubt(
        self, request: Message, error: TensorCastError, *, in_doubt: bool
    ) -> TensorCastError:
        name = type(request).__name__
        if in_doubt:
            return Unknown(
                f"{name} was not answered; look whether it happened, then repeat"
            )
        if self._session.open and isinstance(error, DeadlineExceeded):
            return DeadlineExceeded(
                f"{name} was not answered in time; give it longer with deadline="
            )
        return CatalogUnavailable(
            f"the catalog does not answer ({name}); does the scheduler run?"
        )

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
