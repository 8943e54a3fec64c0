from __future__ import annotations

import contextlib
import math
import resource
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tensorcast_dask.exceptions import (
    CatalogUnavailable,
    DeadlineExceeded,
    InvalidArgument,
    TensorCastError,
)
from tensorcast_dask.scheduler_plugin.state.events import Emit
from tensorcast_dask.scheduler_plugin.tables import Tables
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import ArtifactId, NodeId
from tests.kit.catalogs import Desk, Program

LONG = "SELECT count(*) FROM range(10000000) a, range(1000000) b"


@dataclass
class Scene:
    desk: Desk
    program: Program
    tables: Tables
    told: int = 0

    def sql(
        self, sql: str, limit: int = 1000, *, deadline_s: float = 600.0
    ) -> list[tuple[object, ...]]:
        return [*self.rows(sql, limit, deadline_s=deadline_s).rows]

    def rows(self, sql: str, limit: int = 1000, *, deadline_s: float = 600.0) -> m.Rows:
        self.tables.absorb(tuple(self.desk.rows[self.told :]))
        self.told = len(self.desk.rows)
        query = m.Query(
            rid=self.program.rid(), sql=sql, limit=limit, deadline_s=deadline_s
        )
        self.program.ask(query)
        self.desk.flush()
        return run(self.tables, self.desk, len(self.desk.queries) - 1)


def run(tables: Tables, desk: Desk, query: int) -> m.Rows:
    done, answers = threading.Event(), list[m.Rows | m.Fault]()

    def tell(answer: m.Rows | m.Fault) -> None:
        answers.append(answer)
        done.set()

    tables.run(desk.queries[query], done=tell)
    assert done.wait(300)  # for hangs, not for busy machines
    (answer,) = answers
    if isinstance(answer, m.Fault):
        raise answer.error()
    return answer


@pytest.fixture
def scene() -> Iterator[Scene]:
    d = Desk()
    d.node("a")
    d.node("b")
    p = d.program()
    tables = Tables()
    yield Scene(d, p, tables)
    tables.close()


def test_artifacts_versions_and_replicas_are_what_the_catalog_says(
    scene: Scene,
) -> None:
    p = scene.program
    first = p.put("x", replicas=2, labels={"team": "rl"})
    p.put("x", version=-1)
    p.publish(first.generation)
    p.put("y")
    p.create("z")
    assert scene.sql(
        "SELECT id, versions, newest, latest FROM artifacts ORDER BY 1"
    ) == [
        ("x", 2, 2, 1),
        ("y", 1, 1, None),
    ]
    stages = "SELECT id, version, stage, hosts FROM versions ORDER BY 1, 2"
    assert scene.sql(stages) == [
        ("x", 1, "published", 2),
        ("x", 2, "committed", 1),
        ("y", 1, "committed", 1),
        ("z", 1, "creating", 0),
    ]
    held = "SELECT node, tier FROM replicas WHERE id = 'x' AND version = 1 ORDER BY 1"
    assert scene.sql(held) == [("a", "host"), ("b", "host")]
    assert scene.sql(
        "SELECT labels->>'$.team' FROM versions WHERE version = 1 AND id='x'"
    )
    p.destroy("x")
    assert scene.sql("SELECT id FROM artifacts") == [("y",)]


def test_a_version_on_dead_nodes_only_is_shown_as_lost(scene: Scene) -> None:
    scene.program.put("x", node=NodeId("a"))
    scene.desk.nodes[NodeId("a")].lose_link()
    scene.desk.pass_time(7.0)
    assert scene.sql("SELECT stage FROM versions") == [("lost",)]
    assert scene.sql("SELECT node, live FROM leases ORDER BY 1") == [
        ("a", False),
        ("b", True),
    ]


def test_pins_aliases_views_operations_transfers_and_events_have_their_tables(
    scene: Scene,
) -> None:
    p = scene.program
    info = p.put("x", node=NodeId("a"))
    p.call(m.Pin(rid=p.rid(), generation=info.generation, ttl_s=9.0), m.Pinned)
    endless = m.Pin(rid=p.rid(), generation=info.generation, ttl_s=math.inf)
    p.call(endless, m.Pinned)
    for name in ("al", "old"):
        p.call(
            m.SetAlias(rid=p.rid(), name=ArtifactId(name), generation=info.generation),
            m.AliasState,
        )
    p.call(m.SetAlias(rid=p.rid(), name=ArtifactId("old"), generation=0), m.AliasState)  # type: ignore[arg-type]
    view = m.RegisterView(
        rid=p.rid(),
        id=ArtifactId("v"),
        generation=info.generation,
        view=b"",
        index_digest="d",
        nbytes=1,
        tensors=1,
    )
    p.call(view, m.ArtifactInfo)
    ensure = m.Ensure(
        rid=p.rid(), generation=info.generation, node=NodeId("b"), deadline_s=9.0
    )
    p.call(ensure, m.Moved)
    scene.tables.note(Emit(topic="moved", facts={"id": "x"}))
    assert scene.sql("SELECT id, ttl_s FROM pins") == [("x", 9.0), ("x", None)]
    assert scene.sql("SELECT name, id FROM aliases") == [("al", "x")]
    assert scene.sql("SELECT id, base FROM views") == [("v", "x")]
    assert scene.sql("SELECT kind, via, done_bytes FROM transfers") == [
        ("prefetch", "tcp", 100)
    ]
    assert scene.sql("SELECT topic, facts->>'$.id' FROM events") == [("moved", "x")]
    assert (
        scene.sql("SELECT plan, status FROM plans UNION SELECT plan, status FROM steps")
        == []
    )


def test_who_asks_for_a_column_that_is_not_there_is_told_those_that_are(
    scene: Scene,
) -> None:
    with pytest.raises(InvalidArgument, match="pins has pin, id, version") as refused:
        scene.sql("SELECT size FROM Pins")
    assert "nodes has" not in refused.value.message


def test_a_transfer_is_shown_while_it_runs_and_how_far_it_is(scene: Scene) -> None:
    p, b = scene.program, scene.desk.nodes[NodeId("b")]
    info = p.put("x", node=NodeId("a"))
    b.obedient = False
    ask = m.Ensure(
        rid=p.rid(), generation=info.generation, node=b.node, deadline_s=60.0
    )
    p.ask(ask)
    (pull,) = [one for one in b.inbox if isinstance(one, m.DoPull)]
    b.say(m.TaskProgress(task=pull.task, done_bytes=40, total_bytes=100))
    p.ask(m.Destroy(rid=p.rid(), id=ArtifactId("nothing"), deadline_s=60.0))
    shown = "SELECT kind, status, node, done_bytes, total_bytes, via FROM transfers"
    assert scene.sql(shown) == [("prefetch", "running", "b", 40, 100, "")]
    b.obey_all()
    scene.desk.flush()
    assert scene.sql(shown) == [("prefetch", "done", "b", 100, 100, "tcp")]


@pytest.mark.parametrize(
    "sql",
    [
        "",
        "SELEC 1",
        "SELECT 1; SELECT 2",
        "DROP TABLE nodes",
        "INSERT INTO events VALUES (1, 'a', '{}')",
        "SET threads = 4",
        "ATTACH '/tmp/evil.db'",
        "COPY (SELECT 1) TO '/tmp/evil.csv'",
        "INSTALL httpfs",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM scene",
        "WITH gone AS (DELETE FROM nodes RETURNING *) SELECT * FROM gone",
        "SELECT error('no')",
    ],
)
def test_what_is_more_than_one_select_over_the_tables_is_refused(
    scene: Scene, sql: str
) -> None:
    with pytest.raises(InvalidArgument):
        scene.sql(sql)
    assert scene.sql("SELECT count(*) FROM nodes") == [(2,)]


def test_rows_over_the_limit_are_cut_and_said_to_be(scene: Scene) -> None:
    rows = scene.rows("SELECT * FROM range(10) r(n)", limit=3)
    assert (rows.columns, rows.rows, rows.truncated) == (
        ("n",),
        ((0,), (1,), (2,)),
        True,
    )
    assert not scene.rows("SELECT * FROM range(3)", limit=3).truncated


def test_an_answer_that_grows_too_long_is_cut_and_said_to_be(scene: Scene) -> None:
    rows = scene.rows("SELECT repeat('x', 30 << 20) FROM range(9)")
    assert (rows.rows, rows.truncated) == ((("x" * (30 << 20),),) * 3, True)


def test_lists_are_made_text_where_they_are_and_nothing_else_changes(
    scene: Scene,
) -> None:
    asked = "SELECT r AS n, [r] AS n FROM range(5000) t(r) ORDER BY r % 7, r DESC -- so"
    rows = scene.rows(asked, limit=5000)
    order = sorted(range(5000), key=lambda r: (r % 7, -r))
    assert rows.columns == ("n", "n")
    assert rows.rows == tuple((r, f"[{r}]") for r in order)


def test_every_value_can_be_sent(scene: Scene) -> None:
    sql = (
        "SELECT DATE '2026-01-02', [1, 2], 1.5::DECIMAL(3,1), 'x'::BLOB, true, NULL,"
        " 170141183460469231731687303715884105727, 1e400, {'a': 1}"
    )
    (row,) = scene.rows(sql).rows
    m.encode(m.Rows(columns=(), rows=(row,)))
    assert row[:6] == ("2026-01-02", "[1, 2]", "1.5", "78", True, None)


def test_a_question_that_takes_too_long_is_ended_and_the_next_one_answered(
    scene: Scene,
) -> None:
    scene.tables = Tables(timeout_s=0.2)
    scene.told = 0
    with pytest.raises(DeadlineExceeded):
        scene.sql(LONG)
    assert scene.sql("SELECT count(*) FROM nodes") == [(2,)]
    scene.tables.close()


def test_a_question_ends_when_nobody_waits_for_its_answer_any_more(
    scene: Scene,
) -> None:
    with pytest.raises(DeadlineExceeded, match="within 1"):
        scene.sql(LONG, deadline_s=0.25)
    assert scene.sql("SELECT count(*) FROM nodes") == [(2,)]


def test_a_question_whose_time_went_by_while_others_were_answered_is_not_begun(
    scene: Scene,
) -> None:
    answers, done = list[m.Rows | m.Fault](), threading.Semaphore(0)

    def tell(answer: m.Rows | m.Fault) -> None:
        answers.append(answer)
        done.release()

    for _ in range(4):  # one's time is over when the first one's is
        scene.program.ask(m.Query(rid=scene.program.rid(), sql=LONG, deadline_s=0.0))
    scene.desk.flush()
    for query in scene.desk.queries:
        scene.tables.run(query, done=tell)
    for _ in range(4):
        assert done.acquire(timeout=300)
    assert [a.kind for a in answers if isinstance(a, m.Fault)] == [
        "DeadlineExceeded"
    ] * 4
    assert "others" in str(answers[-1])
    assert scene.sql("SELECT count(*) FROM nodes") == [(2,)]


@pytest.mark.parametrize("sql", ["SELECT '\ud800'", "SELECT 1\0", "SELECT '\0'"])
def test_text_that_the_database_cannot_take_ends_that_question_alone(
    scene: Scene, sql: str
) -> None:
    with contextlib.suppress(InvalidArgument):
        scene.sql(sql)
    assert scene.sql("SELECT count(*) FROM nodes") == [(2,)]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT unnest(range(100000000))",
        "SELECT count(*) FROM (SELECT unnest(range(100000000)))",
        "SELECT list(range) FROM range(100000000)",
        "SELECT repeat('x', 1000000) FROM range(1000)",
    ],
)
def test_a_question_that_makes_much_of_little_stays_within_its_limits(
    scene: Scene, sql: str
) -> None:
    scene.tables = Tables(timeout_s=2.0)
    scene.told = 0
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(DeadlineExceeded, InvalidArgument):
        scene.sql(sql)
    grown_bytes = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    ) << 10
    assert grown_bytes < 2 << 30
    assert scene.sql("SELECT count(*) FROM nodes") == [(2,)]
    scene.tables.close()


def test_a_shortage_of_descriptors_ends_the_first_question_and_not_the_next(
    scene: Scene,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path("/dev/null").open() as lowest:
        free = lowest.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(CatalogUnavailable, match="cannot be opened"):
            scene.sql("SELECT 1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert scene.sql("SELECT count(*) FROM nodes") == [(2,)]


def test_when_closing_returns_the_thread_is_gone(scene: Scene) -> None:
    assert scene.sql("SELECT count(*) FROM nodes") == [(2,)]
    scene.tables.close()
    assert "tensorcast-sql" not in {thread.name for thread in threading.enumerate()}


def test_closing_ends_what_runs_and_refuses_what_comes(scene: Scene) -> None:
    errors: list[TensorCastError] = []

    def ask() -> None:
        try:
            scene.sql(LONG)
        except TensorCastError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive():
        scene.tables.close()
        thread.join(0.05)
    with pytest.raises(CatalogUnavailable):
        scene.sql("SELECT 1")
    assert isinstance(errors[0], CatalogUnavailable)


def test_p33_many_askers_at_once_get_their_own_answers(scene: Scene) -> None:
    p = scene.program
    p.put("x")
    scene.sql("SELECT 1")
    wrong: list[object] = []
    for number in range(16):
        p.ask(m.Query(rid=p.rid(), sql=f"SELECT {number}, count(*) FROM artifacts"))
    scene.desk.flush()
    first = len(scene.desk.queries) - 16

    def ask(number: int) -> None:
        for _ in range(4):
            rows = run(scene.tables, scene.desk, first + number).rows
            if rows != ((number, 1),):
                wrong.append(rows)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_instances_are_a_table_with_what_they_offer_hold_and_pushed(
    scene: Scene,
) -> None:
    node = scene.desk.nodes[NodeId("a")]
    record = m.InstanceRecord(
        name="engine",
        attachment="a1",
        pid=7,
        functions=("f", "g"),
        labels={"pool": "blue"},
        holds={"w": 3},
    )
    node.say(m.InstancesHere(records=(record,), whole=True))
    columns = (
        "name, node_name, pid, labels->>'pool', (holds->>'w')::INTEGER, load_age_s"
    )
    asked = f"SELECT {columns} FROM instances WHERE NOT draining AND poisoned = ''"
    assert scene.sql(asked) == [("engine", "w-a", 7, "blue", 3, None)]
    (seen,) = (one for one in node.inbox if isinstance(one, m.InstanceSeen))
    load = m.InstanceLoad(
        instance="engine",
        epoch=seen.term,
        number=1,
        values={"queue": 4.0},
        age_s=0.0,
        draining=True,
    )
    node.say(load)
    asked = "SELECT draining, load->>'queue', load_age_s >= 0, functions FROM instances"
    assert scene.sql(asked) == [(True, "4.0", True, '["f","g"]')]
    node.say(m.InstancesHere(records=(), whole=True))
    assert scene.sql("SELECT * FROM instances") == []
