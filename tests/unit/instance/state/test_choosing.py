from __future__ import annotations

import pytest

from tensorcast_dask.exceptions import InvalidArgument, NotFound
from tensorcast_dask.instance.state.choosing import Found, choose
from tensorcast_dask.tensors.ids import HostId, Incarnation, NodeId
from tensorcast_dask.tensors.messages import NodeCard


def card(node: str, instances: int = 0, name: str = "") -> NodeCard:
    return NodeCard(
        node=NodeId(node),
        incarnation=Incarnation(1),
        host=HostId("h"),
        socket="/s",
        name=name,
        worker=f"tcp://{node}" if name else "",
        instances=instances,
    )


A = Found(names=("fa", "ca"), cards=(card("a1", 2, "w0"), card("a2", 1, "w1")))
B = Found(names=("fb", "cb", "tcp://b"), cards=(card("b1"),))
NONE = Found(names=("fn", "cn"), cards=())


def test_the_only_cluster_and_its_node_with_the_fewest_instances_are_taken() -> None:
    chosen, why = choose([A, NONE])
    assert (chosen.node, why) == ("a2", "fewest instances (1) of 2 nodes here")
    chosen, why = choose([B])
    assert (chosen.node, why) == ("b1", "the only node here")


def test_equals_are_told_apart_by_identity() -> None:
    found = Found(names=("f",), cards=(card("y"), card("x")))
    assert choose([found])[0].node == "x"


@pytest.mark.parametrize("name", ["fb", "cb", "tcp://b"])
def test_a_cluster_is_named_by_folder_id_or_what_people_call_it(name: str) -> None:
    assert choose([A, B], cluster=name)[0].node == "b1"


@pytest.mark.parametrize("name", ["a1", "w0", "tcp://a1"])
def test_a_node_is_named_by_identity_name_or_worker(name: str) -> None:
    chosen, why = choose([A], node=name)
    assert (chosen.node, why) == ("a1", "asked for by name")


def test_several_clusters_are_an_error_that_lists_them() -> None:
    with pytest.raises(InvalidArgument, match="several") as caught:
        choose([A, NONE, B])
    assert "fa = ca (nodes w0, w1)" in caught.value.message
    assert "fb = cb = tcp://b (nodes b1)" in caught.value.message
    assert "fn" not in caught.value.message


def test_nothing_that_fits_is_an_error_that_says_what_there_is() -> None:
    with pytest.raises(NotFound, match="any cluster"):
        choose([NONE])
    with pytest.raises(NotFound, match="there are: fa = ca"):
        choose([A], cluster="other")
    with pytest.raises(NotFound, match="0 nodes here"):
        choose([A], node="zz")
    with pytest.raises(NotFound, match="2 nodes here"):
        choose([A], node="a")
