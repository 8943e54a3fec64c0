from __future__ import annotations

import sys

import pytest

from tensorcast_dask.scheduler_plugin import traces
from tensorcast_dask.scheduler_plugin.state.events import (
    Asked,
    Reply,
    SessionLost,
    ToNodeSend,
)
from tensorcast_dask.scheduler_plugin.traces import Traces
from tensorcast_dask.tensors.ids import (
    ArtifactId,
    Generation,
    RequestId,
    SessionId,
    Version,
)
from tensorcast_dask.tensors.messages import DoDrop, DoPull, NodesAsked, Tier

CAUSE = f"{0xABC:032x}-{0x9:016x}"
HERE, THERE = SessionId("here"), SessionId("there")


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import trace

    monkeypatch.setitem(sys.modules, "opentelemetry.trace", trace)


def asked(session: SessionId, number: int, cause: str = CAUSE) -> Asked:
    rid = RequestId(f"{session}:{cause}:{number}" if cause else f"{session}:{number}")
    return Asked(session=session, connection=1, request=NodesAsked(rid=rid))


def test_a_span_ends_with_the_answer_or_with_the_session() -> None:
    known = Traces()
    first, second, other = asked(HERE, 1), asked(HERE, 2), asked(THERE, 1)
    for event in (first, second, other, first, asked(HERE, 3, cause="")):
        known.heard(event)
    assert len(known) == 3
    answer = Reply(session=HERE, rid=first.request.rid, value=None)
    assert known.said(answer, "") is answer
    assert len(known) == 2
    known.heard(SessionLost(session=HERE, connection=1))
    assert len(known) == 1, "the other session's is still open"


def test_orders_follow_from_the_request_at_which_they_go_out() -> None:
    known = Traces()
    cause = known.heard(asked(HERE, 1))
    assert cause == CAUSE
    pull = DoPull(
        task=1,
        generation=Generation(1),
        id=ArtifactId("a"),
        version=Version(1),
        nbytes=1,
        tier=Tier.HOST,
        sources=(),
        deadline_s=1.0,
    )
    sent = known.said(ToNodeSend(link=3, message=pull), cause)
    assert isinstance(sent, ToNodeSend)
    assert isinstance(sent.message, DoPull)
    assert (sent.link, sent.message.trace) == (3, CAUSE)
    later = ToNodeSend(link=3, message=pull)
    assert known.said(later, known.heard(asked(HERE, 2, cause=""))) is later
    drop = ToNodeSend(link=3, message=DoDrop(task=1, generation=Generation(1)))
    assert known.said(drop, cause) is drop


def test_what_is_open_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_OPEN", 2)
    known = Traces()
    for number in range(4):
        assert known.heard(asked(HERE, number)) == CAUSE
    assert len(known) == 2
