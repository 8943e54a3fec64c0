"""A process of a node's host becomes an instance of the node.

Rules:

1. One unix socket and one thread; no Dask, no event loop. The thread carries calls out, one
   after the other, and goes on reading while a function waits for the node.
2. When the node's store ends, the process looks for another one of its cluster, each second, and
   attaches again as the same life: what it has answered under a key, and what it lends, is the
   same. When another process takes the name, this one is let go for good, also where it hears of
   that only at the end of what it was doing.
3. What a call came to under its key is remembered here, where its effects are.
4. In a forked child nothing works, and nothing is closed: the attachment is the parent's.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, overload

from tensorcast_dask.dataplane import faults
from tensorcast_dask.exceptions import (
    InvalidArgument,
    PeerLost,
    StaleOwner,
    TensorCastError,
    Unimplemented,
)
from tensorcast_dask.instance.artifacts import Artifacts
from tensorcast_dask.instance.calling import outcome_of
from tensorcast_dask.instance.catalog import CatalogSession
from tensorcast_dask.instance.engine import CONTRACT, Contract
from tensorcast_dask.instance.finding import find_store
from tensorcast_dask.instance.line import Line, Waiter
from tensorcast_dask.instance.state.calls import Calls
from tensorcast_dask.tensors.ids import NodeId, RequestId, check_name
from tensorcast_dask.tensors.messages import (
    Attach,
    Attached,
    Call,
    CallAnswered,
    CallDropped,
    CallEnded,
    CallerHere,
    CallInstance,
    Changed,
    Done,
    InstanceRecord,
    LendEnded,
    Load,
    PartAsked,
    Refused,
    Replaced,
    Seen,
    SessionOut,
    ToInstance,
)
from tensorcast_dask.tensors.messages.signals import MAX_REQUESTS
from tensorcast_dask.tensors.traces import cause_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tensorcast_dask.instance.handles import Artifact, Registered
    from tensorcast_dask.tensors.messages import NodeCard
    from tensorcast_dask.tensors.messages.signals import RequestLoad

__all__ = ["Instance", "attach"]

logger = logging.getLogger(__name__)

F = TypeVar("F", bound="Callable[..., Any]")

_RETRY_S: Final = 1.0
_ATTACH_S: Final = 10.0
#: How long `attach` waits until the catalog lists the instance.
_LISTED_S: Final = 5.0
DEFAULT_S: Final = 600.0


def attach(
    name: str,
    *,
    engine: object = None,
    labels: Mapping[str, str] | None = None,
    cluster: str | None = None,
    node: str | None = None,
    run_dir: str = "",
) -> Instance:
    """Attach this process to a node of its host, under a name.

    Parameters
    ----------
    name : str
        One in the cluster; another process of that name is let go.
    engine : object, optional
        Offers what it has of `instance.engine.Engine`; see there.
    labels : mapping of str to str, optional
        To find it by.
    cluster : str, optional
        Name (by default the scheduler's address) or id of the cluster, or its folder's name;
        default TENSORCAST_CLUSTER, else the only one that runs on this host.
    node : str, optional
        Identity or name of the node; default TENSORCAST_NODE, else the one with the fewest
        instances.
    run_dir : str
        The run directory, where it is not that of the environment.

    Returns
    -------
    Instance
        `where` says which node it is, and why. A context manager that detaches.

    Raises
    ------
    NotFound, InvalidArgument
        When no node runs here, or several clusters do.
    PeerLost
        When the node does not answer.
    """
    check_name(name, what="the name of an instance")
    return Instance(
        name,
        engine=engine,
        labels=dict(labels or {}),
        choice={"cluster": cluster, "node": node, "run_dir": run_dir},
    )


class Instance:
    """The process, attached to a node. Made by `attach`.

    Attributes
    ----------
    name : str
        Its name in the cluster.
    attachment : str
        This life of it.
    where : str
        The node, and why it was chosen.
    """

    def __init__(
        self, name: str, *, engine: object, labels: dict[str, str], choice: Any
    ) -> None:
        self.name = name
        self.attachment = secrets.token_hex(16)
        self._choice = choice
        self._labels = labels
        self._lock = threading.RLock()
        self._functions: dict[str, Callable[..., Any]] = {}
        self._holds: dict[str, int] = {}
        self._calls = Calls()
        self._fenced = ""
        self._closing = False
        self._attached = threading.Event()
        self._listed = Waiter()
        self._term = 0
        self._since_s = time.monotonic()
        self._times = 0
        #: Whether the catalog listens.
        self._up = False
        self._line = Line(self._heard, self._called)
        self.card, self.where = self._find()
        self._session = CatalogSession(
            self._line, f"instance-{self.attachment}", self.card.host
        )
        self._artifacts = Artifacts(
            self._line, self._session, self._own_card, NodeId(self.attachment)
        )
        self._artifacts.run_dir = choice["run_dir"]
        self._contract = Contract(engine, self._artifacts, self)
        self._connect()
        self._line.thread = threading.Thread(
            target=self._run, name=f"tensorcast-instance-{name}", daemon=True
        )
        first = Waiter()
        self._first: Waiter | None = first
        self._line.thread.start()
        first.event.wait(_ATTACH_S)
        first.result()
        if self._up:
            self._listed.event.wait(_LISTED_S)
        logger.info("instance %r is attached to %s", name, self.where)

    def _find(self) -> tuple[NodeCard, str]:
        card, why = find_store(**self._choice)
        return card, f"node {card.name or card.node[:8]} ({card.node}): {why}"

    def _own_card(self) -> NodeCard:
        return self.card

    # ------------------------------------------------------------ what is asked of it
    @overload
    def function(self, function: F, /, *, name: str = "") -> F: ...
    @overload
    def function(self, /, *, name: str) -> Callable[[F], F]: ...
    def function(self, function: Any = None, /, *, name: str = "") -> Any:
        """Offer a function by name: to plans, and to `cast.instance(...).call`.

        It is called in the instance's thread with plain values and artifacts (`Artifact`), and returns
        plain values or an artifact.

        Parameters
        ----------
        function : callable
            The function; as a decorator with or without arguments.
        name : str
            Under which name; default its own.
        """
        if function is None:
            return lambda one: self._offer(one, name)
        return self._offer(function, name)

    def _offer(self, function: F, name: str) -> F:
        called = check_name(name or function.__name__, what="the name of a function")
        if called in CONTRACT:
            message = f"{called!r} is of the engine's contract; give the function another name"
            raise InvalidArgument(message)
        with self._lock:
            self._functions[called] = function
        self._changed()
        return function

    # ------------------------------------------------------------ what it says
    @property
    def attached(self) -> bool:
        """Whether a node has it now."""
        return self._attached.is_set()

    @property
    def poisoned(self) -> str:
        """Why it must not be used; "" while it can be."""
        return self._calls.poisoned

    @property
    def holds(self) -> dict[str, int]:
        """Versions that were written into its memory last, by artifact id."""
        return dict(self._holds)

    def push_load(
        self,
        *,
        draining: bool = False,
        requests: Iterable[RequestLoad] = (),
        ttl: float = 10.0,
        **numbers: float,
    ) -> None:
        """Say how busy the engine is: each push replaces the last one whole.

        While no node has the process it is dropped.

        Parameters
        ----------
        draining : bool
            It takes nothing new.
        requests : iterable of RequestLoad
            Candidates for a move to another instance.
        ttl : float
            Seconds after which the numbers are stale without another push.
        **numbers
            Finite numbers by name: queue lengths, tokens, rates.

        Raises
        ------
        InvalidArgument
            For what is no finite number.
        """
        self._check()
        given: dict[str, object] = {**numbers, "ttl": ttl}
        for name, number in given.items():
            if (
                isinstance(number, bool)
                or not isinstance(number, int | float)
                or not math.isfinite(number)
            ):
                message = f"load {name!r} must be a finite number, not {number!r}"
                raise InvalidArgument(message)
        load = Load(
            values={name: float(number) for name, number in numbers.items()},
            ttl_s=ttl,
            draining=draining,
            requests=tuple(requests)[:MAX_REQUESTS],
        )
        with contextlib.suppress(PeerLost):
            self._line.tell(load)

    def poison(self, why: str) -> None:
        """Say that this process must not be used until all of its weights are given anew."""
        self._calls.poisoned = why
        self._changed()

    def applied(self, artifact: str, version: int, *, whole: bool) -> None:
        """Note which version is in memory; `whole` mends what was poisoned."""
        self._holds[artifact] = version
        if whole:
            self._calls.poisoned = ""
        self._changed()

    def _record(self) -> InstanceRecord:
        with self._lock:
            return InstanceRecord(
                name=self.name,
                attachment=self.attachment,
                term=self._term,
                since_s=self._since_s,
                times=self._times,
                pid=os.getpid(),
                labels=self._labels,
                functions=tuple(self._functions),
                engine=self._contract.offered,
                poisoned=self.poisoned,
                holds=dict(self._holds),
            )

    def _changed(self) -> None:
        if self._attached.is_set():
            changed = Changed(rid=self._session.next_rid(), record=self._record())
            with contextlib.suppress(PeerLost):  # it is told with the next attachment
                self._line.ask(changed, Done, within_s=_ATTACH_S)

    # ------------------------------------------------------------ artifacts
    def register(
        self,
        tensors: Any,
        id: str,  # noqa: A002 - the field's word
        *,
        labels: Mapping[str, str] | None = None,
        version: int | str | None = None,
        copy: bool = False,
        deadline: float | None = None,
    ) -> Registered:
        """Lend tensors to the cluster, without a copy; this process keeps them.

        Tensors that lie on one device are lent by handle; who has the device too copies them
        there.

        Parameters
        ----------
        tensors : array or mapping of str to array
            Frozen until released, or inside `with registered.mutate():`.
        id : str
            Name of the artifact.
        labels : mapping of str to str, optional
            To find it by.
        version : int or "next", optional
            Another version of an id that exists.
        copy : bool
            Lend a copy in host memory where memory on a device has no handle.
        deadline : float, optional
            Seconds; None is 600.

        Returns
        -------
        Registered
            With `info`, `mutate()` and `release()`.

        Raises
        ------
        UnsupportedPlatform, Unimplemented
            For memory on a device that other processes cannot open; it names the setting.
        """
        self._check()
        within_s = _seconds(deadline)
        return self._artifacts.register(
            tensors, id, labels=labels, version=version, copy=copy, within_s=within_s
        )

    def put(
        self,
        tensors: Any,
        id: str,  # noqa: A002
        *,
        labels: Mapping[str, str] | None = None,
        version: int | str | None = None,
        deadline: float | None = None,
    ) -> Artifact:
        """Copy tensors into this node as a system-owned artifact; see `Session.put`."""
        self._check()
        return self._artifacts.put(
            tensors, id, labels=labels, version=version, within_s=_seconds(deadline)
        )

    def artifact(
        self,
        id: str,  # noqa: A002
        *,
        version: int = 0,
        deadline: float | None = None,
    ) -> Artifact:
        """Find an artifact by its id."""
        self._check()
        within_s = _seconds(deadline)
        return self._artifacts.find(id, version=version, within_s=within_s)

    # ------------------------------------------------------------ life
    def detach(self) -> None:
        """Leave the node: registrations end, calls are refused. Idempotent."""
        if self._closing or self._line.forked:
            return
        self._closing = True
        self._artifacts.end()
        self._line.wake()
        thread = self._line.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)
        self._attached.clear()
        self._line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        how = "attached" if self.attached else (self._fenced or "not attached")
        return f"<Instance {self.name!r} {how}, {self.where}>"

    def _check(self) -> None:
        self._line.check()
        if self._fenced:
            message = f"instance {self.name!r} was let go: {self._fenced}"
            raise StaleOwner(message)
        if self._closing:
            message = f"instance {self.name!r} is detached; attach again"
            raise StaleOwner(message)

    # ------------------------------------------------------------ the thread
    def _is_over(self) -> bool:
        return self._closing or bool(self._fenced)

    def _run(self) -> None:
        while not self._is_over():
            try:
                self._converse()
            except TensorCastError as error:
                logger.info("instance %r: %s", self.name, error)
            except Exception:
                logger.exception("instance %r lost its node by a defect", self.name)
            self._line.hear_out()
            self._attached.clear()
            self._line.close()
            self._session.heard_of(up=False)
            self._calls.forget_waiting()
            if self._is_over():
                break
            self._attach_again()
        self._line.end()

    def _attach_again(self) -> None:
        while not self._closing:
            time.sleep(_RETRY_S)
            try:
                self.card, self.where = self._find()
                self._connect()
            except TensorCastError as error:
                logger.debug("instance %r: %s", self.name, error)
            else:
                return

    def _connect(self) -> None:
        self._line.open(self.card)
        self._times += 1

    def _converse(self) -> None:
        """Attach over a connection that is open, and carry out what is asked until it ends."""
        try:
            request = Attach(
                rid=RequestId(f"{self.attachment}:attach"), record=self._record()
            )
            frame = self._line.ask(request, Attached, within_s=_ATTACH_S)
            self.card = frame.message.card
            self._up = frame.message.up
            self._attached.set()
            self._artifacts.attached()
            if self._up:
                self._session.heard_of(up=True, greeting=frame.message.greeting)
        except TensorCastError as error:
            if isinstance(error, StaleOwner):
                self._let_go(error.message)
            self._begun(error)
            raise
        self._begun(None)
        while not self._is_over():
            call = self._next_call()
            if call is not None:
                self._carry_out(call)
            else:
                self._line.read(callers=True)

    def _begun(self, error: TensorCastError | None) -> None:
        first, self._first = self._first, None
        if first is not None:
            first.give(error=error)

    def _next_call(self) -> Call | None:
        """Give the next call, once everything that was said so far is heard: one may be dropped."""
        if not len(self._calls):
            return None
        while self._line.read(0.0):
            pass
        return self._calls.next(now_s=time.monotonic())

    def _called(self, request: CallInstance) -> CallAnswered | Refused:
        """Carry out what a caller of this host asks for directly."""
        call = Call(
            number=0,
            function=request.function,
            args=request.args,
            key=request.key,
            deadline_s=request.deadline_s,
            trace=cause_of(request.rid),
        )
        ended = self._ended(call)
        if ended.fault is not None:
            return Refused(fault=ended.fault)
        return CallAnswered(value=ended.value)

    def _heard(self, message: ToInstance) -> None:
        match message:
            case Call():
                self._calls.asked(message, now_s=time.monotonic())
            case CallDropped():
                self._calls.dropped(message.number)
            case SessionOut():
                self._session.answered(message.raw)
            case Seen():
                self._seen(message)
            case Replaced():
                self._let_go(message.why)
            case PartAsked():
                self._artifacts.part(message)
            case LendEnded():
                self._artifacts.ended(message)
            case CallerHere():
                pass  # the line keeps it

    def _let_go(self, why: str) -> None:
        self._fenced = why
        logger.warning("instance %r was let go: %s", self.name, why)

    def _seen(self, message: Seen) -> None:
        self._up = message.up
        self._session.heard_of(up=message.up, greeting=message.greeting)
        if message.term:
            self._term = message.term
            self._listed.give()

    # ------------------------------------------------------------ calls
    def _carry_out(self, call: Call) -> None:
        self._line.tell(self._ended(call))

    def _ended(self, call: Call) -> CallEnded:
        """Give the outcome of a call: what it was, or what it is now."""
        ended = self._calls.known(call)
        if ended is None:
            faults.point("instance.call", detail=call.function)
            ended = self._outcome(call)
            self._calls.ended(call, ended)
            faults.point("instance.called", detail=call.function)
        return ended

    def _outcome(self, call: Call) -> CallEnded:
        self._artifacts.until_s = time.monotonic() + call.deadline_s
        try:
            return outcome_of(call, self._function, self._artifacts)
        finally:
            self._artifacts.until_s = float("inf")

    def _function(self, name: str) -> Callable[..., Any]:
        found = self._functions.get(name) or self._contract.find(name)
        if found is None:
            message = f"instance {self.name!r} does not offer {name!r}"
            raise Unimplemented(message)
        return found


def _seconds(deadline: float | None) -> float:
    from tensorcast_dask.tensors.contexts import check_ddl  # noqa: PLC0415

    seconds = check_ddl(deadline)
    return DEFAULT_S if seconds is None else max(seconds, 0.05)
