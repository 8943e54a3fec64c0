"""A step that is driven by hand: what it wants is answered from a list."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from tensorcast_dask.exceptions import TensorCastError
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
    NodeCard,
    Nodes,
    NodeState,
    Owner,
    Stage,
)

if TYPE_CHECKING:
    from tensorcast_dask.tensors.wants import Asking, Want

__all__ = ["CARD", "INFO", "NODES", "driven"]

T = TypeVar("T")

INFO = ArtifactInfo(
    id=ArtifactId("x"),
    version=Version(2),
    generation=Generation(7),
    stage=Stage.COMMITTED,
    owner=Owner.SYSTEM,
    nbytes=3,
    tensors=1,
)
CARD = NodeCard(
    node=NodeId("n1"),
    incarnation=Incarnation(1),
    host=HostId("h"),
    socket="/s",
    name="one",
)
NODES = Nodes(nodes=(NodeState(card=CARD, uses={}, attended=True, lease_left_s=1.0),))


def driven(doing: Asking[T], *answers: object) -> tuple[list[Want], T]:
    """Answer a step's wants in order; give the wants, and what it came to.

    An answer that is an error is thrown.
    """
    wants: list[Want] = []
    left = list(answers)
    try:
        want = next(doing)
        while True:
            wants.append(want)
            answer = left.pop(0)
            if isinstance(answer, TensorCastError):
                want = doing.throw(answer)
            else:
                want = doing.send(answer)
    except StopIteration as end:
        assert not left, f"answers that nobody wanted: {left}"
        return wants, end.value
