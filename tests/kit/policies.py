"""The processes of policies, at a desk: each is an object here, asked in the same turn."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import msgspec

from tensorcast_dask.policies import Policy, Role
from tensorcast_dask.scheduler_plugin.policy_process import checked
from tensorcast_dask.scheduler_plugin.state.events import (
    AskPolicy,
    AskSelf,
    Carried,
    EndPolicy,
    Instruction,
    PolicyBroke,
    PolicyDecided,
    PolicyLoaded,
    StartPolicy,
)
from tensorcast_dask.tensors import messages as m

if TYPE_CHECKING:
    from tests.kit.catalogs import Desk, Program

__all__ = ["FakeProcesses", "Given", "install"]


class Given:
    """A policy that decides what it was given, or raises it; counts how often it was asked."""

    def __init__(self, role: Role, *decisions: Any) -> None:
        self.role = role
        self.decisions = list(decisions)

    def decide(self, view: Any, wanted: Any = None) -> Any:
        decision = self.decisions.pop(0) if self.decisions else None
        if isinstance(decision, Exception):
            raise decision
        if callable(decision):
            return decision(view, wanted)
        empty: dict[Role, Any] = {
            Role.EVICT: {},
            Role.REPLICATE: (),
            Role.REBALANCE: (),
        }
        return empty.get(self.role) if decision is None else decision


class FakeProcesses:
    """What the shell does for the catalog.

    Attributes
    ----------
    stalled : bool
        Policies hear their questions and say nothing.
    """

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        desk.on_policy = self.carry_out
        self.policies: dict[int, Policy] = {}
        self.started: list[str] = []
        self.ended: list[int] = []
        self.views: list[AskPolicy] = []
        self.stalled = False
        self._scheduler = desk.program("scheduler")

    def carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case StartPolicy():
                self.desk.later(lambda: self._start(instruction))
            case AskPolicy():
                self.views.append(instruction)
                self.desk.later(lambda: self._ask(instruction))
            case EndPolicy(life=life):
                self.ended.append(life)
                self.policies.pop(life, None)
            case AskSelf():
                self.desk.later(lambda: self._ask_self(instruction))
            case _:
                pass

    def _start(self, what: StartPolicy) -> None:
        self.started.append(what.name)
        if self.stalled:
            return
        try:
            self.policies[what.life] = pickle.loads(what.blob)
        except Exception as error:  # noqa: BLE001 - whatever a pickle raises
            self.desk.tell(PolicyBroke(life=what.life, why=str(error)))
        else:
            self.desk.tell(PolicyLoaded(life=what.life))

    def _ask(self, what: AskPolicy) -> None:
        policy = self.policies.get(what.life)
        if policy is None or self.stalled:
            return
        try:
            decided = checked(policy.role, policy.decide(what.view, what.wanted))
        except Exception as error:  # noqa: BLE001 - whatever a policy raises
            self.desk.tell(PolicyBroke(life=what.life, why=f"it failed: {error}"))
        else:
            told = PolicyDecided(life=what.life, number=what.number, decided=decided)
            self.desk.tell(told)

    def _ask_self(self, what: AskSelf) -> None:
        scheduler = self._scheduler
        request = msgspec.structs.replace(what.request, rid=scheduler.rid())
        scheduler.ask(request)

        def look() -> None:
            if not scheduler.answered(request.rid):
                return
            answer = scheduler.answers[request.rid]
            error = answer.message if isinstance(answer, m.Fault) else ""
            self.desk.tell(Carried(number=what.number, error=error))

        self.desk.later(lambda: self.desk.later(look))


def install(
    program: Program, policy: object, name: str = "p", **more: float
) -> m.PolicyState:
    ask = m.InstallPolicy(
        rid=program.rid(),
        name=name,
        role=str(policy.role),  # type: ignore[attr-defined]
        blob=pickle.dumps(policy),
        **more,
    )
    return program.call(ask, m.PolicyState)
