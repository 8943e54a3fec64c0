"""How much host memory a node takes, and what that leaves to Dask's worker.

Rules:

1. By default a node takes half of what the worker may have: half of the machine (or its
   cgroup) times the worker's share of the cores, and at most half of its memory limit.
2. A limit that Dask chose ("auto") is lowered by the budget, so that worker and store
   together stay within it; a limit that a person gave is kept.
3. A lowered limit keeps at least a quarter of the old one.
4. A budget above what the machine (or its cgroup) has is taken for all of it, with a
   warning, as Dask does with a worker's memory limit.
5. Budgets of all nodes of a host that come to more than the machine has are a warning too:
   each store asks the machine itself before it takes more, so puts are refused, and nobody
   is killed.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "excess_of",
    "is_auto_limit",
    "lowered_limit_bytes",
    "node_budget_bytes",
    "oversold",
]

_MOST_WORKERS = 256


def node_budget_bytes(
    host_memory: float | None,
    *,
    machine_bytes: int,
    share: float,
    limit_bytes: int | None,
) -> int:
    """Compute a node's budget.

    Parameters
    ----------
    host_memory : int, float or None
        The setting: bytes, a share of the machine below 1, or None for rule 1.
    machine_bytes : int
        The least of physical memory and cgroup limit.
    share : float
        The worker's threads as a part of the cores.
    limit_bytes : int or None
        The worker's memory limit.
    """
    if host_memory is not None:
        if 0 < host_memory < 1:
            return int(machine_bytes * host_memory)
        return min(int(host_memory), machine_bytes)
    most_bytes = machine_bytes * min(1.0, share)
    if limit_bytes:
        most_bytes = min(most_bytes, limit_bytes)
    return int(most_bytes / 2)


def excess_of(host_memory: float | None, *, machine_bytes: int) -> str:
    """Say that a budget is more than the machine can ever give (rule 4); "" when it is not."""
    if host_memory is None or host_memory <= machine_bytes:
        return ""
    return (
        f"tensorcast.node.host-memory is {int(host_memory)} bytes, this machine or its "
        f"memory cgroup has {machine_bytes}: the node takes those; set it lower"
    )


def oversold(budgets: Sequence[int], *, machine_bytes: int) -> str:
    """Say that all nodes of a host may take more than it has (rule 5); "" when they may not."""
    if sum(budgets) <= machine_bytes:
        return ""
    return (
        f"the {len(budgets)} nodes of this host may take {sum(budgets)} bytes of host memory "
        f"together, this machine or its memory cgroup has {machine_bytes}: puts will be refused "
        "before a node is full; set tensorcast.node.host-memory lower, it is for each node"
    )


def lowered_limit_bytes(limit_bytes: int, budget_bytes: int) -> int:
    """Compute what is left of an automatic limit (rules 2 and 3)."""
    return max(limit_bytes - budget_bytes, limit_bytes // 4)


def is_auto_limit(
    limit_bytes: int | None, *, machine_bytes: int, threads: int, cores: int
) -> bool:
    """Tell whether Dask chose this limit: the machine times the share of cores, or of workers.

    Dask does not say. A person's limit is a round figure; the machine's memory never is.
    """
    if not limit_bytes:
        return False
    by_cores = int(machine_bytes * min(1, threads / cores))
    by_workers = (int(machine_bytes / n) for n in range(1, _MOST_WORKERS + 1))
    return abs(limit_bytes - by_cores) <= 1 or any(
        abs(limit_bytes - limit) <= 1 for limit in by_workers
    )
