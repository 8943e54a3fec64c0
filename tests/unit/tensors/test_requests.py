from __future__ import annotations

import math
from typing import Any

import pytest

from tensorcast_dask.exceptions import InvalidArgument, Mismatch, NotFound
from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors import requests
from tensorcast_dask.tensors.dtypes import dtype
from tensorcast_dask.tensors.ids import ArtifactId, Generation, NodeId, RequestId
from tensorcast_dask.tensors.specs import Index, TensorSpec
from tensorcast_dask.tensors.views import View
from tests.kit.steps import INFO, NODES

RID = RequestId("r:1")


@pytest.mark.parametrize("wanted", ["n1", "one", ""])
def test_a_node_is_found_by_identity_name_or_address(wanted: str) -> None:
    # The card has no address: "" is what it has instead.
    assert requests.find_node(NODES, wanted) == NodeId("n1")


def test_a_node_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(NotFound, match="no node 'two'; there are: 'one'"):
        requests.find_node(NODES, "two")


@pytest.mark.parametrize(
    ("given", "wire"), [(None, 0), ("next", -1), (1, 1), (2**40, 2**40)]
)
def test_a_version_has_one_form_on_the_wire(given: Any, wire: int) -> None:
    assert requests.check_version(given) == wire


@pytest.mark.parametrize("bad", [0, -1, True, 1.0, "1", [1]])
def test_what_is_no_version_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="version must be"):
        requests.check_version(bad)


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "2", None])
def test_replicas_are_counted_from_one(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="replicas must be"):
        requests.check_replicas(bad)
    assert requests.check_replicas(2) == 2


def test_a_version_is_published_under_its_own_number_only() -> None:
    asked = m.Publish(rid=RID, generation=Generation(7))
    assert requests.publish(RID, INFO, None) == asked
    assert requests.publish(RID, INFO, 2) == asked
    with pytest.raises(Mismatch, match="is version 2, not 3"):
        requests.publish(RID, INFO, 3)


@pytest.mark.parametrize("bad", [0, -1.0, True, math.nan, "5"])
def test_a_pin_lasts_some_seconds_or_for_ever(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="ttl must be"):
        requests.pin(RID, 7, bad, "n1")
    pin = m.Pin(rid=RID, generation=Generation(7), ttl_s=math.inf, node=NodeId("n1"))
    assert requests.pin(RID, 7, 10**400, "n1") == pin


@pytest.mark.parametrize("bad", [-1, True, 1.0, "0"])
def test_an_alias_is_compared_with_a_generation(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="expect must be"):
        requests.set_alias(RID, "a", 7, bad)
    alias = m.SetAlias(rid=RID, name=ArtifactId("a"), generation=Generation(7))
    assert requests.set_alias(RID, "a", 7, None) == alias
    assert requests.set_alias(RID, "a", 7, 0).expect == 0


def test_a_view_has_one_name_for_everybody_unless_it_is_given_one() -> None:
    index = Index.of([TensorSpec("x", dtype("uint8"), (3,))])
    step = View.of({"x": slice(1, None)})
    one = requests.register_view(RID, INFO, index, step, None)
    again = requests.register_view(RID, INFO, index, View.of({"x": slice(1, 3)}), None)
    assert one == again
    assert one.id.startswith("view-")
    assert (one.nbytes, one.tensors, one.generation) == (2, 1, 7)
    assert requests.register_view(RID, INFO, index, step, "mine").id == "mine"
