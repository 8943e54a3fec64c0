"""Sessions that a node carries: to the handler they are comms like any other."""

from __future__ import annotations

import asyncio

from tensorcast_dask.scheduler_plugin.relays import Relays
from tensorcast_dask.scheduler_plugin.sessions import Comm
from tensorcast_dask.tensors.ids import SessionId
from tensorcast_dask.tensors.messages import SessionIn, SessionOut, ToNode


def said(session: str, raw: bytes) -> SessionIn:
    return SessionIn(session=SessionId(session), raw=raw)


async def scene() -> tuple[list[tuple[int, ToNode]], list[str], Relays]:
    out: list[tuple[int, ToNode]] = []
    ended: list[str] = []

    async def echo(comm: Comm) -> None:
        try:
            while True:
                await comm.write(await comm.read())
        except OSError:
            ended.append(comm.peer_address)

    return out, ended, Relays(echo, lambda link, message: out.append((link, message)))


def test_messages_of_a_session_go_to_one_comm_and_answers_to_its_link() -> None:
    async def play() -> None:
        out, ended, relays = await scene()
        relays.take(1, said("a", b"1"))
        relays.take(2, said("b", b"2"))
        relays.take(1, said("a", b"3"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        answers = {
            (link, message.session): message.raw
            for link, message in out
            if isinstance(message, SessionOut)
        }
        assert answers == {(1, "a"): b"3", (2, "b"): b"2"}
        assert ended == []
        relays.take(1, said("a", b""))
        relays.link_ended(2)
        for _ in range(10):
            await asyncio.sleep(0)
        assert sorted(ended) == ["instance session a", "instance session b"]

    asyncio.run(play())


def test_the_end_of_what_never_began_begins_nothing() -> None:
    async def play() -> None:
        out, ended, relays = await scene()
        relays.take(1, said("a", b""))
        relays.link_ended(1)
        await asyncio.sleep(0)
        assert (out, ended) == ([], [])

    asyncio.run(play())
