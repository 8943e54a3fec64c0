"""Instances that are attached to this node, and the calls that go to them.

Rules:

1. A name belongs to the life that attached last; the one before is told and let go. It does not
   come back: it may hear of that late, when it was busy, and would take the name from the other.
2. A call goes to one life and no other. When that life ends, a call that was handed to it ends
   as Unknown: it may have run. It is never handed to anybody else.
3. A caller whose time is over is told so, and the instance is told not to begin. What has
   begun goes on; its outcome is the instance's own to remember (`instance.state.calls`).
4. An instance that holds half of an update does only what can repair it.
5. Numbers that an instance pushes are told to the catalog at most once a `tick`.
6. Sessions of instances are carried to the catalog that is there now. What was said to an earlier
   one is not: it would arrive there before the session is opened, and is asked again after that.
   A session ends with its instance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from tensorcast_dask.exceptions import (
    DeadlineExceeded,
    NotFound,
    OwnerGone,
    Poisoned,
    StaleOwner,
    TensorCastError,
    Unimplemented,
    Unknown,
)
from tensorcast_dask.tensors.ids import SessionId, check_name
from tensorcast_dask.tensors.messages import (
    REPAIRS,
    Call,
    CallAnswered,
    CallDropped,
    CallEnded,
    CallInstance,
    Dial,
    Fault,
    FromNode,
    InstanceGone,
    InstanceLoad,
    InstanceRecord,
    InstancesHere,
    Load,
    Replaced,
    Seen,
    SessionIn,
    SessionOut,
    ToInstance,
)
from tensorcast_dask.tensors.traces import cause_of

__all__ = [
    "Answer",
    "Attachments",
    "HangUp",
    "Instruction",
    "Say",
    "Tell",
]


class _Value(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what is only a value."""


class Say(_Value, frozen=True, kw_only=True):
    """Say something to an instance."""

    attachment: str
    message: ToInstance


class HangUp(_Value, frozen=True, kw_only=True):
    """End the connection of an instance, after what was said to it."""

    attachment: str


class Answer(_Value, frozen=True, kw_only=True):
    """End the wait of a caller."""

    asker: int
    outcome: CallAnswered | Fault


class Tell(_Value, frozen=True, kw_only=True):
    """Tell the catalog."""

    message: FromNode


Instruction: TypeAlias = Say | HangUp | Answer | Tell


@dataclass(slots=True)
class _Life:
    """One life of an instance."""

    record: InstanceRecord
    #: Calls that were handed to it and have not ended: number -> asker, 0 where nobody waits.
    calls: dict[int, int] = field(default_factory=dict)
    load: Load | None = None
    #: When `load` was pushed, how many were before it, and whether the catalog has been told since.
    pushed_s: float = 0.0
    number: int = 0
    told: bool = True
    #: That are carried for it, in the order in which they were begun.
    sessions: dict[SessionId, None] = field(default_factory=dict)


class Attachments:
    """All instances of one node.

    Attributes
    ----------
    up : bool
        Whether the catalog listens.
    greeting : int
        How often it has greeted this node.
    """

    def __init__(self) -> None:
        self.up = False
        self.greeting = 0
        #: Lives that were let go (rule 1): a number and a sentence for each.
        self._let_go: dict[str, str] = {}
        self._lives: dict[str, _Life] = {}
        self._by_name: dict[str, str] = {}
        self._numbers = 0
        #: Who waits: asker -> (attachment, number).
        self._waiting: dict[int, tuple[str, int]] = {}

    def __len__(self) -> int:
        return len(self._lives)

    @property
    def waiting(self) -> int:
        """How many callers wait."""
        return len(self._waiting)

    def record(self, attachment: str) -> InstanceRecord | None:
        """Give what a life says of itself, while it is attached."""
        life = self._lives.get(attachment)
        return None if life is None else life.record

    # ------------------------------------------------------------ coming and going
    def attach(self, record: InstanceRecord) -> list[Instruction]:
        """Let a process in under its name (rule 1).

        Raises
        ------
        InvalidName, StaleOwner
            When the name is not legal, or it was let go; nothing has changed.
        """
        check_name(record.name, what="the name of an instance")
        check_name(record.attachment, what="an attachment")
        if record.attachment in self._let_go:
            raise StaleOwner(self._let_go[record.attachment])
        done: list[Instruction] = []
        before = self._by_name.get(record.name)
        if before is not None:
            why = f"another process is instance {record.name!r} by now"
            done += self.let_go(before, why)
        self._lives[record.attachment] = _Life(record)
        self._by_name[record.name] = record.attachment
        return [*done, Tell(message=InstancesHere(records=(record,)))]

    def let_go(self, attachment: str, why: str) -> list[Instruction]:
        """End an attachment from here, for good: the name is another's."""
        if attachment not in self._lives:
            return []
        self._let_go[attachment] = why
        said: list[Instruction] = [
            Say(attachment=attachment, message=Replaced(why=why)),
            HangUp(attachment=attachment),
        ]
        return [*said, *self.gone(attachment, why)]

    def gone(self, attachment: str, why: str) -> list[Instruction]:
        """Take the news that a life is over; what it was asked for is not known (rule 2)."""
        life = self._lives.pop(attachment, None)
        if life is None:
            return []
        if self._by_name.get(life.record.name) == attachment:
            del self._by_name[life.record.name]
        message = (
            f"instance {life.record.name!r} is gone ({why}) with the call under way; nobody "
            "knows how far it came: look at its effects before you call again"
        )
        fault = Fault.of(Unknown(message, {"instance": life.record.name}))
        done = [
            Answer(asker=asker, outcome=fault)
            for asker in life.calls.values()
            if self._waiting.pop(asker, None) is not None
        ]
        told: list[Instruction] = [
            Tell(message=InstancesHere(records=(), gone={attachment: why}))
        ]
        if life.record.term:
            ended = InstanceGone(instance=life.record.name, epoch=life.record.term)
            told.append(Tell(message=ended))
        over = (SessionIn(session=session, raw=b"") for session in life.sessions)
        return [*done, *told, *(Tell(message=message) for message in over)]

    def changed(self, attachment: str, record: InstanceRecord) -> list[Instruction]:
        """Take what a life says anew; its name, process, term and beginning are what they were."""
        life = self._lives.get(attachment)
        if life is None:
            return []
        known = life.record
        life.record = msgspec.structs.replace(
            record,
            name=known.name,
            attachment=attachment,
            term=known.term,
            since_s=known.since_s,
            pid=known.pid,
        )
        return [Tell(message=InstancesHere(records=(life.record,)))]

    # ------------------------------------------------------------ the catalog
    def all_here(self) -> InstancesHere:
        """Say all that is attached, for a catalog that was greeted anew."""
        self.up = True
        self.greeting += 1
        records = tuple(life.record for life in self._lives.values())
        for life in self._lives.values():
            life.told = life.load is None
            life.sessions.clear()
        return InstancesHere(records=records, whole=True)

    def greeted(self) -> list[Instruction]:
        """Tell everybody that the catalog listens anew; the news may be carried later."""
        return [self._seen(one, life) for one, life in self._lives.items()]

    def left(self) -> list[Instruction]:
        """Tell everybody that the catalog does not listen."""
        was, self.up = self.up, False
        away = Seen(up=False)
        return [Say(attachment=one, message=away) for one in self._lives if was]

    def _seen(self, attachment: str, life: _Life) -> Instruction:
        seen = Seen(term=life.record.term, greeting=self.greeting)
        return Say(attachment=attachment, message=seen)

    def seen(self, attachment: str, term: int) -> list[Instruction]:
        """Note the term of a life."""
        life = self._lives.get(attachment)
        if life is None:
            return []
        life.record = msgspec.structs.replace(life.record, term=term)
        return [self._seen(attachment, life)]

    def carried(self, attachment: str, message: SessionIn) -> list[Instruction]:
        """Carry what a life says in a session (rule 6)."""
        life = self._lives.get(attachment)
        if life is None or not self.up or message.greeting != self.greeting:
            return []
        life.sessions[message.session] = None
        return [Tell(message=message)]

    def answered(self, message: SessionOut) -> list[Instruction]:
        """Hand an answer of the catalog to whose session it is."""
        return [
            Say(attachment=attachment, message=message)
            for attachment, life in self._lives.items()
            if message.session in life.sessions
        ]

    def pushed(self, attachment: str, load: Load, *, now_s: float) -> None:
        """Take what an engine says of its load (rule 5)."""
        life = self._lives.get(attachment)
        if life is not None:
            life.load, life.pushed_s, life.told = load, now_s, False
            life.number += 1

    def tick(self, *, now_s: float) -> list[Instruction]:
        """Tell what was pushed since the last one."""
        done: list[Instruction] = []
        for life in self._lives.values():
            record, load = life.record, life.load
            if life.told or load is None or not record.term:
                continue
            told = InstanceLoad(
                instance=record.name,
                epoch=record.term,
                number=life.number,
                values=load.values,
                age_s=now_s - life.pushed_s,
                ttl_s=load.ttl_s,
                draining=load.draining,
                requests=load.requests,
                versions=record.holds,
            )
            done.append(Tell(message=told))
            life.told = True
        return done

    # ------------------------------------------------------------ calls
    def call(self, asker: int, ask: CallInstance) -> list[Instruction]:
        """Hand a call to its instance.

        Raises
        ------
        NotFound, OwnerGone, Poisoned, Unimplemented, DeadlineExceeded
            When it is not; nothing has begun.
        """
        attachment, life = self._life(ask)
        self._check(life.record, ask)
        self._numbers += 1
        number = self._numbers
        life.calls[number] = asker
        self._waiting[asker] = (attachment, number)
        call = Call(
            number=number,
            function=ask.function,
            args=ask.args,
            key=ask.key,
            deadline_s=ask.deadline_s,
            trace=cause_of(ask.rid),
        )
        return [Say(attachment=attachment, message=call)]

    def find(self, ask: CallInstance | Dial) -> str:
        """Give the life that is meant.

        Raises
        ------
        NotFound, OwnerGone
            When it is not here.
        """
        return self._life(ask)[0]

    def _life(self, ask: CallInstance | Dial) -> tuple[str, _Life]:
        attachment = self._by_name.get(ask.instance, "")
        data = {"instance": ask.instance}
        if ask.attachment and ask.attachment != attachment:
            message = (
                f"the process that was instance {ask.instance!r} is gone; nothing was asked of "
                "it now, and nothing is asked of its successor in its place: call that anew"
            )
            raise OwnerGone(message, data)
        if not attachment:
            message = (
                f"no instance {ask.instance!r} is attached to this node; ask for the "
                "instances again"
            )
            raise NotFound(message, data)
        return attachment, self._lives[attachment]

    @staticmethod
    def _check(record: InstanceRecord, ask: CallInstance) -> None:
        if ask.deadline_s <= 0:
            message = f"the time for {ask.function!r} was over before it was asked for"
            raise DeadlineExceeded(message)
        if record.poisoned and ask.function not in REPAIRS:
            message = (
                f"instance {record.name!r} holds half of an update ({record.poisoned}); give "
                "it all of its weights by transform_into, or start it anew"
            )
            raise Poisoned(message, {"instance": record.name})
        if ask.function not in record.functions and ask.function not in record.engine:
            known = ", ".join((*record.engine, *record.functions)) or "nothing"
            message = (
                f"instance {record.name!r} does not offer {ask.function!r}; it offers "
                f"{known}"
            )
            raise Unimplemented(message)

    def ended(self, attachment: str, message: CallEnded) -> list[Instruction]:
        """Take the outcome of a call."""
        life = self._lives.get(attachment)
        asker = 0 if life is None else life.calls.pop(message.number, 0)
        if self._waiting.pop(asker, None) is None:
            return []
        outcome = message.fault or CallAnswered(value=message.value)
        return [Answer(asker=asker, outcome=outcome)]

    def gave_up(self, asker: int) -> list[Instruction]:
        """Let a caller go whose time is over (rule 3)."""
        found = self._waiting.pop(asker, None)
        if found is None:
            return []
        attachment, number = found
        life = self._lives.get(attachment)
        if life is not None and number in life.calls:
            life.calls[number] = 0
        error: TensorCastError = DeadlineExceeded(
            "the instance did not answer in time; what it has begun goes on"
        )
        return [
            Answer(asker=asker, outcome=Fault.of(error)),
            Say(attachment=attachment, message=CallDropped(number=number)),
        ]
