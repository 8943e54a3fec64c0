"""Where a node has a gateway, and where it says why it has none."""

from __future__ import annotations

from typing import Any

import pytest

from tensorcast_dask.config import Settings
from tensorcast_dask.tensors.ids import HostId, Incarnation, NodeId
from tensorcast_dask.tensors.messages import NodeCard
from tensorcast_dask.worker_plugin.gateway import GatewayCare
from tests.kit.loops import on_loop

CARD = NodeCard(
    node=NodeId("n"), incarnation=Incarnation(1), host=HostId("h"), socket=""
)


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ({}, ""),
        ({"http-ports": None}, ""),
        ({"http-ports": 0, "roles": ["basic"]}, "the node has not the role gateway"),
    ],
)
def test_there_is_none_without_ports_and_without_the_role(
    node: dict[str, Any], why: str
) -> None:
    @on_loop
    async def begin() -> None:
        care = GatewayCare()
        await care.begin(object(), Settings.of({"node": node}).node, CARD)
        assert care.describe() == {"url": "", "why": why}
        await care.close()

    begin()
