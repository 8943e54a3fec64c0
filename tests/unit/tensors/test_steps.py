from __future__ import annotations

from typing import Any

import pytest

from tensorcast_dask.exceptions import (
    AlreadyExists,
    InvalidArgument,
    Mismatch,
    NotFound,
)
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors import steps, values
from tensorcast_dask.tensors.calling import Calling
from tensorcast_dask.tensors.dtypes import dtype
from tensorcast_dask.tensors.ids import ArtifactId, Generation, HostId, NodeId
from tensorcast_dask.tensors.messages import Tier
from tensorcast_dask.tensors.plans import (
    ArtifactRef,
    Kind,
    NameRef,
    PlanSpec,
    Step,
    StepRef,
)
from tensorcast_dask.tensors.requests import register_view
from tensorcast_dask.tensors.specs import Index, TensorSpec
from tensorcast_dask.tensors.views import View
from tensorcast_dask.tensors.wants import NO_RID, Ask, Call, Local, Want
from tests.kit.steps import CARD, INFO, NODES, driven

HOST = HostId("mine")
UUID = "GPU-00000000-0000-0000-0000-000000000001"
REF = ArtifactRef.of(INFO)
SAME = REF.info()
NAMED = NameRef(id="x")
WHERE = Ask(m.NodesAsked(rid=NO_RID), m.Nodes)
RESOLVED = Ask(m.Resolve(rid=NO_RID, id=ArtifactId("x")), m.ArtifactInfo)
N1 = NodeId("n1")
G7 = Generation(7)
MOVED = m.Moved(
    location=m.Location(card=CARD, tier=Tier.HOST),
    moved_bytes=3,
    seconds=0.1,
    via="tcp",
)
PINNED = m.Pinned(pin=4, nodes=(N1,))
ALIASED = m.AliasState(name=ArtifactId("a"), alias_generation=1, info=None)
GONE = m.Destroyed(versions=())
DRAINED = m.Drained(moved=(), moved_bytes=0, stayed=())
LOAD = m.LoadFile(
    rid=NO_RID, id=ArtifactId("x"), path="/p", deadline_s=0.0, node=N1, host=HOST
)


def step(kind: Kind, target: Any = None, node: str = "one", **more: Any) -> Step:
    return Step(name="a", kind=kind, target=target, node=node, **more)


def run(one: Step, *answers: object, **before: object) -> tuple[list[Want], Any]:
    doing = steps.carry_out(one, before.__getitem__, host=HOST)
    return driven(doing, *answers)


def ensure(why: str, tier: Tier = Tier.HOST, device: str = "") -> Ask:
    request = m.Ensure(
        rid=NO_RID,
        generation=G7,
        node=N1,
        deadline_s=0.0,
        tier=tier,
        host=HOST,
        why=why,
        device=device,
    )
    return Ask(request, m.Moved)


@pytest.mark.parametrize(
    ("one", "wanted"),
    [
        (step(Kind.PREFETCH, REF), ensure("prefetch")),
        (step(Kind.REPLICATE, REF), ensure("replicate")),
        (
            step(Kind.PREFETCH, REF, options={"device": "disk"}),
            ensure("prefetch", Tier.DISK),
        ),
        (
            step(Kind.PREFETCH, REF, options={"device": UUID}),
            ensure("prefetch", Tier.DEVICE, UUID),
        ),
        (
            step(Kind.SAVE, REF, options={"path": "/p"}),
            Ask(
                m.SaveFile(
                    rid=NO_RID,
                    generation=G7,
                    path="/p",
                    deadline_s=0.0,
                    node=N1,
                    host=HOST,
                ),
                m.Moved,
            ),
        ),
    ],
)
def test_moves_give_the_artifact_the_node_and_the_bytes(one: Step, wanted: Ask) -> None:
    wants, outcome = run(one, NODES, MOVED)
    assert wants == [WHERE, wanted]
    assert outcome == m.StepOutcome(
        status=m.StepStatus.DONE,
        kind="ArtifactInfo",
        value=m.encode(SAME),
        node="n1",
        moved_bytes=3,
    )
    assert steps.value_of(outcome) == SAME


def test_a_migration_asks_for_both_its_nodes() -> None:
    migrate = m.Migrate(rid=NO_RID, generation=G7, source=N1, node=N1, deadline_s=0.0)
    one = step(Kind.MIGRATE, NAMED, source="n1")
    wants, _ = run(one, INFO, NODES, NODES, MOVED)
    assert wants == [RESOLVED, WHERE, WHERE, Ask(migrate, m.Moved)]


def test_a_release_moves_nothing() -> None:
    release = m.Release(rid=NO_RID, generation=G7, node=N1)
    wants, outcome = run(step(Kind.RELEASE, REF), NODES, None)
    assert wants == [WHERE, Ask(release, type(None))]
    assert (outcome.node, outcome.moved_bytes) == ("", 0)


@pytest.mark.parametrize(
    ("one", "wanted", "value"),
    [
        (
            step(Kind.LATEST, NAMED),
            Ask(
                m.Resolve(rid=NO_RID, id=ArtifactId("x"), published=True),
                m.ArtifactInfo,
            ),
            INFO,
        ),
        (
            step(Kind.DESTROY, NAMED),
            Ask(m.Destroy(rid=NO_RID, id=ArtifactId("x")), m.Destroyed),
            GONE,
        ),
        (
            step(Kind.DESTROY, REF),
            Ask(m.Destroy(rid=NO_RID, id=ArtifactId("x"), generation=G7), m.Destroyed),
            GONE,
        ),
        (
            step(Kind.PUBLISH, REF),
            Ask(m.Publish(rid=NO_RID, generation=G7), m.ArtifactInfo),
            INFO,
        ),
        (
            step(Kind.ALIAS, REF, options={"name": "a", "expect": 0}),
            Ask(
                m.SetAlias(rid=NO_RID, name=ArtifactId("a"), generation=G7, expect=0),
                m.AliasState,
            ),
            ALIASED,
        ),
        (
            step(Kind.ALIAS, None, options={"name": "a"}),
            Ask(
                m.SetAlias(rid=NO_RID, name=ArtifactId("a"), generation=Generation(0)),
                m.AliasState,
            ),
            ALIASED,
        ),
    ],
)
def test_names_are_asked_for_in_one_request(
    one: Step, wanted: Ask, value: m.Wire
) -> None:
    wants, outcome = run(one, value)
    assert wants == [wanted]
    assert outcome.kind == type(value).__name__
    assert steps.value_of(outcome) == value


@pytest.mark.parametrize(
    ("one", "wanted", "value"),
    [
        (step(Kind.LOAD, options={"path": "/p", "id": "x"}), LOAD, INFO),
        (
            step(Kind.PIN, REF, options={"ttl": 5}),
            m.Pin(rid=NO_RID, generation=G7, ttl_s=5.0, node=N1),
            PINNED,
        ),
        (
            step(Kind.DRAIN, options={"worker": "n1", "end": False}),
            m.DrainNode(rid=NO_RID, node=N1, deadline_s=0.0, end=False),
            DRAINED,
        ),
    ],
)
def test_what_is_done_at_a_node_asks_which_that_is(
    one: Step, wanted: m.Message, value: m.Wire
) -> None:
    wants, outcome = run(one, NODES, value)
    assert wants == [WHERE, Ask(wanted, type(value))]
    assert steps.value_of(outcome) == value


def test_an_unpin_takes_the_pin_of_an_earlier_step() -> None:
    one = step(Kind.UNPIN, REF, uses=("p",), options={"pinned": "p"})
    wants, outcome = run(one, None, p=PINNED)
    unpin = m.Unpin(rid=NO_RID, generation=G7, pin=4)
    assert wants == [Ask(unpin, type(None))]
    assert steps.value_of(outcome) is None
    with pytest.raises(Mismatch, match="takes a pin"):
        run(one, p=INFO)


def test_a_view_is_named_after_its_index() -> None:
    index = Index.of([TensorSpec("x", dtype("uint8"), (3,))])
    cut = View.of({"x": slice(1, None)})
    described = m.Described(info=INFO, index=index.encode())
    wants, _ = run(step(Kind.VIEW, REF, view=cut.encode()), described, INFO)
    assert wants == [
        Ask(m.Describe(rid=NO_RID, generation=G7), m.Described),
        Ask(register_view(NO_RID, SAME, index, cut, None), m.ArtifactInfo),
    ]


def test_a_load_of_a_name_that_is_taken_compares_the_content() -> None:
    one = step(Kind.LOAD, options={"path": "/p", "id": "x"})
    taken = AlreadyExists("taken")
    wants, outcome = run(one, NODES, taken, INFO)
    assert wants[2] == Local(steps.SAME_FILE, (LOAD, taken))
    assert steps.value_of(outcome) == INFO
    with pytest.raises(AlreadyExists):
        run(one, NODES, taken, None)


def test_what_takes_a_session_is_wanted_of_whoever_has_one() -> None:
    wants, _ = run(
        step(Kind.PREFETCH, REF, options={"device": "cuda:0"}), UUID, NODES, MOVED
    )
    assert wants[0] == Local(steps.DEVICE, ("cuda:0",))
    cut = ArtifactRef(
        id=ArtifactId("x"), version=INFO.version, generation=G7, view=b"v"
    )
    wants, _ = run(step(Kind.SAVE, cut, options={"path": "p"}), "/here/p", MOVED)
    assert wants == [
        Local(steps.PATH, ("p",)),
        Local(steps.SAVE_VIEW, (cut.info(), "/here/p", 0)),
    ]
    wants, outcome = run(step(Kind.COPY, REF, options={"id": "y"}), INFO)
    assert wants == [Local(steps.COPY, (SAME, "y", None, "one"))]
    assert steps.value_of(outcome) == INFO


def test_what_is_no_artifact_is_refused_before_anything_is_asked() -> None:
    with pytest.raises(Mismatch, match="takes an artifact, and 'b' gave Pinned"):
        run(step(Kind.PUBLISH, StepRef(step="b")), b=PINNED)
    with pytest.raises(InvalidArgument, match="max_shard_bytes"):
        run(step(Kind.SAVE, REF, options={"path": "/p", "max_shard_bytes": -1}))


def test_a_node_that_is_not_there_is_told_by_its_step() -> None:
    with pytest.raises(NotFound, match="no node 'two'"):
        run(step(Kind.PREFETCH, REF, node="two"), NODES)


def test_a_call_gets_its_artifact_first_and_results_in_their_places() -> None:
    one = Step(
        name="a",
        kind=Kind.CALL,
        instance="e",
        target=StepRef(step="b"),
        uses=("c",),
        options={"function": "f"},
        args=values.pack([[StepRef(step="c")], {}]),
    )
    calling = Calling(one, "life", "k/a/1", card=CARD, again=False)
    look: dict[str, object] = {"b": INFO, "c": 5}
    wants, outcome = driven(
        steps.call_instance(one, look.__getitem__, calling), values.pack([1])
    )
    (call,) = wants
    assert isinstance(call, Call)
    assert call.request.args == values.pack([[INFO, 5], {}])
    assert steps.value_of(outcome) == [1]


def test_a_step_that_does_nothing_hands_on_what_it_was_given() -> None:
    had = m.StepOutcome(
        status=m.StepStatus.DONE, kind="plain", value=b"v", node="n", attempts=2
    )
    assert steps.handed_on(
        step(Kind.NOOP, StepRef(step="b")), {"b": had}
    ) == m.StepOutcome(status=m.StepStatus.DONE, kind="plain", value=b"v")
    assert steps.handed_on(step(Kind.NOOP), {}) == m.StepOutcome(
        status=m.StepStatus.DONE
    )


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (step(Kind.SUBMIT, token="t"), "a function of yours"),
        (step(Kind.COPY, REF, options={"id": "y"}), "reads and puts"),
        (step(Kind.PREFETCH, REF, options={"device": "cuda:0"}), "by UUID"),
        (step(Kind.SAVE, REF, options={"path": "p"}), "where a worker runs"),
        (
            step(
                Kind.SAVE,
                ArtifactRef(
                    id=ArtifactId("x"), version=INFO.version, generation=G7, view=b"v"
                ),
                options={"path": "/p"},
            ),
            "writes a view",
        ),
        (step(Kind.PREFETCH, REF, options={"device": UUID}), ""),
        (step(Kind.PREFETCH, REF, options={"device": "pinned"}), ""),
        (step(Kind.NOOP), ""),
    ],
)
def test_what_only_a_worker_can_do_is_known_before_it_runs(one: Step, why: str) -> None:
    said = steps.needs_worker(PlanSpec(steps=(one,)))
    assert why in said
    assert bool(why) is bool(said)
