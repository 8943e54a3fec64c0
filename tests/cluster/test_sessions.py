"""Sessions: comms of Dask that were taken over, and what may go wrong on them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from distributed import Scheduler
from distributed.comm.core import CommClosedError, connect

from tensorcast_dask.scheduler_plugin.dask_private import add_handler
from tensorcast_dask.scheduler_plugin.sessions import SESSION_OP, TURN, Sessions
from tensorcast_dask.scheduler_plugin.state.events import (
    Asked,
    Event,
    SessionLost,
    SessionOpened,
)
from tensorcast_dask.tensors.ids import ArtifactId, HostId, RequestId, SessionId
from tensorcast_dask.tensors.messages import (
    Answer,
    CloseSession,
    Fault,
    NodesAsked,
    OpenSession,
    Resolve,
    decode,
    encode,
)
from tests.kit.eventually import eventually_async
from tests.kit.loops import on_loop

NAME = SessionId("s")


class Held:
    """Answers `Resolve` at once, and `NodesAsked` when told to."""

    def __init__(self) -> None:
        self.told: list[Event] = []
        self.waiting: list[Asked] = []
        self.sessions = Sessions(self.tell)

    def tell(self, event: Event) -> None:
        self.told.append(event)
        match event:
            case SessionOpened(opening=opening):
                self.sessions.answer(opening.session, opening.rid, None)
            case Asked(request=NodesAsked()):
                self.waiting.append(event)
            case Asked(request=CloseSession(), connection=connection):
                self.sessions.end(connection)
            case Asked(session=session, request=request):
                fault = Fault(kind="NotFound", message="none")
                self.sessions.answer(session, request.rid, fault)
            case _:
                pass

    def release(self) -> None:
        for asked in reversed(self.waiting):
            self.sessions.answer(asked.session, asked.request.rid, None)


@asynccontextmanager
async def a_catalog() -> AsyncIterator[tuple[str, Held]]:
    async with Scheduler(
        port=0, host="127.0.0.1", dashboard_address="127.0.0.1:0"
    ) as scheduler:
        held = Held()
        add_handler(scheduler, SESSION_OP, held.sessions.handle)
        yield scheduler.address, held


async def opened(address: str, name: SessionId = NAME) -> Any:
    comm = await connect(address)
    await comm.write({"op": SESSION_OP, "reply": False})
    opening = OpenSession(rid=RequestId("r0"), session=name, pid=1, host=HostId("h"))
    await comm.write(encode(opening))
    assert decode(await comm.read(), Answer).rid == "r0"
    return comm


@on_loop
async def test_answers_come_in_any_order_and_none_waits_for_another() -> None:
    async with a_catalog() as (address, held):
        comm = await opened(address)
        for number in (1, 2):
            await comm.write(encode(NodesAsked(rid=RequestId(f"slow{number}"))))
        resolve = Resolve(rid=RequestId("fast"), id=ArtifactId("a"))
        await comm.write(encode(resolve))
        answer = decode(await comm.read(), Answer)
        assert answer.rid == "fast"
        assert answer.fault is not None
        assert answer.fault.kind == "NotFound"
        held.release()
        assert [decode(await comm.read(), Answer).rid for _ in range(2)] == [
            "slow2",
            "slow1",
        ]
        await comm.close()


@pytest.mark.parametrize(
    "said", [b"\xff", b"", b"\x80", {"op": "x"}, "text"], ids=range(5)
)
def test_what_is_no_message_closes_that_session_alone(said: object) -> None:
    @on_loop
    async def run() -> None:
        async with a_catalog() as (address, held):
            good = await opened(address, SessionId("good"))
            bad = await opened(address, SessionId("bad"))
            await bad.write(said)
            with pytest.raises(CommClosedError):
                await bad.read()
            lost = [e.session for e in held.told if isinstance(e, SessionLost)]
            assert lost == ["bad"]
            await good.write(encode(Resolve(rid=RequestId("r"), id=ArtifactId("a"))))
            assert decode(await good.read(), Answer).rid == "r"
            await good.close()

    run()


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({"op": "Unpin", "rid": "s:9", "generation": 1, "pin": "x"}, "InvalidArgument"),
        ({"op": "Resolve", "rid": "s:9", "id": 3}, "InvalidArgument"),
        ({"op": "Resolve", "rid": "s:9"}, "InvalidArgument"),
        ({"op": "OfALaterRelease", "rid": "s:9", "x": 1}, "Unimplemented"),
    ],
)
def test_a_request_that_cannot_be_read_is_answered_and_the_session_goes_on(
    said: dict[str, object], kind: str
) -> None:
    @on_loop
    async def run() -> None:
        async with a_catalog() as (address, held):
            comm = await opened(address)
            await comm.write(msgspec.msgpack.encode(said))
            answer = decode(await comm.read(), Answer)
            assert answer.rid == "s:9"
            assert answer.fault is not None
            assert answer.fault.kind == kind
            await comm.write(encode(Resolve(rid=RequestId("r"), id=ArtifactId("a"))))
            assert decode(await comm.read(), Answer).rid == "r"
            assert not any(isinstance(e, SessionLost) for e in held.told)
            await comm.close()

    run()


@on_loop
async def test_a_session_that_comes_back_gets_its_answers_on_the_new_comm() -> None:
    async with a_catalog() as (address, held):
        old = await opened(address)
        await old.write(encode(NodesAsked(rid=RequestId("slow"))))
        await eventually_async(lambda: len(held.waiting) == 1, within_s=5)
        new = await opened(address)
        held.release()
        assert decode(await new.read(), Answer).rid == "slow"
        old.abort()
        await eventually_async(
            lambda: any(isinstance(e, SessionLost) for e in held.told), within_s=5
        )
        assert len(held.sessions) == 1
        await new.close()
        await eventually_async(lambda: len(held.sessions) == 0, within_s=5)


@on_loop
async def test_a_session_that_closes_itself_is_not_told_as_lost() -> None:
    async with a_catalog() as (address, held):
        comm = await opened(address)
        await comm.write(encode(CloseSession(rid=RequestId("bye"))))
        with pytest.raises(CommClosedError):
            await comm.read()
        await eventually_async(lambda: len(held.sessions) == 0, within_s=5)
        assert not any(isinstance(e, SessionLost) for e in held.told)


@on_loop
async def test_closing_the_scheduler_ends_every_session() -> None:
    async with a_catalog() as (address, held):
        comms = [await opened(address, SessionId(f"s{n}")) for n in range(3)]
        await held.sessions.close()
        for comm in comms:
            with pytest.raises(CommClosedError):
                async with asyncio.timeout(5):
                    await comm.read()


class Poured:
    """A comm on which everything has come already, so that no read waits."""

    peer_address = "poured"

    def __init__(self, count: int) -> None:
        opening = OpenSession(
            rid=RequestId("r0"), session=NAME, pid=1, host=HostId("h")
        )
        asked = (NodesAsked(rid=RequestId(f"r{n}")) for n in range(1, count + 1))
        self.left = [encode(one) for one in (opening, *asked)][::-1]

    async def read(self) -> bytes:
        if not self.left:
            raise CommClosedError
        return self.left.pop()

    async def write(self, message: object) -> None:
        pass

    async def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


@on_loop
async def test_the_loop_has_its_turn_however_many_requests_have_come() -> None:
    held, comm = Held(), Poured(10 * TURN)
    turns: list[int] = []

    async def other() -> None:
        while comm.left:
            turns.append(len(comm.left))
            await asyncio.sleep(0)

    await asyncio.gather(held.sessions.handle(comm), other())
    assert len(held.waiting) == 10 * TURN
    steps = [before - after for before, after in itertools.pairwise(turns)]
    assert steps
    assert max(steps) <= TURN + 1
