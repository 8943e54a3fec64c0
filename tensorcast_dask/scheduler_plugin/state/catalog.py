"""The catalog: one state machine, so that every answer is linearizable.

It owns no rule of its own: it puts the parts together, hands each event to the part that
it concerns, and sees to it that every request is answered. Parts know the parts that they
were given, downwards only:

    catalog > requests | links > reads > explaining | admission > policies > policy_views > observed | quotas > signals > readings > bandwidths | loads | usage > plans > claims | effects > runs | changes > imports > relocations > endings > sessions > creations > spreads
            > moves > inventories | instances > tasks | leaving > replicas > holders | pins > nodes | names > numbers
            > operations > outcomes | stories | timers | outbox > records | events
"""

from __future__ import annotations

from typing import Final

from tensorcast_dask.scheduler_plugin.state.admission import Admission
from tensorcast_dask.scheduler_plugin.state.changes import Changes
from tensorcast_dask.scheduler_plugin.state.creations import Creations
from tensorcast_dask.scheduler_plugin.state.drivers import Drivers
from tensorcast_dask.scheduler_plugin.state.effects import EFFECTS
from tensorcast_dask.scheduler_plugin.state.endings import Endings
from tensorcast_dask.scheduler_plugin.state.events import (
    DOUBT_S,
    Asked,
    Carried,
    CatalogSettings,
    Event,
    Instruction,
    JournalBack,
    Journaled,
    JournalStalled,
    NodeJoined,
    NodeLinkLost,
    NodeRetired,
    NodeSaid,
    PlanDropped,
    PolicyBroke,
    PolicyDecided,
    PolicyLoaded,
    Recovered,
    SessionLost,
    SessionOpened,
    TimePassed,
    WorkerGone,
)
from tensorcast_dask.scheduler_plugin.state.explaining import Explaining
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.holders import Holders
from tensorcast_dask.scheduler_plugin.state.imports import Imports
from tensorcast_dask.scheduler_plugin.state.instances import Instances
from tensorcast_dask.scheduler_plugin.state.inventories import Inventories
from tensorcast_dask.scheduler_plugin.state.leaving import Leaving
from tensorcast_dask.scheduler_plugin.state.links import Links
from tensorcast_dask.scheduler_plugin.state.moves import Moves
from tensorcast_dask.scheduler_plugin.state.names import Names
from tensorcast_dask.scheduler_plugin.state.nodes import Nodes
from tensorcast_dask.scheduler_plugin.state.numbers import Numbers
from tensorcast_dask.scheduler_plugin.state.observed import Observed
from tensorcast_dask.scheduler_plugin.state.operations import Operations
from tensorcast_dask.scheduler_plugin.state.outbox import Outbox
from tensorcast_dask.scheduler_plugin.state.outcomes import Outcomes
from tensorcast_dask.scheduler_plugin.state.pins import Pins
from tensorcast_dask.scheduler_plugin.state.plans import Plans
from tensorcast_dask.scheduler_plugin.state.policies import Policies
from tensorcast_dask.scheduler_plugin.state.policy_views import PolicyViews
from tensorcast_dask.scheduler_plugin.state.quotas import Quotas
from tensorcast_dask.scheduler_plugin.state.reads import Reads
from tensorcast_dask.scheduler_plugin.state.records import NodeRecord
from tensorcast_dask.scheduler_plugin.state.recovery import recover
from tensorcast_dask.scheduler_plugin.state.relocations import Relocations
from tensorcast_dask.scheduler_plugin.state.replicas import Replicas
from tensorcast_dask.scheduler_plugin.state.requests import Requests
from tensorcast_dask.scheduler_plugin.state.sessions import Sessions
from tensorcast_dask.scheduler_plugin.state.spreads import Spreads
from tensorcast_dask.scheduler_plugin.state.stories import Stories
from tensorcast_dask.scheduler_plugin.state.tasks import Tasks
from tensorcast_dask.scheduler_plugin.state.timers import Timers
from tensorcast_dask.tensors.ids import ClusterId, Epoch
from tensorcast_dask.tensors.messages import (
    Fact,
    SessionOpen,
)

__all__ = ["NODE_KEPT_S", "Catalog"]


#: How long a node that is gone, and that nothing points to, is still known by name.
NODE_KEPT_S: Final = 3600.0


class Catalog:
    """All that is known of artifacts, versions, replicas, nodes and sessions.

    Parameters
    ----------
    settings : CatalogSettings
        Limits and secrets.
    recovered : Recovered
        What the journal found, with the epoch of this life.
    """

    def __init__(self, settings: CatalogSettings, recovered: Recovered) -> None:
        self.settings = settings
        self.cluster: ClusterId = recovered.cluster
        self.outbox = Outbox(seq=recovered.seq)
        self.timers = Timers()
        self.stories = Stories(lines=settings.story_lines)
        self.outcomes = Outcomes(per_session=settings.outcomes_per_session)
        self.names = Names(
            Numbers(
                epoch=recovered.epoch, issued=recovered.issued, begin=recovered.begin
            )
        )
        self.operations = Operations(
            self.outbox, self.timers, self.outcomes, keep=settings.finished_operations
        )
        self._build(settings, rebuilding=recovered.lost)
        self.said = recovered.said
        self._recovered: Recovered | None = recovered
        self._wake_s: float | None = None

    def _build(self, settings: CatalogSettings, *, rebuilding: bool) -> None:
        outbox, timers, names = self.outbox, self.timers, self.names
        self.nodes = Nodes(outbox, timers, lease_ttl_s=settings.lease_ttl_s)
        self.pins = Pins(
            outbox, timers, names, limit_fraction=settings.pin_limit_fraction
        )
        self.holders = Holders(outbox, self.nodes)
        self.replicas = Replicas(outbox, names, self.holders, self.pins)
        self.leaving = Leaving(self.replicas)
        self.tasks = Tasks(outbox, names, self.stories)
        ground = self._ground = Ground(
            outbox=outbox,
            timers=timers,
            stories=self.stories,
            outcomes=self.outcomes,
            names=names,
            nodes=self.nodes,
            holders=self.holders,
            pins=self.pins,
            replicas=self.replicas,
            leaving=self.leaving,
            tasks=self.tasks,
            operations=self.operations,
        )
        self.instances = Instances(ground)
        self.inventories = Inventories(ground, rebuilding=rebuilding)
        self.moves = Moves(ground)
        self.creations = Creations(ground, Spreads(ground, self.moves))
        self.sessions = Sessions(
            ground,
            self.creations,
            grace_s=settings.session_grace_s,
            recovery_s=settings.recovery_timeout_s,
            keep_s=settings.outcome_ttl_s,
        )
        self.endings = Endings(ground, self.inventories, self.moves, self.creations)
        self.relocations = Relocations(ground, self.moves, self.endings)
        self.imports = Imports(ground, self.creations)
        self.changes = Changes(
            ground, self.imports, deadline_s=settings.deadline_default_s
        )
        self.drivers = Drivers(ground, self.instances)
        self.plans = Plans(ground, self.drivers, ttl_s=settings.plan_result_ttl_s)
        self.observed = Observed(ground, self.plans, self.sessions)
        self.quotas = Quotas(outbox, names)
        self.policies = Policies(ground, PolicyViews(ground, self.observed))
        self.admission = Admission(ground, self.quotas, self.policies, self.sessions)
        self.observed.readings.more["quota/"] = self.quotas.readings
        self.observed.readings.more["policy/"] = self.policies.readings
        self.explaining = Explaining(
            ground,
            creations=self.creations,
            moves=self.moves,
            endings=self.endings,
            plans=self.plans,
        )
        usage = self.observed.usage
        self.reads = Reads(
            ground, self.creations, self.instances, usage, self.explaining
        )
        self.links = Links(
            ground,
            self.inventories,
            self.observed,
            self.instances,
            cluster=self.cluster,
        )
        self.requests = Requests(ground, self)
        self.nodes.on_lapse = self._lapsed
        self.pins.on_change = self.replicas.remark
        self.sessions.on_over = self.plans.claims.session_over
        self.inventories.on_announced = self.creations.announced
        self.inventories.on_withdrawn = self.creations.withdrawn
        self.inventories.on_complete = self.creations.claimed
        self.relocations.on_leave = self.creations.node_gone

    @property
    def epoch(self) -> Epoch:
        """The term of this catalog; goes up when a node has seen a higher one."""
        return self.names.numbers.epoch

    # ------------------------------------------------------------ events
    def handle(self, event: Event, *, now_s: float) -> list[Instruction]:
        """Absorb one event and say what must be done about it."""
        self.outbox.now_s = now_s
        if self._recovered is not None:
            self._begin(self._recovered)
        match event:
            case Asked():
                self.requests.asked(event)
            case NodeSaid():
                node = self.nodes.at_link(event.link)
                if node is not None:
                    self.links.said(node, event.message)
            case Journaled():
                self.outbox.stalled = ""
                self.outbox.durable_to(event.seq)
            case JournalBack():
                self.outbox.stalled = ""
            case PolicyLoaded() | PolicyDecided() | PolicyBroke() | Carried():
                self.policies.heard(event)
            case TimePassed():
                # The shell's alarm has rung, perhaps early: it is set anew in any case.
                self._wake_s = None
            case _:
                self._came_or_went(event)
        self.timers.run_due(now_s)
        return self.outbox.take(self._wake())

    def _came_or_went(
        self,
        event: SessionOpened
        | SessionLost
        | NodeJoined
        | NodeLinkLost
        | WorkerGone
        | NodeRetired
        | JournalStalled
        | PlanDropped,
    ) -> None:
        match event:
            case SessionOpened():
                self._opened(event)
            case SessionLost():
                self.observed.signals.session_lost(event.session)
                self.sessions.lost(event.session, event.connection)
            case NodeJoined():
                self.links.joined(event.link, event.hello)
                node = self.nodes.at_link(event.link)
                if node is not None:
                    self.relocations.came_back(node)
                    self.drivers.joined(node.node)
                    self.observed.joined(node)
            case NodeLinkLost():
                self.nodes.link_lost(event.link)
            case WorkerGone():
                self.nodes.worker_gone(event.address)
            case NodeRetired():
                self.relocations.retired(event.node, event.why)
            case PlanDropped():
                self.plans.dropped(event.key, event.run, event.why)
            case JournalStalled():
                self.outbox.stalled = event.why or "it cannot write"
                self.outbox.log("error", f"the journal cannot write: {event.why}")

    def _wake(self) -> float | None:
        next_s = self.timers.next_s()
        if next_s is None or next_s == self._wake_s:
            return None
        self._wake_s = next_s
        return next_s

    def _begin(self, recovered: Recovered) -> None:
        self._recovered = None
        said = recover(recovered.rows, self._ground, self)
        if said:
            self.said = "; ".join(filter(None, [self.said, *said[:20]]))
        for session in self.outcomes.sessions():
            if not session.startswith(EFFECTS):  # those go with their plans
                self.sessions.forget_later(session)
        for node in self.nodes.records.values():
            self._forget_later(node)
        if self.said:
            self.outbox.log("warning", f"recovery: {self.said}")
        if self.nodes.records:
            leased_s = self.settings.lease_ttl_s + DOUBT_S
            self.nodes.unheard_until_s = self.outbox.now_s + leased_s
        if self.names.versions:
            until_s = self.outbox.now_s + self.settings.recovery_timeout_s
            self.holders.awaited_until_s = until_s
            self.timers.at(until_s, self.replicas.recovery_over)
        self.outbox.emit(
            "recovered_all",
            versions=len(self.names.versions),
            epoch=self.epoch,
            said=self.said,
        )

    # ------------------------------------------------------------ sessions
    def _opened(self, event: SessionOpened) -> None:
        opening = event.opening
        self.sessions.open(event.connection, opening)
        settings = self.settings
        greeting = SessionOpen(
            cluster=self.cluster,
            epoch=self.epoch,
            token=settings.token,
            nodes=tuple(state.card for state in self.nodes.states()),
            chunk_bytes=settings.chunk_bytes,
            small_bytes=settings.small_bytes,
            deadline_default_s=settings.deadline_default_s,
            stall_s=settings.stall_s,
            tls=settings.tls,
            recovery=self.said,
        )
        self.outbox.reply(opening.session, opening.rid, greeting)

    # ------------------------------------------------------------ nodes
    def _lapsed(self, node: NodeRecord) -> None:
        self.creations.node_gone(node)
        self.instances.node_gone(node)
        self.replicas.suspect(node)
        self.tasks.lapsed(node)
        self.drivers.lapsed(node.node)
        self._forget_later(node)

    def _forget_later(self, node: NodeRecord) -> None:
        def forget() -> None:
            known = self.nodes.records.get(node.node) is node
            if known and not node.live and node.node not in self.replicas.by_node:
                self.nodes.forget(node)

        self.timers.at(self.outbox.now_s + NODE_KEPT_S, forget)

    # ------------------------------------------------------------ state
    def debug_state(self) -> dict[str, Fact]:
        """Count everything that must be back at its baseline when idle."""
        sessions, answers = self.outcomes.counts()
        return {
            "cluster": self.cluster,
            "epoch": self.epoch,
            "seq": self.outbox.seq,
            "durable": self.outbox.durable,
            "stalled": self.outbox.stalled,
            "held": self.outbox.waiting,
            "artifacts": len(self.names.artifacts),
            "versions": len(self.names.versions),
            "aliases": len(self.names.aliases),
            "views": len(self.names.views),
            "creations": len(self.creations),
            "replicas": sum(map(len, self.replicas.by_node.values())),
            "nodes": sum(node.live for node in self.nodes.records.values()),
            "nodes_known": len(self.nodes.records),
            "sessions": len(self.sessions),
            "pins": len(self.pins),
            "tasks": len(self.tasks),
            "moves": len(self.moves),
            "endings": len(self.endings),
            "leaving": len(self.leaving),
            "operations": len(self.operations),
            "instances": len(self.instances),
            "plans": len(self.plans),
            "plans_kept": self.plans.kept,
            "plans_waiting": self.plans.claims.waiting,
            "plan_claims": len(self.plans.claims),
            "watchers": len(self.observed.signals),
            "decisions": len(self.policies),
            "outcome_sessions": sessions,
            "outcomes": answers,
        }
