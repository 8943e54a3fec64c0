"""Which store drives a run of a plan, and what it is told.

Rules:

1. A driver is a live store with the role `gateway` that has a worker and is not being drained; one
   of the caller's host before others, then the one that drives least, then by name. Where none is
   back yet after a restart of the scheduler, one that is expected.
2. All that it has to know stands in one order, with leave for the steps that come first. It is
   said again to a node that joins anew.
3. When a driver is gone another one follows, under another number of the run; where there is
   none the run is interrupted.
4. A run whose plan calls instances under a key that others may use is on disk before it is
   driven: what an instance does, no journal takes back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from tensorcast_dask.exceptions import NotFound, TensorCastError, Unimplemented
from tensorcast_dask.scheduler_plugin.state.events import DOUBT_S
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.instances import Instances
from tensorcast_dask.scheduler_plugin.state.plan_stories import Telling
from tensorcast_dask.scheduler_plugin.state.runs import Run, row_of
from tensorcast_dask.tensors.ids import HostId, NodeId
from tensorcast_dask.tensors.messages import (
    DoRun,
    InstancePlace,
    RunStatus,
    StepState,
)
from tensorcast_dask.tensors.plans import Kind, PlanSpec, Step
from tensorcast_dask.tensors.steps import needs_worker
from tensorcast_dask.tensors.traces import cause_of

__all__ = ["GATEWAY", "SUCCESSOR_S", "Drivers"]

#: How long a store is waited for where none is there to follow one that is gone.
SUCCESSOR_S: Final = 60.0
#: The role of nodes that drive.
GATEWAY: Final = "gateway"


class Drivers:
    """The stores that drive runs.

    Attributes
    ----------
    begin : callable
        Lets a step begin at a node, or says what it has come to.
    drop : callable
        Told of a run that nobody drives any more, and why.
    """

    begin: Callable[[Run, Step, str, str], StepState]
    drop: Callable[[str, int, str], None]

    def __init__(self, ground: Ground, instances: Instances) -> None:
        self._outbox = ground.outbox
        self._timers = ground.timers
        self._nodes = ground.nodes
        self._numbers = ground.names.numbers
        self._telling = Telling(ground)
        #: Runs that stores drive, by key.
        self._driven: dict[str, Run] = {}
        #: Those whose driver is gone and that have no other yet.
        self._waiting: dict[str, None] = {}
        self._instances = instances
        self._lease_s = ground.nodes.lease_ttl_s + DOUBT_S

    def choose(self, spec: PlanSpec, host: HostId) -> NodeId:
        """Choose one for who asks from a host (rule 1).

        Raises
        ------
        Unimplemented
            When a step takes a Dask worker.
        NotFound
            When there is none.
        """
        why = needs_worker(spec)
        if why:
            message = f"{why}: run the plan with executor='graph'"
            raise Unimplemented(message)
        stores = [
            node
            for node in self._nodes.records.values()
            if node.is_store and GATEWAY in node.card.roles and not node.draining
        ]
        able = [one for one in stores if one.live and one.link and one.attended]
        # After a restart of the scheduler: it is told when it is back.
        able = able or [one for one in stores if self._nodes.is_unheard(one)]
        if not able:
            message = (
                "no node with the role gateway is there to drive the plan; start one, or run "
                "the plan with executor='graph'"
            )
            raise NotFound(message)
        drives = Counter(run.driver for run in self._driven.values())
        best = min(
            able,
            key=lambda node: (
                node.host != host,
                drives[node.node],
                node.card.name,
                node.node,
            ),
        )
        return best.node

    def joined(self, node: NodeId) -> None:
        """Tell a node that has joined what it drives, and what waits for a driver (rule 2)."""
        for run in list(self._driven.values()):
            if run.driver == node:
                self.drive(run)
            elif run.key in self._waiting:
                self._hand_over(run)

    def lapsed(self, node: NodeId) -> None:
        """Have others drive what a node drove that is gone (rule 3)."""
        for run in list(self._driven.values()):
            if run.driver == node:
                self._hand_over(run)

    def look_for(self, run: Run) -> None:
        """Have another store drive a run whose own does not come back."""

        def look() -> None:
            record = self._nodes.records.get(run.driver)
            back = record is not None and record.live
            if not back:
                self._hand_over(run)

        if run.driver:
            self._driven[run.key] = run
            self._timers.at(self._outbox.now_s + self._lease_s, look)

    def drive(self, run: Run) -> None:
        """Tell the driver of a run all that it has to know (rules 2 and 4)."""
        self._driven[run.key] = run
        places = self._places(run)
        self._telling.note(run, "resolve: {} instances", len(places))
        left = len(run.steps) - len(run.outcomes)
        self._telling.note(run, "compile: {} steps", left)
        label = self._nodes.label(run.driver)
        self._telling.note(run, "dispatch: to node {}", label)
        begun: dict[str, StepState] = {}
        for step in run.spec.ordinary:
            if step.needs or step.kind is Kind.NOOP or step.name in run.outcomes:
                continue
            if run.concurrency and len(begun) >= run.concurrency:
                break
            place = places.get(step.instance)
            attachment = "" if place is None else place.attachment
            begun[step.name] = self.begin(run, step, run.driver, attachment)
        self._order(run, begun, places)
        if not self._nodes.records[run.driver].link:
            self.look_for(run)

    def over(self, run: Run) -> None:
        """Note that a run is over."""
        if self._driven.get(run.key) is run:
            del self._driven[run.key]
            self._waiting.pop(run.key, None)

    # ------------------------------------------------------------ small parts
    def _hand_over(self, run: Run, *, last: bool = False) -> None:
        """Have another store drive a run; where there is none, look once more after a while."""
        if self._driven.get(run.key) is not run:
            return
        if last and run.key not in self._waiting:
            return  # one came
        gone = self._nodes.label(run.driver)
        try:
            driver = self.choose(run.spec, HostId(""))
        except TensorCastError as error:
            if not last:
                self._waiting[run.key] = None
                at_s = self._outbox.now_s + SUCCESSOR_S
                self._timers.at(at_s, lambda: self._hand_over(run, last=True))
                return
            why = f"node {gone}, which drove it, is gone, and {error.message}"
            self.drop(run.key, run.run, why)
            return
        self._waiting.pop(run.key, None)
        run.run, run.driver = self._numbers.mint(), driver
        self._outbox.persist(row_of(run, now_s=self._outbox.now_s))
        self._telling.note(run, "node {}, which drove it, is gone", gone)
        self.drive(run)

    def _places(self, run: Run) -> dict[str, InstancePlace]:
        names = {step.instance for step in run.spec.steps if step.instance}
        found = {name: self._instances.place(name) for name in sorted(names)}
        return {name: place for name, place in found.items() if place is not None}

    def _order(
        self,
        run: Run,
        begun: dict[str, StepState],
        places: dict[str, InstancePlace],
    ) -> None:
        number, node = run.run, run.driver
        order = DoRun(
            key=run.key,
            run=number,
            spec=run.raw,
            left_s=max(0.0, run.until_s - self._outbox.now_s),
            concurrency=run.concurrency,
            outcomes=dict(run.outcomes),
            begun=begun,
            places=places,
            trace=cause_of(run.opener),
        )

        def send() -> None:
            ours = (number, node) == (run.run, run.driver)
            record = self._nodes.records.get(node)
            if record is not None and ours and run.status is RunStatus.RUNNING:
                self._outbox.send(record.link, order)

        calls = any(step.instance for step in run.spec.steps)
        after = self._outbox.here if calls and not run.own_key else 0
        self._outbox.hold(send, after=after)
