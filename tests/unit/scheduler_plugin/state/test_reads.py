from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import (
    CatalogUnavailable,
    Gone,
    Incomplete,
    InvalidArgument,
    NotFound,
)
from tensorcast_dask.scheduler_plugin.state import reads
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ArtifactId, Generation, NodeId
from tests.kit.catalogs import Desk, Program, index_of


def scene() -> tuple[Desk, Program]:
    d = Desk()
    d.node("a")
    return d, d.program()


def page(p: Program, **more: object) -> m.Listed:
    return p.call(
        m.ListArtifacts(rid=p.rid(), **more),  # type: ignore[arg-type]
        m.Listed,
    )


def test_p14_every_legal_id_is_its_own_artifact_and_the_list_shows_exactly_these() -> (
    None
):
    _, p = scene()
    names = [
        "a/b",
        "a-SEP-b",
        "a%2Fb",
        "a__b",
        "a--b",
        "a\\b",
        "a:b",
        "a b",
        "a.b",
        "a@1",
    ]
    for size, name in enumerate(names, start=1):
        p.put(name, nbytes=size)
    for size, name in enumerate(names, start=1):
        assert p.resolve(name).nbytes == size
    assert [info.id for info in page(p).infos] == sorted(names)


def test_pages_of_a_list_meet_without_gap_or_overlap() -> None:
    _, p = scene()
    for number in range(25):
        p.put(f"m/{number:02}", labels={"even": str(number % 2 == 0)})
    p.put("n")
    seen, after = list[str](), ""
    while True:
        one = page(p, prefix="m/", limit=7, after=after)
        seen += [info.id for info in one.infos]
        after = one.after
        if not after:
            break
    assert seen == [f"m/{number:02}" for number in range(25)]
    evens = page(p, labels={"even": "True"}, limit=100)
    assert len(evens.infos) == 13
    assert evens.after == ""


def test_a_list_shows_the_version_that_the_name_means_or_all() -> None:
    _, p = scene()
    one = p.put("x")
    p.put("x", version=-1)
    p.publish(one.generation)
    p.create("hidden")
    assert [(i.id, i.version) for i in page(p).infos] == [("x", 1)]
    first = page(p, all_versions=True, limit=1)
    assert [i.version for i in first.infos] == [1]
    rest = page(p, all_versions=True, limit=5, after=first.after)
    assert [i.version for i in rest.infos] == [2]


def test_a_page_that_was_destroyed_meanwhile_does_not_end_the_walk() -> None:
    _, p = scene()
    for name in ("a", "b", "c"):
        p.put(name)
    first = page(p, limit=1)
    p.destroy("a")
    p.destroy("b")
    assert [i.id for i in page(p, after=first.after).infos] == ["c"]
    with pytest.raises(InvalidArgument):
        page(p, limit=0)


def test_describe_gives_the_index_of_a_version_and_refuses_what_is_none() -> None:
    _, p = scene()
    info = p.put("x")
    described = p.call(m.Describe(rid=p.rid(), generation=info.generation), m.Described)
    assert described.index == index_of(100).encode()
    assert described.info == info
    created = p.create("y")
    with pytest.raises(Incomplete):
        p.call(m.Describe(rid=p.rid(), generation=created.generation), m.Described)
    p.destroy("x")
    for ask in (m.Describe, m.Locate):
        with pytest.raises(Gone):
            p.call(ask(rid=p.rid(), generation=info.generation), m.Wire)
    with pytest.raises(NotFound):
        p.call(m.Locate(rid=p.rid(), generation=Generation(1 << 60)), m.Located)


def test_nodes_are_told_with_their_use_and_what_is_left_of_their_lease() -> None:
    d, p = scene()
    answer = p.call(m.NodesAsked(rid=p.rid()), m.Nodes)
    (one,) = answer.nodes
    assert (one.card.node, one.attended) == ("a", True)
    assert one.uses[m.Tier.HOST].capacity_bytes == 64 << 20
    assert one.lease_left_s == d.settings.lease_ttl_s


def test_explain_tells_why_a_node_was_chosen_and_how_it_stands_now() -> None:
    d, p = scene()
    d.node("c", "h-client")
    created = p.create("x")
    p.fill("x", created)
    commit = m.CommitCreated(rid=p.rid(), generation=created.generation, deadline_s=5.0)
    p.call(commit, m.ArtifactInfo)
    d.pass_time(2.0)
    told = p.call(m.ExplainAsked(rid=p.rid(), ref="x"), m.Explained)
    text = "\n".join(line for _, line in told.lines)
    assert "caller's host" in text
    assert "committed" in text
    assert "on w-c" in text
    assert told.lines[0][0] == pytest.approx(2.0, abs=0.01)


def test_a_request_is_explained_by_what_happened_while_it_waited() -> None:
    d, p = scene()
    d.node("b")
    info = p.put("x", node=NodeId("a"))
    d.pass_time(3.0)
    rid = p.rid()
    ensure = m.Ensure(
        rid=rid, generation=info.generation, node=NodeId("b"), deadline_s=5.0
    )
    p.call(ensure, m.Moved)
    d.pass_time(2.0)
    p.call(m.Publish(rid=p.rid(), generation=info.generation), m.ArtifactInfo)
    told = p.call(m.ExplainAsked(rid=p.rid(), ref=rid), m.Explained).lines
    (copied_s, copied), (_, ended) = told
    assert copied_s == pytest.approx(2.0, abs=0.01)
    assert "copied to w-b" in copied
    assert ended.startswith("prefetch of 'x' is done")
    assert ended.endswith("at w-b (b), 100 bytes by tcp")


def test_what_is_known_of_nothing_is_not_explained() -> None:
    _, p = scene()
    with pytest.raises(NotFound, match="'never'"):
        p.call(m.ExplainAsked(rid=p.rid(), ref="never"), m.Explained)
    p.put("x")
    p.call(m.Destroy(rid=p.rid(), id=ArtifactId("x")), m.Destroyed)
    for known in ("x", "a"):
        p.call(m.ExplainAsked(rid=p.rid(), ref=known), m.Explained)


def test_an_unknown_operation_is_said_to_be_unknown() -> None:
    _, p = scene()
    ask = m.OperationAsked(rid=p.rid(), asked=p.rid())
    assert p.call(ask, m.OperationState).status == "unknown"


def test_a_question_waits_only_for_changes_that_it_shows() -> None:
    d, p = scene()
    p.put("x")
    d.auto = False
    created = p.create("y")
    p.fill("y", created)
    p.ask(m.CommitCreated(rid=p.rid(), generation=created.generation, deadline_s=9.0))
    other = d.program("o")
    for name, held in (("x", False), ("y", True)):
        look = m.Resolve(rid=other.rid(), id=ArtifactId(name))
        other.ask(look)
        assert other.answered(look.rid) is not held
    d.flush()


def test_sql_is_asked_of_what_is_on_disk() -> None:
    d, p = scene()
    d.auto = False
    p.ask(m.SetAlias(rid=p.rid(), name=ArtifactId("z"), generation=Generation(0)))
    created = p.create("y")
    p.fill("y", created)
    p.ask(m.CommitCreated(rid=p.rid(), generation=created.generation, deadline_s=9.0))
    p.create("w")
    p.ask(m.Query(rid=p.rid(), sql="select 1", limit=5))
    d.flush()
    (run,) = d.queries
    assert (run.sql, run.limit) == ("select 1", 5)
    assert [one.node for one in run.snapshot.nodes] == [NodeId("a")]
    assert [one[0] for one in run.snapshot.creating] == ["w"]


def test_while_the_journal_is_away_questions_about_what_waits_are_refused_others_not() -> (
    None
):
    d, p = scene()
    p.put("x")
    d.auto = False
    created = p.create("y")
    p.fill("y", created)
    p.ask(m.CommitCreated(rid=p.rid(), generation=created.generation, deadline_s=9.0))
    d.stall()
    assert p.resolve("x").version == 1
    for ask in (
        m.ListArtifacts(rid=p.rid()),
        m.Query(rid=p.rid(), sql="select 1"),
    ):
        with pytest.raises(CatalogUnavailable):
            p.call(ask, m.Wire)
    d.unstall()
    assert [info.id for info in page(p).infos] == ["x", "y"]


def test_a_page_gives_and_looks_at_so_many_and_the_next_one_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reads, "MAX_PAGE", 2)
    monkeypatch.setattr(reads, "MAX_LOOKS", 4)
    _, p = scene()
    for number in range(9):
        p.put(f"x{number}", labels={"third": str(number % 3 == 0)})
    p.put("x1", version=2)
    pages: list[list[tuple[str, int]]] = []
    after, wanted = "", {"all_versions": True, "limit": 1000}
    while not pages or after:
        one = page(p, after=after, **wanted)
        pages.append([(info.id, info.version) for info in one.infos])
        after = one.after
    assert max(map(len, pages)) == 2
    assert [info for one in pages for info in one] == sorted(
        [(f"x{n}", 1) for n in range(9)] + [("x1", 2)]
    )
    few = page(p, labels={"third": "True"}, after="x0\x001", limit=1000)
    assert [info.id for info in few.infos] == ["x3"]
    rest = page(p, labels={"third": "True"}, after=few.after, limit=1000)
    assert [info.id for info in rest.infos] == ["x6"]
    assert rest.after == ""
