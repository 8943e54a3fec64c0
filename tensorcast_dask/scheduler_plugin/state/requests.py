"""What sessions ask: each request to the part that it concerns, each answered.

Rules:

1. A question is answered from memory and carried out again when it is asked again. A
   change is looked up by its request id first (`Outcomes`).
2. While the journal cannot write, changes are refused at once, but for those that need no
   word of it.
3. A refusal shows the state of a name, so it waits for the journal like any answer.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from tensorcast_dask.exceptions import (
    CatalogUnavailable,
    Mismatch,
    StaleOwner,
    TensorCastError,
    Unimplemented,
    Unknown,
)
from tensorcast_dask.scheduler_plugin.state.admission import Admission
from tensorcast_dask.scheduler_plugin.state.changes import Changes
from tensorcast_dask.scheduler_plugin.state.creations import Creations
from tensorcast_dask.scheduler_plugin.state.endings import Endings
from tensorcast_dask.scheduler_plugin.state.events import (
    Asked,
)
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.imports import Imports
from tensorcast_dask.scheduler_plugin.state.instances import Instances
from tensorcast_dask.scheduler_plugin.state.observed import Observed
from tensorcast_dask.scheduler_plugin.state.operations import Caller
from tensorcast_dask.scheduler_plugin.state.outcomes import Standing
from tensorcast_dask.scheduler_plugin.state.plans import Plans
from tensorcast_dask.scheduler_plugin.state.policies import Policies
from tensorcast_dask.scheduler_plugin.state.quotas import Quotas
from tensorcast_dask.scheduler_plugin.state.reads import Reads
from tensorcast_dask.scheduler_plugin.state.records import SessionRecord
from tensorcast_dask.scheduler_plugin.state.relocations import Relocations
from tensorcast_dask.scheduler_plugin.state.sessions import Sessions
from tensorcast_dask.tensors.messages import (
    AbortCreated,
    BeginStep,
    CancelAsked,
    CatalogStateAsked,
    CloseSession,
    CommitCreated,
    Create,
    Describe,
    Destroy,
    DrainNode,
    EndPlan,
    EndStep,
    Ensure,
    ExplainAsked,
    Fact,
    Fault,
    HistoryAsked,
    InstallPolicy,
    InstancesAsked,
    KeepCreating,
    ListArtifacts,
    LoadFile,
    Locate,
    Migrate,
    NodesAsked,
    OpenPlan,
    OpenSession,
    OperationAsked,
    Pin,
    PlanAsked,
    PoliciesAsked,
    PolicyStates,
    Publish,
    Query,
    RegisterView,
    Release,
    RemovePolicy,
    Resolve,
    ResumePlan,
    SaveFile,
    SessionRequest,
    SetAlias,
    SetQuota,
    SignalsAsked,
    StateJson,
    StepEffect,
    Unpin,
    decode,
)

#: Answered from memory, never recorded.
_QUESTIONS: Final = (
    Resolve,
    Locate,
    Describe,
    ListArtifacts,
    NodesAsked,
    InstancesAsked,
    ExplainAsked,
    Query,
    OperationAsked,
    CatalogStateAsked,
    CancelAsked,
    CloseSession,
    OpenSession,
    SignalsAsked,
    HistoryAsked,
    PoliciesAsked,
)
#: Of plans: repeats are told apart by key, run and step, not by request id.
_OF_PLANS: Final = (
    OpenPlan,
    PlanAsked,
    ResumePlan,
    EndPlan,
    BeginStep,
    StepEffect,
    EndStep,
)
#: Answered directly, without an operation of its own.
_DIRECT: Final = (*_QUESTIONS, *_OF_PLANS)
#: What no step can do: it is no change, or its session has to see to it.
_NO_EFFECTS: Final = (
    *_DIRECT,
    Create,
    CommitCreated,
    AbortCreated,
    KeepCreating,
)
#: Changes that need no word of the journal: they go on while it is away.
_LASTING_NOTHING: Final = (Ensure, AbortCreated, KeepCreating, SaveFile)


__all__ = ["Parts", "Requests"]


class Parts(Protocol):
    """Who carries requests out."""

    sessions: Sessions
    reads: Reads
    creations: Creations
    changes: Changes
    endings: Endings
    relocations: Relocations
    imports: Imports
    plans: Plans
    observed: Observed
    instances: Instances
    quotas: Quotas
    policies: Policies
    admission: Admission

    def debug_state(self) -> dict[str, Fact]:
        """Count everything that must be back at its baseline when idle."""


class Requests:
    """The talk with sessions."""

    def __init__(self, ground: Ground, parts: Parts) -> None:
        self._outbox = ground.outbox
        self._outcomes = ground.outcomes
        self._operations = ground.operations
        self._parts = parts

    def asked(self, event: Asked) -> None:
        """Answer a request, now or later."""
        request = event.request
        session = self._parts.sessions.get(event.session)
        if session is None or session.connection != event.connection:
            message = "this session is not open here; open it again"
            fault = Fault.of(StaleOwner(message))
            self._outbox.reply(event.session, request.rid, fault)
            return
        caller = Caller(event.session, request.rid, session.host)
        direct = isinstance(request, _DIRECT)
        try:
            if isinstance(request, _OF_PLANS):
                self._of_plans(caller, session, request)
            elif direct:
                self._question(caller, session, request)
            elif self._is_new(caller, request):
                self._change(caller, session, request)
        except TensorCastError as error:
            if direct:
                self._outbox.reply(caller.session, caller.rid, Fault.of(error))
            else:
                self._operations.refuse(caller, error, after=self._seen(request))

    def _seen(self, request: SessionRequest) -> int:
        """Find what a refusal shows: the state of the name that it speaks of."""
        match request:
            case Create() | LoadFile() | RegisterView() | Destroy():
                return self._outbox.pending(request.id)
            case SetAlias():
                return self._outbox.pending(request.name)
            case (
                Publish()
                | Ensure()
                | Migrate()
                | Release()
                | Pin()
                | SaveFile()
                | CommitCreated()
            ):
                return self._outbox.pending(request.generation)
            case _:
                return 0

    def _is_new(self, caller: Caller, request: SessionRequest) -> bool:
        """Whether a change has to be carried out; repeats are answered here.

        Raises
        ------
        CatalogUnavailable, Mismatch, Unknown
            When it is refused; the first answer stands.
        """
        digest = self._outcomes.digest_of(request)
        standing, value = self._outcomes.look(caller.session, caller.rid, digest)
        match standing:
            case Standing.NEW:
                stalled = self._outbox.stalled
                if stalled and not isinstance(request, _LASTING_NOTHING):
                    message = (
                        f"the journal cannot write ({stalled}), so nothing can be "
                        "changed; try again when it is back"
                    )
                    raise CatalogUnavailable(message)
                return True
            case Standing.ANSWERED:
                self._outbox.reply(
                    caller.session, caller.rid, value, after=self._outbox.firm
                )
            case Standing.RUNNING:
                pass
            case Standing.OTHER:
                message = f"request {caller.rid!r} was used for another call"
                self._outbox.reply(
                    caller.session, caller.rid, Fault.of(Mismatch(message))
                )
            case Standing.FORGOTTEN:
                message = (
                    f"request {caller.rid!r} was answered long ago; look at the state "
                    "before you ask for the change again"
                )
                self._outbox.reply(
                    caller.session, caller.rid, Fault.of(Unknown(message))
                )
        return False

    def _question(
        self, caller: Caller, session: SessionRecord, request: SessionRequest
    ) -> None:
        match request:
            case Resolve():
                self._parts.reads.resolve(caller, request)
            case Locate():
                self._parts.reads.locate(caller, request)
            case Describe():
                self._parts.reads.describe(caller, request)
            case ListArtifacts():
                self._parts.reads.list_artifacts(caller, request)
            case NodesAsked():
                self._parts.reads.nodes(caller, request)
            case Query():
                self._parts.reads.query(caller, request)
            case ExplainAsked():
                self._parts.reads.explain(caller, request)
            case _:
                self._of_session(caller, session, request)

    def _of_session(
        self, caller: Caller, session: SessionRecord, request: SessionRequest
    ) -> None:
        match request:
            case OperationAsked():
                self._parts.reads.operation(caller, request)
            case SignalsAsked():
                self._parts.observed.signals.asked(caller, request)
            case HistoryAsked():
                self._parts.observed.signals.history(caller, request)
            case InstancesAsked():
                self._parts.instances.asked(caller, request)
            case PoliciesAsked():
                states = PolicyStates(
                    policies=self._parts.policies.states(),
                    quotas=self._parts.quotas.states(),
                )
                after = self._outbox.firm
                self._outbox.reply(caller.session, caller.rid, states, after=after)
            case CancelAsked():
                known = self._parts.observed.signals.cancel(request.asked)
                if not known and not self._parts.plans.claims.cancel(request.asked):
                    self._operations.cancel(request.asked)
                self._outbox.reply(caller.session, caller.rid, None)
            case CatalogStateAsked():
                state = StateJson(json=msgspec.json.encode(self._parts.debug_state()))
                self._outbox.reply(caller.session, caller.rid, state)
            case CloseSession():
                self._outbox.reply(caller.session, caller.rid, None)
                self._parts.sessions.close(session)
            case _:
                message = "a session is opened once, by its first message"
                raise Mismatch(message)

    def _of_plans(
        self, caller: Caller, session: SessionRecord, request: SessionRequest
    ) -> None:
        plans = self._parts.plans
        match request:
            case BeginStep():
                plans.steps.begin(caller, request)
            case StepEffect():
                self._effect(caller, session, request)
            case EndStep():
                plans.steps.ended(caller, request)
            case OpenPlan():
                plans.open(caller, request)
            case PlanAsked():
                plans.asked(caller, request)
            case EndPlan():
                plans.end(caller, request)
            case ResumePlan():
                plans.resume(caller, request)
            case _:
                message = f"the catalog does not offer {type(request).__name__}"
                raise Unimplemented(message)

    def _effect(self, caller: Caller, session: SessionRecord, ask: StepEffect) -> None:
        """Carry out what a step asks for, in the name of its plan."""
        request: SessionRequest = decode(ask.request, SessionRequest)  # type: ignore[arg-type]  # a union, decoded as one
        if isinstance(request, _NO_EFFECTS):
            message = f"a step of a plan cannot ask for {type(request).__name__}"
            raise Unimplemented(message)
        own = self._parts.plans.steps.effect(caller, ask, request)
        if own is None:
            return
        try:
            self._change(own, session, request)
        except TensorCastError as error:
            self._operations.refuse(own, error, after=self._seen(request))

    def _change(
        self, caller: Caller, session: SessionRecord, request: SessionRequest
    ) -> None:
        match request:
            case Create():
                self._create(caller, session, request)
            case CommitCreated():
                self._parts.creations.commit(caller, request)
            case AbortCreated():
                self._parts.creations.abort(caller, request)
            case KeepCreating():
                self._parts.creations.keep(caller, request)
            case Publish():
                self._parts.changes.publish(caller, request)
            case Destroy():
                self._parts.endings.destroy(caller, request)
            case Release():
                self._parts.endings.release(caller, request)
            case _:
                self._other_change(caller, request)

    def _create(self, caller: Caller, session: SessionRecord, request: Create) -> None:
        self._parts.admission.create(
            caller,
            session,
            request,
            make=lambda ask: self._create_now(caller, session, ask),
            refuse=lambda error: self._operations.refuse(
                caller, error, after=self._seen(request)
            ),
        )

    def _create_now(
        self, caller: Caller, session: SessionRecord, request: Create
    ) -> None:
        generation = self._parts.creations.create(caller, session, request)
        if request.commit:
            commit = CommitCreated(
                rid=request.commit,
                generation=generation,
                deadline_s=request.commit_deadline_s,
            )
            self.asked(
                Asked(
                    session=session.session,
                    connection=session.connection,
                    request=commit,
                )
            )

    def _other_change(self, caller: Caller, request: SessionRequest) -> None:
        match request:
            case Ensure():
                self._parts.relocations.ensure(caller, request)
            case Migrate():
                self._parts.relocations.migrate(caller, request)
            case DrainNode():
                self._parts.relocations.drain(caller, request)
            case LoadFile():
                self._parts.admission.load(request)
                self._parts.imports.load(caller, request)
            case SaveFile():
                self._parts.imports.save(caller, request)
            case Pin():
                self._parts.changes.pin(caller, request)
            case Unpin():
                self._parts.changes.unpin(caller, request)
            case SetAlias():
                self._parts.changes.alias(caller, request)
            case RegisterView():
                self._parts.changes.view(caller, request)
            case _:
                self._of_policies(caller, request)

    def _of_policies(self, caller: Caller, request: SessionRequest) -> None:
        match request:
            case InstallPolicy():
                self._parts.policies.install(caller, request)
            case RemovePolicy():
                self._parts.policies.remove(caller, request)
            case SetQuota():
                state = self._parts.quotas.set(request)
                self._operations.give(caller, state, durable=True)
            case _:
                message = f"the catalog does not offer {type(request).__name__}"
                raise Unimplemented(message)
