"""Plans that would undo each other's work on an artifact run one after the other.

Rules:

1. A plan *takes* an artifact when a step of it destroys, migrates, releases or unpins it (not the
   pin of an earlier step of its own). It *keeps* it when a step prefetches, replicates, migrates, pins,
   publishes, loads or copies it into being. What one plan takes, no other keeps at the same time.
2. A plan has all its claims before it begins, or waits and has none: so no two wait for each
   other. Whoever came first goes first; who has nothing to do with those that wait passes them.
3. It waits at most until its own deadline, and for as long as its caller does. Claims end with the
   run, however that ends.
4. An artifact that only a running step can name is claimed when it is asked for, and that never
   waits: the step is refused while another plan's claim is in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from tensorcast_dask.exceptions import DeadlineExceeded, Mismatch, TensorCastError
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.names import Names
from tensorcast_dask.scheduler_plugin.state.operations import Caller
from tensorcast_dask.scheduler_plugin.state.records import VersionRecord
from tensorcast_dask.scheduler_plugin.state.timers import Timer
from tensorcast_dask.tensors.ids import ArtifactId, RequestId, SessionId
from tensorcast_dask.tensors.messages import Fault
from tensorcast_dask.tensors.plans import ArtifactRef, Kind, NameRef, Step, StepRef

__all__ = ["Claims", "Work", "Works", "work_of", "works_of"]

_TAKES: Final = frozenset({Kind.DESTROY, Kind.MIGRATE, Kind.RELEASE, Kind.UNPIN})
_KEEPS: Final = frozenset(
    {
        Kind.PREFETCH,
        Kind.REPLICATE,
        Kind.MIGRATE,
        Kind.PIN,
        Kind.PUBLISH,
        Kind.LOAD,
        Kind.COPY,
    }
)
#: Steps that give what they act on.
_HAND_ON: Final = frozenset(
    {
        Kind.PREFETCH,
        Kind.REPLICATE,
        Kind.MIGRATE,
        Kind.RELEASE,
        Kind.SAVE,
        Kind.VIEW,
        Kind.NOOP,
    }
)
#: Every version of an id.
_ALL: Final = 0


class Work(NamedTuple):
    """What a plan does to the versions of one id: generations, `_ALL` among them for every one."""

    taken: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()

    def undoes(self, other: Work) -> bool:
        """Say whether either of two would undo what the other does."""
        return _meet(self.taken, other.kept) or _meet(self.kept, other.taken)

    def and_also(self, other: Work) -> Work:
        """Put two together."""
        return Work(self.taken | other.taken, self.kept | other.kept)


#: By id.
Works: TypeAlias = dict[ArtifactId, Work]


def _meet(some: frozenset[int], others: frozenset[int]) -> bool:
    if _ALL in some or _ALL in others:
        return bool(some and others)
    return not some.isdisjoint(others)


# -------------------------------------------------------------------- what a plan does
def works_of(steps: Iterable[Step], names: Names) -> tuple[Works, frozenset[str]]:
    """Say what a plan does, as its artifacts are called now, and which steps do not say.

    Returns
    -------
    works : dict
    unsaid : frozenset of str
        Steps whose artifact is known only when they run.
    """
    works: Works = {}
    unsaid = set()
    made: dict[str, tuple[ArtifactId, int] | None] = {}
    for step in steps:
        on = _acts_on(step, made, names)
        made[step.name] = _gives(step, on)
        work = work_of(step, _ALL if on is None else on[1])
        if work is None:
            continue
        if on is None:
            unsaid.add(step.name)
        else:
            works[on[0]] = works.get(on[0], Work()).and_also(work)
    return works, frozenset(unsaid)


def work_of(step: Step, generation: int) -> Work | None:
    """Say what a step does to one version; None where that undoes and can be undone by nothing."""
    own = step.kind is Kind.UNPIN and "pinned" in step.options
    one = frozenset({generation})
    taken = one if step.kind in _TAKES and not own else frozenset[int]()
    kept = one if step.kind in _KEEPS else frozenset[int]()
    return Work(taken, kept) if taken or kept else None


def _acts_on(
    step: Step, made: Mapping[str, tuple[ArtifactId, int] | None], names: Names
) -> tuple[ArtifactId, int] | None:
    if step.kind in {Kind.LOAD, Kind.COPY}:
        return ArtifactId(str(step.options["id"])), _ALL
    match step.target:
        case ArtifactRef() as ref:
            return ref.base or ref.id, ref.generation
        case NameRef(id=name):
            return _meant(ArtifactId(name), names), _ALL
        case StepRef(step=earlier):
            return made.get(earlier)
        case None:
            return None


def _gives(
    step: Step, on: tuple[ArtifactId, int] | None
) -> tuple[ArtifactId, int] | None:
    if on is None or step.kind in _HAND_ON:
        return on
    if step.kind in {Kind.LOAD, Kind.COPY, Kind.LATEST, Kind.PUBLISH}:
        return on[0], _ALL  # another version of the same id, perhaps
    return None


def _meant(name: ArtifactId, names: Names) -> ArtifactId:
    """Give the id that a name, alias or view of now stands for."""
    alias = names.aliases.get(name)
    if alias is not None:
        name = alias.target_id
    view = names.views.get(name)
    base = None if view is None else names.versions.get(view.base)
    return name if base is None else base.id


# -------------------------------------------------------------------- who has what
@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting:
    """A plan that waits for its turn."""

    key: str
    works: Works
    caller: Caller
    begin: Callable[[], None]
    #: For what.
    said: str
    timer: Timer


class Claims:
    """Claims of runs under way, and the plans that wait for them."""

    def __init__(self, ground: Ground) -> None:
        self._outbox = ground.outbox
        self._timers = ground.timers
        self._stories = ground.stories
        self._held: dict[ArtifactId, dict[str, Work]] = {}
        #: First come, first served.
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        return len({key for held in self._held.values() for key in held})

    @property
    def waiting(self) -> int:
        """How many plans wait."""
        return len(self._waiting)

    def in_the_way(self, key: str, works: Works) -> tuple[str, ArtifactId] | None:
        """Give a plan that works against this one now, and on what."""
        for name, work in works.items():
            for other, held in self._held.get(name, {}).items():
                if other != key and work.undoes(held):
                    return other, name
        return None

    def take(self, key: str, works: Works) -> None:
        """Claim, where nothing was in the way."""
        for name, work in works.items():
            held = self._held.setdefault(name, {})
            held[key] = held.get(key, Work()).and_also(work)

    def take_late(self, key: str, step: Step, record: VersionRecord | None) -> None:
        """Claim what a running step has turned out to act on (rule 4).

        Raises
        ------
        Mismatch
            When another plan works against it.
        """
        work = None if record is None else work_of(step, record.generation)
        if record is None or work is None:
            return
        works = {record.id: work}
        found = self.in_the_way(key, works)
        if found is not None:
            message = (
                f"step {step.name!r} would undo what plan {found[0]!r} does to {found[1]!r}; "
                "run it when that plan is over"
            )
            raise Mismatch(message, {"plan": found[0]})
        self.take(key, works)

    def release(self, key: str) -> None:
        """Give back what a run had, and let begin who may now."""
        for name in [one for one, held in self._held.items() if key in held]:
            del self._held[name][key]
            if not self._held[name]:
                del self._held[name]
        self._go_on()

    # ------------------------------------------------------------ waiting
    def wait(
        self,
        key: str,
        works: Works,
        caller: Caller,
        begin: Callable[[], None],
        *,
        until_s: float,
    ) -> bool:
        """Say whether a plan has to wait; if so `begin` is called when it need not any more.

        A caller who waits too long is answered DeadlineExceeded.
        """
        found = self._before(key, works, self._waiting)
        if found is None:
            return False
        other, name = found
        message = (
            f"plan {key!r} waits for plan {other!r}, which also works on {name!r}: one would undo "
            "what the other does"
        )
        self._stories.tell(self._outbox.now_s, (f"plan:{key}",), "wait: {}", message)

        def late() -> None:
            self._waiting.remove(mine)
            hint = "; give it more with ddl=, or run it later"
            fault = Fault.of(DeadlineExceeded(message + hint, {"plan": other}))
            self._outbox.reply(caller.session, caller.rid, fault)
            self._go_on()

        mine = _Waiting(
            key=key,
            works=works,
            caller=caller,
            begin=begin,
            said=message,
            timer=self._timers.at(until_s, late),
        )
        self._waiting.append(mine)
        return True

    def waits(self, key: str) -> str:
        """Say for what the plan of a key waits; "" when it does not."""
        return next((one.said for one in self._waiting if one.key == key), "")

    def give_up(self, key: str, why: Fault) -> None:
        """Have whoever runs the plan of a key wait for its turn no longer."""
        self._leave([one for one in self._waiting if one.key == key], why)

    def session_over(self, session: SessionId) -> None:
        """Let no plan begin whose caller is gone (rule 3)."""
        self._leave([one for one in self._waiting if one.caller.session == session])

    def cancel(self, rid: RequestId) -> bool:
        """Have a caller wait no longer; False where it does not wait."""
        left = [one for one in self._waiting if one.caller.rid == rid]
        why = Fault.of(DeadlineExceeded("cancelled", {"cancelled": True}))
        self._leave(left, why)
        return bool(left)

    def _leave(self, left: list[_Waiting], why: Fault | None = None) -> None:
        for one in left:
            self._waiting.remove(one)
            one.timer.cancel()
            if why is not None:
                self._outbox.reply(one.caller.session, one.caller.rid, why)
        self._go_on()

    def _before(
        self, key: str, works: Works, waiting: Iterable[_Waiting]
    ) -> tuple[str, ArtifactId] | None:
        """Give who goes before a plan: one that runs, or one that waits longer."""
        found = self.in_the_way(key, works)
        if found is not None:
            return found
        for one in waiting:
            for name in works.keys() & one.works.keys() if one.key != key else ():
                if works[name].undoes(one.works[name]):
                    return one.key, name
        return None

    def _go_on(self) -> None:
        """Let begin, in their order, all that need not wait any more."""
        at = 0
        while at < len(self._waiting):
            one = self._waiting[at]
            if self._before(one.key, one.works, self._waiting[:at]) is not None:
                at += 1
                continue
            del self._waiting[at]
            one.timer.cancel()
            try:
                one.begin()
            except TensorCastError as error:
                fault = Fault.of(error)
                self._outbox.reply(one.caller.session, one.caller.rid, fault)
