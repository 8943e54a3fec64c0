"""A program's side of a session: requests that another one brings with it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from distributed import Scheduler
from distributed.comm.core import connect

from tensorcast_dask.api.connection.catalog import CatalogLink
from tensorcast_dask.api.connection.deadlines import deadline
from tensorcast_dask.exceptions import Gone, InvalidArgument
from tensorcast_dask.scheduler_plugin.dask_private import add_handler
from tensorcast_dask.scheduler_plugin.sessions import SESSION_OP, Sessions
from tensorcast_dask.scheduler_plugin.state.events import Asked, Event, SessionOpened
from tensorcast_dask.tensors.ids import (
    ArtifactId,
    ClusterId,
    Epoch,
    Generation,
    HostId,
    RequestId,
    SessionId,
)
from tensorcast_dask.tensors.messages import (
    Answer,
    CancelAsked,
    CommitCreated,
    Fault,
    Nodes,
    NodesAsked,
    OpenPlan,
    PlanState,
    Resolve,
    SessionOpen,
)
from tests.kit.eventually import eventually_async
from tests.kit.loops import on_loop

GONE = Fault(kind="Gone", message="it is gone")


class Catalog:
    """Notes what it is asked; answers `NodesAsked` and `CommitCreated`."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.connection = 0
        self.sessions = Sessions(self.tell)

    def tell(self, event: Event) -> None:
        match event:
            case SessionOpened(opening=opening, connection=connection):
                self.connection = connection
                greeting = SessionOpen(
                    cluster=ClusterId("c"),
                    epoch=Epoch(1),
                    token=b"",
                    nodes=(),
                    chunk_bytes=1,
                    small_bytes=1,
                    deadline_default_s=1.0,
                )
                self.sessions.answer(opening.session, opening.rid, greeting)
            case Asked(session=session, request=request):
                self.asked.append(request)
                if isinstance(request, NodesAsked):
                    self.sessions.answer(session, request.rid, None)
                if isinstance(request, CommitCreated):
                    self.sessions.answer(session, request.rid, GONE)
            case _:
                pass


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Catalog, CatalogLink]]:
    async with Scheduler(
        port=0, host="127.0.0.1", dashboard_address="127.0.0.1:0"
    ) as scheduler:
        catalog = Catalog()
        add_handler(scheduler, SESSION_OP, catalog.sessions.handle)

        async def dial() -> Any:
            comm = await connect(scheduler.address)
            await comm.write({"op": SESSION_OP, "reply": False})
            return comm

        link = CatalogLink(dial, SessionId("s"), pid=1, host=HostId("h"))
        await link.open(deadline(20.0))
        try:
            yield catalog, link
        finally:
            await link.close()


def commit(rid: RequestId) -> CommitCreated:
    return CommitCreated(rid=rid, generation=Generation(1), deadline_s=5.0)


async def nodes(link: CatalogLink) -> None:
    await link.call(NodesAsked(rid=link.next_rid()), type(None), deadline(20.0))


@on_loop
async def test_a_foreseen_request_is_not_sent_and_its_early_answer_is_kept() -> None:
    async with linked() as (catalog, link):
        with link.foreseen(CommitCreated) as rid:
            catalog.sessions.answer(SessionId("s"), rid, GONE)
            await nodes(link)  # the early answer is here by then
            with pytest.raises(Gone):
                await link.call(commit(rid), type(None), deadline(20.0))
        assert [type(one) for one in catalog.asked] == [NodesAsked]


@on_loop
async def test_a_foreseen_request_is_sent_over_another_comm_than_what_brought_it() -> (
    None
):
    async with linked() as (catalog, link):
        with link.foreseen(CommitCreated) as rid:
            await nodes(link)
            catalog.sessions.end(catalog.connection)
            with pytest.raises(Gone):
                await link.call(commit(rid), type(None), deadline(20.0))
        sent = [one for one in catalog.asked if isinstance(one, CommitCreated)]
        assert sent[-1] == commit(rid)


@on_loop
async def test_a_plan_that_nobody_waits_for_any_more_is_withdrawn() -> None:
    async with linked() as (catalog, link):
        ask = OpenPlan(
            rid=link.next_rid(), key="k", digest="", spec=b"", deadline_s=9.0
        )
        waits = asyncio.create_task(link.call(ask, PlanState, deadline(60.0)))
        await eventually_async(
            lambda: ask in catalog.asked, within_s=20, what="it is asked"
        )
        waits.cancel()
        await asyncio.wait({waits})
        await eventually_async(
            lambda: isinstance(catalog.asked[-1], CancelAsked),
            within_s=20,
            what="it is withdrawn",
        )
        last: Any = catalog.asked[-1]
        assert (waits.cancelled(), last.asked) == (True, ask.rid)


@pytest.mark.parametrize(
    "request_",
    [
        Resolve(rid=RequestId(""), id=ArtifactId("a"), version=1 << 70),
        Resolve(rid=RequestId(""), id=ArtifactId("\ud800")),
        Resolve(rid=RequestId(""), id=object()),  # type: ignore[arg-type]
        Resolve(rid=RequestId(""), id=3),  # type: ignore[arg-type]
    ],
    ids=range(4),
)
def test_a_value_that_no_message_can_carry_is_refused_and_the_session_goes_on(
    request_: Resolve,
) -> None:
    @on_loop
    async def run() -> None:
        async with linked() as (catalog, link):
            bad = msgspec.structs.replace(request_, rid=link.next_rid())
            with pytest.raises(InvalidArgument):
                await link.call(bad, Nodes, deadline(20.0))
            good = NodesAsked(rid=link.next_rid())
            await link.call(good, type(None), deadline(20.0))
            assert catalog.asked == [good]

    run()


@on_loop
async def test_a_cancellation_is_not_lost_to_an_answer_of_the_same_moment() -> None:
    async with linked() as (_, link):
        request = Resolve(rid=link.next_rid(), id=ArtifactId("x"))
        asking = asyncio.create_task(link.call(request, Nodes, deadline(20.0)))
        for _ in range(100):  # until it is sent and only waits
            await asyncio.sleep(0)
        link._pending[request.rid].future.set_result(Answer(rid=request.rid))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


@on_loop
async def test_a_request_that_cannot_be_packed_leaves_nothing_behind() -> None:
    complaints: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    async with linked() as (_, link):
        huge = Resolve(rid=link.next_rid(), id=ArtifactId("a"), version=10**40)
        with pytest.raises(InvalidArgument):
            await link.call(huge, type(None), deadline(20.0))
    del link
    gc.collect()
    assert complaints == []
