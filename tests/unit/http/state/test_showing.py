"""From what the catalog says to what answers show."""

from __future__ import annotations

import math

import msgspec
import pytest

from tensorcast_dask.http.state import showing
from tensorcast_dask.tensors.dtypes import dtype
from tensorcast_dask.tensors.ids import (
    ArtifactId,
    Generation,
    HostId,
    Incarnation,
    NodeId,
    Version,
)
from tensorcast_dask.tensors.messages import (
    ArtifactInfo,
    InstanceRecord,
    InstanceState,
    Location,
    NodeCard,
    NodeState,
    Owner,
    Stage,
    Tier,
    TierUse,
)
from tensorcast_dask.tensors.secrets import HIDDEN
from tensorcast_dask.tensors.signals import Signal
from tensorcast_dask.tensors.specs import TensorSpec

CARD = NodeCard(
    node=NodeId("n1"),
    incarnation=Incarnation(3),
    host=HostId("h"),
    socket="/run/secret/socket",
    name="w0",
    worker="tcp://10.0.0.1:1",
    pid=77,
    labels={"zone": "a", "db_password": "hunter2"},
)


def info(number: int = 1, **facts: object) -> ArtifactInfo:
    return ArtifactInfo(
        **{  # type: ignore[arg-type]
            "id": ArtifactId("toy/w"),
            "version": Version(number),
            "generation": Generation(1 << 60),
            "stage": Stage.PUBLISHED,
            "owner": Owner.SYSTEM,
            "nbytes": 64,
            "tensors": 1,
            "index_digest": "ab",
            "labels": {"team": "a", "API_KEY": "hunter2"},
        }
        | facts
    )


def test_no_answer_has_a_secret_label_a_socket_or_a_process() -> None:
    state = NodeState(
        card=CARD,
        uses={Tier.HOST: TierUse(used_bytes=5)},
        attended=True,
        lease_left_s=1,
    )
    record = InstanceRecord(
        name="i", attachment="a", pid=9, labels={"token": "hunter2"}
    )
    shown = [
        showing.artifact(info()),
        showing.node(state),
        showing.instance(InstanceState(record=record, card=CARD)),
        showing.replica(Location(card=CARD, tier=Tier.HOST)),
        showing.value({"at": Location(card=CARD, tier=Tier.HOST), "what": info()}),
    ]
    text = msgspec.json.encode(shown).decode()
    assert HIDDEN in text
    for hidden in ("hunter2", "/run/secret", '"pid"', "77"):
        assert hidden not in text


def test_numbers_that_a_double_cannot_hold_are_text_and_infinity_is_null() -> None:
    assert showing.artifact(info()).generation == str(1 << 60)
    assert showing.plain(
        {"a": 1 << 60, "b": 7, "c": math.inf, "d": True, "e": "x"}
    ) == {
        "a": str(1 << 60),
        "b": 7,
        "c": None,
        "d": True,
        "e": "x",
    }
    signal = Signal(name="n", value={"g": 1 << 60}, epoch=1 << 60)
    assert showing.signal(signal).epoch == str(1 << 60)
    assert showing.value([math.nan, b"\x01", {1: None}, object]) == [
        None,
        "01",
        {"1": None},
        str(object),
    ]


def test_a_tensor_is_shown_with_the_tag_of_its_bytes() -> None:
    spec = TensorSpec("w", dtype("float32"), (2, 8))
    shown = showing.tensor(info(), spec)
    assert (shown.dtype, shown.shape, shown.bytes) == ("float32", [2, 8], 64)
    assert shown.etag != showing.tensor(info(generation=Generation(5)), spec).etag


def test_a_page_that_is_full_says_where_the_next_one_begins() -> None:
    assert showing.cursor_of([], 2) == showing.cursor_of([info()], 2) == ""
    assert showing.cursor_of([info(1), info(4)], 2) == "4:toy/w"


@pytest.mark.parametrize("value", [{}, {"status": "done", "steps": 3, "done": 2}])
def test_a_run_is_listed_as_its_signal_counts_it(value: dict[str, object]) -> None:
    listed = showing.plan_listed(Signal(name="plan/k/1", value=value))  # type: ignore[arg-type]
    assert (listed.key, listed.status) == ("k/1", value.get("status", ""))
    assert (listed.steps, listed.done) == (value.get("steps", 0), value.get("done", 0))
