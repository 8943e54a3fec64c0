from __future__ import annotations

from tensorcast_dask.scheduler_plugin.state.loads import (
    MAX_INSTANCES,
    MAX_VALUES,
    Loads,
)
from tensorcast_dask.tensors.ids import NodeId
from tensorcast_dask.tensors.messages import MAX_REQUESTS, InstanceLoad, RequestLoad

NODE = NodeId("a")


def push(
    number: int, queue: float = 1.0, *, epoch: int = 1, **more: object
) -> InstanceLoad:
    return InstanceLoad(
        instance="i",
        epoch=epoch,
        number=number,
        values={"queue": queue},
        **more,  # type: ignore[arg-type]
    )


def test_a_push_replaces_the_last_and_is_smoothed_beside_it() -> None:
    loads = Loads()
    assert loads.pushed(NODE, push(1, 10.0, age_s=0.5), now_s=100.0)
    assert loads.pushed(NODE, push(2, 20.0), now_s=101.0)
    load = loads.get("i")
    assert load is not None
    assert load.as_of_s == 101.0
    assert load.reading == {
        "node": "a",
        "draining": False,
        "requests": 0,
        "queue": 20.0,
        "queue.ewma": 13.0,
    }
    assert load.fresh(111.0)
    assert not load.fresh(111.1)


def test_what_is_late_or_of_an_earlier_attachment_is_ignored() -> None:
    loads = Loads()
    loads.pushed(NODE, push(5, epoch=2), now_s=1.0)
    assert not loads.pushed(NODE, push(5, epoch=2), now_s=2.0)
    assert not loads.pushed(NODE, push(4, epoch=2), now_s=2.0)
    assert not loads.pushed(NODE, push(9, epoch=1), now_s=2.0)
    assert not loads.gone("i", 1)
    assert not loads.gone("nobody", 1)
    assert loads.pushed(NODE, push(1, 7.0, epoch=3), now_s=2.0)
    load = loads.get("i")
    assert load is not None
    assert load.smooth == {"queue": 7.0}, "another attachment is smoothed anew"
    assert loads.gone("i", 3)
    assert loads.get("i") is None


def test_an_instance_of_which_nothing_is_heard_goes() -> None:
    loads = Loads()
    loads.pushed(NODE, push(1, ttl_s=2.0), now_s=0.0)
    loads.expire(4.0)
    assert [one.said.instance for one in loads.values()] == ["i"]
    loads.expire(4.1)
    assert len(loads) == 0


def test_no_push_takes_more_than_its_share_of_memory() -> None:
    loads = Loads()
    large = InstanceLoad(
        instance="i",
        epoch=1,
        number=1,
        values={f"v{n}": 0.0 for n in range(MAX_VALUES + 1)},
        requests=(RequestLoad(request="r", tokens=1),) * (MAX_REQUESTS + 1),
        versions={f"a{n}": 1 for n in range(MAX_VALUES + 1)},
    )
    loads.pushed(NODE, large, now_s=0.0)
    load = loads.get("i")
    assert load is not None
    said = load.said
    assert (len(said.values), len(said.requests)) == (MAX_VALUES, MAX_REQUESTS)
    assert len(said.versions) == MAX_VALUES
    for number in range(MAX_INSTANCES):
        other = InstanceLoad(instance=f"i{number}", epoch=1, number=1, values={})
        loads.pushed(NODE, other, now_s=0.0)
    assert len(loads) == MAX_INSTANCES
    assert loads.get("i") is None
