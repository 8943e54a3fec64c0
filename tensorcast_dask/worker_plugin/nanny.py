"""The nanny plugin: a worker is judged by its own memory, not by what it maps.

Rules:

1. It touches nothing but the nanny's memory check and its automatic limit.
2. It tells each worker that it starts what was done, and answers `tensorcast_nanny` to
   those that were there before: nothing is mapped on a guess.
3. A second arrival (another registration) changes nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from dask.system import CPU_COUNT
from distributed.diagnostics.plugin import NannyPlugin

from tensorcast_dask.config import Settings, Tree, hosts_own, local_tree, merged
from tensorcast_dask.exceptions import TensorCastError
from tensorcast_dask.worker_plugin import dask_private
from tensorcast_dask.worker_plugin.state.budgets import (
    is_auto_limit,
    lowered_limit_bytes,
    node_budget_bytes,
)

if TYPE_CHECKING:
    from distributed import Nanny

__all__ = ["NANNY_PLUGIN_NAME", "MemoryCheckPlugin"]

log = logging.getLogger(__name__)

NANNY_PLUGIN_NAME: Final = "tensorcast-nanny"


class MemoryCheckPlugin(NannyPlugin):
    """What Dask registers in nannies.

    Parameters
    ----------
    tree, arguments : dict
        The scheduler's settings, and the arguments over them.
    """

    name = NANNY_PLUGIN_NAME
    restart = False

    def __init__(self, tree: Tree, arguments: Tree) -> None:
        self._tree = tree
        self._arguments = arguments

    async def setup(self, nanny: Nanny) -> None:
        """Replace the check, lower an automatic limit."""
        if dask_private.NANNY_OP in nanny.handlers:  # rule 3
            return
        limit_bytes = nanny.memory_manager.memory_limit
        facts: dict[str, Any] = {
            "replaced": dask_private.replace_nanny_check(nanny),
            "limit_bytes": limit_bytes,
            "auto": False,
        }
        try:
            self._lower(nanny, facts)
        except TensorCastError as error:  # the worker plugin reports bad settings
            log.warning("the memory limit of the worker stays as it is: %s", error)
        dask_private.tell_next_workers(nanny, facts)
        answer = _Answer(facts)
        nanny.handlers[dask_private.NANNY_OP] = answer.tell

    def _lower(self, nanny: Nanny, facts: dict[str, Any]) -> None:
        limit_bytes = nanny.memory_manager.memory_limit
        machine_bytes = dask_private.machine_bytes()
        if limit_bytes is None or not is_auto_limit(
            limit_bytes,
            machine_bytes=machine_bytes,
            threads=nanny.nthreads,
            cores=CPU_COUNT,
        ):
            return
        tree = merged(self._tree, hosts_own(local_tree()), self._arguments)
        budget_bytes = node_budget_bytes(
            Settings.of(tree).node.host_memory,
            machine_bytes=machine_bytes,
            share=nanny.nthreads / CPU_COUNT,
            limit_bytes=limit_bytes,
        )
        facts["auto"] = True
        dask_private.lower_nanny_limit(
            nanny, lowered_limit_bytes(limit_bytes, budget_bytes)
        )


class _Answer:
    """What is told to the worker that asks."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self._facts = facts

    async def tell(self) -> dict[str, Any]:
        """Answer `tensorcast_nanny`."""
        return self._facts
