"""One scheduler's catalog: the state machine, and everything that carries its word out.

Rules:

1. All events enter through `tell`, in the order of their arrival, and are finished one by
   one: what an instruction causes is told after it.
2. Nothing here decides. What waits (journal, SQL) is in threads; the event loop never is.
3. `stop` leaves the journal complete, whatever failed before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from tensorcast_dask.exceptions import Unknown
from tensorcast_dask.scheduler_plugin.endings import at_the_end
from tensorcast_dask.scheduler_plugin.links import Links
from tensorcast_dask.scheduler_plugin.policy_processes import PolicyProcesses
from tensorcast_dask.scheduler_plugin.relays import Relays
from tensorcast_dask.scheduler_plugin.sessions import Sessions
from tensorcast_dask.scheduler_plugin.state.catalog import Catalog
from tensorcast_dask.scheduler_plugin.state.events import (
    Asked,
    AskPolicy,
    AskSelf,
    Carried,
    CloseLink,
    Emit,
    EndPolicy,
    EndSession,
    Log,
    Persist,
    Reply,
    RunQuery,
    SessionOpened,
    StartPolicy,
    TimePassed,
    ToNodeSend,
    WakeAt,
)
from tensorcast_dask.scheduler_plugin.traces import Traces
from tensorcast_dask.tensors.ids import RequestId, SessionId
from tensorcast_dask.tensors.messages import (
    CatalogStateAsked,
    DoEnd,
    DoLinger,
    Fault,
    Nodes,
    NodesAsked,
    OpenSession,
    SessionOpen,
    Wire,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from tensorcast_dask.scheduler_plugin.journal import Journal
    from tensorcast_dask.scheduler_plugin.state.events import (
        CatalogSettings,
        Event,
        Instruction,
        Recovered,
    )
    from tensorcast_dask.scheduler_plugin.tables import Tables
    from tensorcast_dask.tensors.ids import HostId, NodeId
    from tensorcast_dask.tensors.messages import NodeCard, Rows, SessionRequest

__all__ = ["CatalogService"]

log = logging.getLogger(__name__)

#: A store that was let go greets anew within this.
QUIET_S: Final = 0.05
_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class CatalogService:
    """The running catalog.

    Parameters
    ----------
    settings : CatalogSettings
        What the catalog keeps to.
    recovered : Recovered
        What the journal found.
    journal : Journal
        Already open; its `notify` must lead to `tell_soon`.
    tables : Tables
        Where SQL runs.
    tls : SSLContext, optional
        For the port of nodes.
    emit : callable
        Told every event that is of interest to people.
    """

    def __init__(
        self,
        settings: CatalogSettings,
        recovered: Recovered,
        *,
        journal: Journal,
        tables: Tables,
        tls: ssl.SSLContext | None,
        emit: Callable[[Emit], None],
    ) -> None:
        self.catalog = Catalog(settings, recovered)
        self.journal = journal
        self.tables = tables
        self.sessions = Sessions(self.tell)
        self.links = Links(
            self.tell, cluster=recovered.cluster, token=settings.token, tls=tls
        )
        self._relays = Relays(self.sessions.handle, self.links.send)
        self.links.on_session = self._relays.take
        self.links.on_end = self._relays.link_ended
        self.policies = PolicyProcesses(self.tell)
        #: Suggestions of policies under way, so that none is collected before its end.
        self._carrying: set[asyncio.Task[None]] = set()
        self._emit = emit
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._traces = Traces()
        self._busy = False
        self._stopped = False
        self._alarm: asyncio.TimerHandle | None = None
        #: Requests of the scheduler's own session that wait for their answers.
        self._own: dict[RequestId, asyncio.Future[Wire | Fault | None]] = {}
        self._own_connection = 0
        #: In which the scheduler itself asks (draining a node that retires). Of this life:
        #: another life's outcomes are no answers to it.
        self._own_session = SessionId(f"scheduler-{recovered.epoch}")
        self._asked = 0

    def begin(self, host: HostId) -> None:
        """Open the scheduler's own session and start the clock."""
        import os  # noqa: PLC0415

        self._own_connection = self.sessions.next_connection()
        opening = OpenSession(
            rid=self._next_rid(), session=self._own_session, pid=os.getpid(), host=host
        )
        self.tell(SessionOpened(connection=self._own_connection, opening=opening))
        self.tell(TimePassed())

    # ------------------------------------------------------------------ in
    def tell(self, event: Event) -> None:
        """Hand an event to the catalog and carry out what it says (rule 1)."""
        self._events.append(event)
        if self._busy or self._stopped:
            return
        self._busy = True
        try:
            while self._events:
                event = self._events.popleft()
                cause = self._traces.heard(event)
                for instruction in self._handle(event):
                    self._try_to_carry_out(self._traces.said(instruction, cause))
        finally:
            self._busy = False

    def _handle(self, event: Event) -> list[Instruction]:
        """Ask the catalog. It promises not to raise; if it does, one event is lost, not all."""
        try:
            return self.catalog.handle(event, now_s=time.monotonic())
        except Exception:
            log.exception("the catalog failed at %s", type(event).__name__)
        if not isinstance(event, Asked):
            return []
        error = Unknown("the catalog failed at this request; see the scheduler's log")
        return [
            Reply(session=event.session, rid=event.request.rid, value=Fault.of(error))
        ]

    def _try_to_carry_out(self, instruction: Instruction) -> None:
        try:
            self._carry_out(instruction)
        except Exception:
            log.exception("could not carry out %s", type(instruction).__name__)

    def tell_soon(self, event: Event) -> None:
        """Hand over an event from another thread."""
        with suppress(RuntimeError):  # the loop has ended, and the catalog with it
            self._loop.call_soon_threadsafe(self.tell, event)

    async def ask(
        self, make: Callable[[RequestId], SessionRequest]
    ) -> Wire | Fault | None:
        """Ask in the scheduler's own session; `make` is given the request's id."""
        rid = self._next_rid()
        future: asyncio.Future[Wire | Fault | None] = self._loop.create_future()
        self._own[rid] = future
        try:
            self.tell(
                Asked(
                    session=self._own_session,
                    connection=self._own_connection,
                    request=make(rid),
                )
            )
            return await future
        finally:
            self._own.pop(rid, None)

    def _next_rid(self) -> RequestId:
        self._asked += 1
        return RequestId(f"{self._own_session}:{self._asked}")

    # ------------------------------------------------------------------ out
    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Reply(session=session, rid=rid, value=value):
                self._reply(session, rid, value)
            case ToNodeSend(link=link, message=message):
                self.links.send(link, message)
            case Persist():
                self.journal.submit(instruction)
            case WakeAt(at_s=at_s):
                self._wake_at(at_s)
            case Emit():
                self.tables.note(instruction)
                self._emit(instruction)
            case Log(level=level, text=text):
                log.log(_LEVELS.get(level, logging.INFO), "%s", text)
            case RunQuery():
                self._query(instruction)
            case EndSession(connection=connection):
                self.sessions.end(connection)
            case CloseLink(link=link, why=why):
                self.links.close_link(link, why)
            case _:
                self._of_policies(instruction)

    def _of_policies(
        self, instruction: StartPolicy | AskPolicy | EndPolicy | AskSelf
    ) -> None:
        match instruction:
            case StartPolicy():
                self.policies.start(instruction)
            case AskPolicy():
                self.policies.ask(instruction)
            case EndPolicy(life=life):
                self.policies.end(life)
            case AskSelf():
                carrying = asyncio.ensure_future(self._carry(instruction))
                self._carrying.add(carrying)
                carrying.add_done_callback(self._carrying.discard)
            case _:
                assert_never(instruction)

    async def _carry(self, what: AskSelf) -> None:
        """Ask for what a policy suggests; the catalog checks it like anybody's request."""
        answer = await self.ask(
            lambda rid: msgspec.structs.replace(what.request, rid=rid)
        )
        error = answer.message if isinstance(answer, Fault) else ""
        self.tell(Carried(number=what.number, error=error))

    def _reply(
        self, session: SessionId, rid: RequestId, value: Wire | Fault | None
    ) -> None:
        if isinstance(value, SessionOpen):
            # Only the port itself knows where it listens.
            value = msgspec.structs.replace(
                value, link_host=self.links.host, link_port=self.links.port
            )
        if session != self._own_session:
            self.sessions.answer(session, rid, value)
            return
        waiting = self._own.get(rid)
        if waiting is not None and not waiting.done():
            waiting.set_result(value)

    def _wake_at(self, at_s: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        delay_s = max(0.0, at_s - time.monotonic())
        self._alarm = self._loop.call_later(delay_s, self.tell, TimePassed())

    def _query(self, query: RunQuery) -> None:
        def done(value: Rows | Fault) -> None:
            with suppress(RuntimeError):  # the loop has ended; so has who asked
                self._loop.call_soon_threadsafe(
                    self._reply, query.session, query.rid, value
                )

        self.tables.run(query, done=done)

    # ------------------------------------------------------------------ nodes
    def cards(self) -> dict[int, NodeCard]:
        """Give the cards of the nodes whose links are up, by link."""
        return {number: hello.card for number, hello in self.links.joined()}

    def attended(self) -> list[NodeCard]:
        """Give the cards of the live nodes that have a worker, linked just now or not."""
        records = self.catalog.nodes.records.values()
        return [r.card for r in records if r.live and r.card.worker]

    def linger(self, link: int, ttl_s: float, why: str) -> None:
        """Have an unattended store live on for so long."""
        self.links.send(link, DoLinger(ttl_s=ttl_s, why=why))

    async def end_nodes(self, why: str, *, within_s: float) -> None:
        """Have every store end, those too that are just greeting the catalog anew."""
        nodes = await self.ask(lambda rid: NodesAsked(rid=rid))
        live = nodes.nodes if isinstance(nodes, Nodes) else ()
        expected = {node.card.node for node in live if node.card.kind == "store"}
        told: dict[int, NodeId] = {}
        quiet_s = time.monotonic()
        until_s = quiet_s + within_s
        while time.monotonic() < until_s:
            links = {n: c.node for n, c in self.cards().items() if c.kind == "store"}
            for link in links.keys() - told.keys():
                self.links.send(link, DoEnd(why=why))
                told[link] = links[link]
            if links or not expected <= set(told.values()):
                quiet_s = time.monotonic()
            if time.monotonic() - quiet_s > QUIET_S:
                return
            await asyncio.sleep(0.01)

    async def debug_state(self) -> str:
        """Give the catalog's own account, as JSON text."""
        value = await self.ask(lambda rid: CatalogStateAsked(rid=rid))
        return msgspec.json.encode(msgspec.to_builtins(value)).decode()

    async def stop(self, *, keep: bool) -> None:
        """Close everything; `keep` leaves the journal's files."""
        self._stopped = True
        if self._alarm is not None:
            self._alarm.cancel()
        for waiting in self._own.values():
            waiting.cancel()
        for carrying in list(self._carrying):
            carrying.cancel()
        for part in (self.policies.close, self.sessions.close, self.links.close):
            try:
                await part()
            except Exception:
                log.exception("closing the catalog")
        await at_the_end(self._close_threads, keep=keep)

    def _close_threads(self, *, keep: bool) -> None:
        try:
            self.tables.close()
        finally:
            self.journal.close(keep=keep)
