"""Algorithm 1 of the TensorCast paper: move one request from the fullest to the emptiest instance.

At each tick::

    L_i   = alpha * Load(i) + (1 - alpha) * L_i
    src   = argmax L,  dst = argmin L over the others
    gap   = L_src - L_dst,  ratio = L_src / max(L_dst, 1)
    unless gap >= theta_abs and ratio >= theta_rel: nothing
    among the requests of src that are neither running nor migrating, the one with the greatest
        tokens * exp(-(now - last_active) / H) * 1 / (1 + lambda * migrations)
    moves to dst

What the paper leaves open is settled so:

1. *Unit of load*: the pushed number called `load` (default `queue`, requests that wait and run).
   `theta_abs` is in that unit, and `max(L_dst, 1)` takes it that one of it is little.
2. *Cold start*: `L_i` begins with the first load that is seen, not with 0; an instance that
   attached anew (another epoch) begins anew, and one that is away is forgotten.
3. *Stale signals*: an instance whose push is overdue, or lacks the number, is neither source nor
   target, and its `L_i` stays as it is: nobody moves anything on yesterday's news.
4. *Draining* instances take nothing, and may give.
5. *Fewer than two* that may take part: nothing.
6. *Ties*: the instance, or request, whose name sorts first.
7. *Moves*: at most one a tick, as in the paper. A request that was chosen is not chosen again for
   `settle_s`: the loads and the list that say so come a push later.
8. *When it is carried out* things may be otherwise: `still_holds` asks again, and whoever
   carries the move out does so first.
"""

from __future__ import annotations

from math import exp
from typing import ClassVar

from tensorcast_dask.policies.views import (
    InstanceView,
    MoveRequest,
    RequestView,
    Role,
    View,
    Wanted,
)

__all__ = ["Rebalance"]


class Rebalance:
    """Algorithm 1.

    Parameters
    ----------
    alpha : float
        How much of a new load counts; 1 for no smoothing.
    theta_abs : float
        Least difference of load that is worth a move.
    theta_rel : float
        Least ratio of load that is worth a move.
    horizon_s : float
        `H`: a request that was idle for so long counts 1/e.
    damping : float
        `lambda`: how much less each earlier move of a request makes it worth.
    load : str
        Which pushed number is the load.
    settle_s : float
        For how long a chosen request is left alone.
    """

    role: ClassVar[Role] = Role.REBALANCE

    def __init__(
        self,
        *,
        alpha: float = 0.5,
        theta_abs: float = 4.0,
        theta_rel: float = 1.5,
        horizon_s: float = 60.0,
        damping: float = 1.0,
        load: str = "queue",
        settle_s: float = 5.0,
    ) -> None:
        self.alpha = alpha
        self.theta_abs = theta_abs
        self.theta_rel = theta_rel
        self.horizon_s = horizon_s
        self.damping = damping
        self.load = load
        self.settle_s = settle_s
        #: L_i, with the epoch that it is of.
        self._smooth: dict[str, tuple[int, float]] = {}
        self._chosen: dict[str, float] = {}

    def decide(self, view: View, wanted: Wanted | None = None) -> list[MoveRequest]:  # noqa: ARG002
        """Take one tick: a move, or none."""
        there = {one.instance: one for one in view.instances}
        self._smooth = {n: one for n, one in self._smooth.items() if n in there}
        self._chosen = {n: at for n, at in self._chosen.items() if at > view.now_s}
        able = sorted(
            (one for one in view.instances if self._counts(one)),
            key=lambda one: one.instance,
        )
        for one in able:
            self._take(one)
        takers = [one for one in able if not one.draining]
        if len(able) < 2 or not takers:
            return []
        source = max(able, key=self.smoothed)
        others = [one for one in takers if one is not source]
        if not others:
            return []
        target = min(others, key=self.smoothed)
        full, empty = self.smoothed(source), self.smoothed(target)
        gap, ratio = full - empty, full / max(empty, 1.0)
        if gap < self.theta_abs or ratio < self.theta_rel:
            return []
        request = self._best(source, view.now_s)
        if request is None:
            return []
        self._chosen[request.request] = view.now_s + self.settle_s
        return [
            MoveRequest(
                request=request.request,
                source=source.instance,
                target=target.instance,
                source_epoch=source.epoch,
                target_epoch=target.epoch,
                why=f"load {full:.3g} against {empty:.3g}",
            )
        ]

    def _counts(self, instance: InstanceView) -> bool:
        return instance.fresh and self.load in instance.values

    def _take(self, instance: InstanceView) -> None:
        value = instance.values[self.load]
        epoch, before = self._smooth.get(instance.instance, (instance.epoch, value))
        if epoch != instance.epoch:
            before = value
        smooth = self.alpha * value + (1.0 - self.alpha) * before
        self._smooth[instance.instance] = (instance.epoch, smooth)

    def smoothed(self, instance: InstanceView) -> float:
        """Give the `L_i` of an instance that was seen."""
        return self._smooth[instance.instance][1]

    def score(self, request: RequestView, now_s: float) -> float:
        """Say how much a request is worth moving."""
        idle_s = max(0.0, now_s - request.last_active_s)
        again = 1.0 / (1.0 + self.damping * request.migrations)
        return request.tokens * exp(-idle_s / self.horizon_s) * again

    def _best(self, source: InstanceView, now_s: float) -> RequestView | None:
        able = [
            one
            for one in source.requests
            if not one.running and not one.migrating and one.request not in self._chosen
        ]
        able.sort(key=lambda one: one.request)
        return max(able, key=lambda one: self.score(one, now_s), default=None)

    @staticmethod
    def still_holds(view: View, move: MoveRequest) -> bool:
        """Whether a move that was decided may be carried out in what is so now."""
        there = {one.instance: one for one in view.instances}
        source, target = there.get(move.source), there.get(move.target)
        if source is None or target is None:
            return False
        if not (source.fresh and target.fresh) or target.draining:
            return False
        if (source.epoch, target.epoch) != (move.source_epoch, move.target_epoch):
            return False
        return any(
            one.request == move.request and not one.running and not one.migrating
            for one in source.requests
        )
