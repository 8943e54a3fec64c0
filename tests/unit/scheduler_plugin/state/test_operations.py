from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import DeadlineExceeded
from tensorcast_dask.scheduler_plugin.state.events import CatalogSettings
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import NodeId, RequestId
from tests.kit.catalogs import Desk, Program


def scene(keep: int = 1000) -> tuple[Desk, Program, RequestId]:
    d = Desk(settings=CatalogSettings(finished_operations=keep))
    d.node("a")
    d.node("b").obedient = False
    p = d.program()
    info = p.put("x", node=NodeId("a"))
    rid = p.ask(
        m.Ensure(
            rid=p.rid(), generation=info.generation, node=NodeId("b"), deadline_s=5.0
        )
    )
    return d, p, rid


def status(p: Program, rid: RequestId) -> m.OperationState:
    return p.call(m.OperationAsked(rid=p.rid(), asked=rid), m.OperationState)


def cancel(p: Program, rid: RequestId) -> None:
    p.call(m.CancelAsked(rid=p.rid(), asked=rid), type(None))


def test_an_operation_ends_at_its_deadline_with_a_sentence_and_not_twice() -> None:
    d, p, rid = scene()
    d.pass_time(5.1)
    with pytest.raises(DeadlineExceeded, match="explain"):
        p.result(rid, m.Moved)
    del p.answers[rid]
    d.nodes[NodeId("b")].obey_all()
    d.flush()
    assert rid not in p.answers
    assert status(p, rid).status == "failed"


def test_a_cancelled_operation_is_answered_at_once() -> None:
    _, p, rid = scene()
    cancel(p, rid)
    with pytest.raises(DeadlineExceeded) as ended:
        p.result(rid, m.Moved)
    assert ended.value.data["cancelled"] is True
    assert status(p, rid).status == "cancelled"
    cancel(p, rid)
    cancel(p, RequestId("nobody-1"))


def test_a_deadline_of_zero_polls_once() -> None:
    _d, p, _ = scene()
    info = p.resolve("x")
    here = m.Ensure(
        rid=p.rid(), generation=info.generation, node=NodeId("a"), deadline_s=0.0
    )
    assert p.call(here, m.Moved).via == "here"
    away = m.Ensure(
        rid=p.rid(), generation=info.generation, node=NodeId("b"), deadline_s=0.0
    )
    with pytest.raises(DeadlineExceeded):
        p.call(away, m.Moved)


def test_what_ended_is_known_for_a_while_and_shown_with_its_figures() -> None:
    d, p, rid = scene(keep=2)
    d.nodes[NodeId("b")].obey_all()
    (facts,) = [one for one in d.catalog.operations.facts() if one.rid == rid]
    assert (facts.kind, facts.status, facts.node) == ("prefetch", "done", "b")
    assert (facts.done_bytes, facts.via) == (100, "tcp")
    p.put("y", node=NodeId("a"))
    p.put("z", node=NodeId("a"))
    assert status(p, rid).status == "unknown"
    assert d.catalog.debug_state()["operations"] == 0
