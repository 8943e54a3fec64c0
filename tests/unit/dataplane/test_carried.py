"""Sessions that a link carries: opened anew at each greeting, and what has no answer is asked again."""

from __future__ import annotations

import msgspec

from tensorcast_dask.dataplane.carried import CarriedSession
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ClusterId, Epoch, HostId


class Carrier:
    """Takes what is said, where somebody listens."""

    def __init__(self) -> None:
        self.took: list[m.SessionIn] = []
        self.listens = True
        self.session = CarriedSession(self.take, "s", HostId("h"))
        self.answers: list[m.Answer] = []

    def take(self, message: m.SessionIn) -> bool:
        if self.listens:
            self.took.append(message)
        return self.listens

    def said(self) -> list[tuple[str, int]]:
        """Give what was said since the last time, and after which greeting."""
        took, self.took = self.took, []
        return [(msgspec.msgpack.decode(one.raw)["op"], one.greeting) for one in took]

    def ask(self) -> m.NodesAsked:
        request = m.NodesAsked(rid=self.session.next_rid())
        self.session.ask(request, self.answers.append)
        return request

    def open(self) -> None:
        """Answer the opening that was said last."""
        opening = m.decode(self.took[-1].raw, m.OpenSession)
        value = m.SessionOpen(
            cluster=ClusterId("c"),
            epoch=Epoch(1),
            token=b"",
            nodes=(),
            chunk_bytes=1,
            small_bytes=1,
            deadline_default_s=1.0,
        )
        self.session.heard(
            m.encode(m.Answer(rid=opening.rid, value=msgspec.Raw(m.encode(value))))
        )


def test_nothing_is_said_before_somebody_listens_and_requests_come_after_the_opening() -> (
    None
):
    carrier = Carrier()
    asked = carrier.ask()
    assert carrier.said() == []
    carrier.session.heard_of(up=True, greeting=3)
    carrier.open()
    assert carrier.said() == [("OpenSession", 3), ("NodesAsked", 3)]
    carrier.session.heard(m.encode(m.Answer(rid=asked.rid)))
    assert [one.rid for one in carrier.answers] == [asked.rid]


def test_the_same_greeting_is_news_once_and_another_one_opens_the_session_anew() -> (
    None
):
    carrier = Carrier()
    carrier.session.heard_of(up=True, greeting=1)
    asked = carrier.ask()
    carrier.open()
    assert carrier.said() == [("OpenSession", 1), ("NodesAsked", 1)]
    carrier.session.heard_of(up=True, greeting=1)
    assert carrier.said() == []
    # That it was away between them came late, or not at all.
    carrier.session.heard_of(up=True, greeting=2)
    carrier.open()
    assert carrier.said() == [("OpenSession", 2), ("NodesAsked", 2)]
    carrier.session.heard(m.encode(m.Answer(rid=asked.rid)))
    carrier.session.heard_of(up=False)
    assert not carrier.session.open
    assert carrier.session.forget(carrier.ask().rid) is False


def test_what_nobody_takes_is_said_when_the_catalog_is_heard_of_again() -> None:
    carrier = Carrier()
    carrier.session.heard_of(up=True, greeting=1)
    carrier.listens = False
    asked = carrier.ask()
    assert carrier.said() == []
    carrier.listens = True
    carrier.session.heard_of(up=False)
    carrier.session.heard_of(up=True, greeting=2)
    carrier.open()
    assert carrier.said() == [("OpenSession", 2), ("NodesAsked", 2)]
    assert carrier.session.forget(asked.rid) is True
