"""One worker's care for its gateway.

Rules:

1. There is one only where the node has the role `gateway` and ports for it (`node.http-ports`).
2. Nothing that fails here touches the worker or its store: the log and `why` say it.
3. It stands floors above this one: found by its name, and imported where there is one only.
"""

from __future__ import annotations

import asyncio
import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.exceptions import TensorCastError
from tensorcast_dask.worker_plugin import news

if TYPE_CHECKING:
    from tensorcast_dask.config import NodeSettings
    from tensorcast_dask.tensors.messages import NodeCard

__all__ = ["GatewayCare"]

log = logging.getLogger(__name__)

_MODULE: Final = "tensorcast_dask.http.node"
_ROLE: Final = "gateway"


class GatewayCare:
    """Keeps a gateway beside one worker."""

    def __init__(self) -> None:
        self._server: Any = None
        #: Where it answers; "" without one.
        self.url = ""
        #: Why there is none where one is wanted.
        self.why = ""

    async def begin(self, node: object, wanted: NodeSettings, card: NodeCard) -> None:
        """Begin for a `NodeHandle`, where one is wanted (rule 1)."""
        if self._server is not None or wanted.http_ports is None:
            return
        if _ROLE not in wanted.roles:
            self.why = "the node has not the role gateway"
            return
        host = wanted.http_host or card.data_host or "127.0.0.1"
        try:
            module = await asyncio.to_thread(import_module, _MODULE)
            self._server = await module.begin(node, host=host, ports=wanted.http_ports)
        except (TensorCastError, OSError) as error:
            self.why = str(error)
            log.warning("the node has no gateway: %s", error)
            return
        self.url = self._server.url
        news.gateway_attends(self.url)

    async def close(self) -> None:
        """End it."""
        server, self._server, self.url = self._server, None, ""
        if server is not None:
            await server.close()

    def describe(self) -> dict[str, str]:
        """Say how it stands."""
        return {"url": self.url, "why": self.why}
