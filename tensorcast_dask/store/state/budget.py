"""May these bytes be allocated? Our own arithmetic, on numbers that the shell read.

Rules:

1. Memory is admitted only when the budget has room, and the cgroups of the whole path
   and the machine's MemAvailable each keep the reserve afterwards.
2. The budget is what the user gave: it is used to the last byte. The reserve is for what
   we do not own: the share of a limit, and at least `reserve_min_bytes`.
3. `fallocate` is no guard: in a memory cgroup it has the OOM killer called on the caller.
   So memory is made in steps and rule 1 is asked before each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Headroom", "Limits", "Shortfall", "shortfall", "steps"]

_NO_LIMIT: Final = -1


class Limits(NamedTuple):
    """What a store was told."""

    budget_bytes: int
    reserve_fraction: float
    reserve_min_bytes: int

    def reserve_bytes(self, total_bytes: int) -> int:
        """Return what must stay free of a limit of `total_bytes`."""
        return max(int(self.reserve_fraction * total_bytes), self.reserve_min_bytes)


class Headroom(NamedTuple):
    """What the machine said a moment ago; -1 = no such limit."""

    available_bytes: int = _NO_LIMIT  # MemAvailable
    total_bytes: int = 0  # MemTotal
    #: The tightest cgroup of the path: its limit and what is left of it.
    cgroup_limit_bytes: int = _NO_LIMIT
    cgroup_free_bytes: int = _NO_LIMIT


class Shortfall(NamedTuple):
    """Why memory was not admitted."""

    what: str  # "budget" | "cgroup" | "machine"
    needed_bytes: int
    free_bytes: int  # what could be admitted

    @property
    def missing_bytes(self) -> int:
        """Return how much must be freed first."""
        return self.needed_bytes - self.free_bytes


def shortfall(
    need_bytes: int, *, held_bytes: int, limits: Limits, headroom: Headroom
) -> Shortfall | None:
    """Return why `need_bytes` more cannot be had now, or None when they can.

    Parameters
    ----------
    need_bytes : int
        What is to be allocated.
    held_bytes : int
        What this store already holds of the budget: used, reserved, warm, lingering.
    limits : Limits
        The store's settings.
    headroom : Headroom
        The machine's word.
    """
    free = {"budget": limits.budget_bytes - held_bytes}
    if headroom.cgroup_limit_bytes != _NO_LIMIT:
        reserve_bytes = limits.reserve_bytes(headroom.cgroup_limit_bytes)
        free["cgroup"] = headroom.cgroup_free_bytes - reserve_bytes
    if headroom.available_bytes != _NO_LIMIT:
        reserve_bytes = limits.reserve_bytes(headroom.total_bytes)
        free["machine"] = headroom.available_bytes - reserve_bytes
    what = min(free, key=lambda name: free[name])
    if need_bytes <= free[what]:
        return None
    return Shortfall(what, need_bytes, max(0, free[what]))


def steps(nbytes: int, step_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut an allocation into (offset, length) steps."""
    for offset in range(0, nbytes, step_bytes):
        yield offset, min(step_bytes, nbytes - offset)
