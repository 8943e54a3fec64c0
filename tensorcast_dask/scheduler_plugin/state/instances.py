"""Instances, as their nodes tell of them.

Rules:

1. The node is the truth for what is attached to it; the catalog is the truth for who has a name.
   It mints a term for each life that it hears of. Of two lives under one name the later term
   counts, and the other's node is told to let it go. A node that tells again brings the term.
   News of what came earlier may come later, by a slow link: of two lives of one host it knows which
   began first, and of two nodes that tell of one life, which had it first.
2. An instance is listed while its node's lease runs. Nothing of it is kept on disk.
3. Load is the last that was pushed, with its age. It goes with its instance: nothing drifts.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tensorcast_dask.scheduler_plugin.state.events import InstanceFacts
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.operations import Caller
from tensorcast_dask.scheduler_plugin.state.records import NodeRecord
from tensorcast_dask.tensors.messages import (
    DoDetach,
    InstanceLoad,
    InstancePlace,
    InstanceRecord,
    InstancesAsked,
    InstanceSeen,
    InstancesHere,
    InstanceState,
)
from tensorcast_dask.tensors.messages import Instances as InstancesTold

__all__ = ["Instances"]


@dataclass(slots=True)
class _Listed:
    """One life of an instance."""

    node: NodeRecord
    record: InstanceRecord
    #: The last that was pushed, and when it was true.
    load: InstanceLoad | None = None
    load_s: float = 0.0


class Instances:
    """All instances of live nodes."""

    def __init__(self, ground: Ground) -> None:
        self._outbox = ground.outbox
        self._names = ground.names
        self._stories = ground.stories
        self._by_name: dict[str, _Listed] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    # ------------------------------------------------------------ what nodes tell
    def here(self, node: NodeRecord, message: InstancesHere) -> None:
        """Take what a node tells of its instances (rule 1)."""
        for attachment, why in message.gone.items():
            known = self._at(node, attachment)
            if known is not None:
                self._gone(known, why)
        told = {record.attachment for record in message.records}
        if message.whole:
            for known in self._of(node):
                if known.record.attachment not in told:
                    self._gone(known, "its node does not know it any more")
        for record in message.records:
            self._take(node, record)

    def _take(self, node: NodeRecord, record: InstanceRecord) -> None:
        known = self._by_name.get(record.name)
        same = known is not None and known.record.attachment == record.attachment
        term = record.term or (known.record.term if same and known is not None else 0)
        if known is not None and same and record.times < known.record.times:
            return
        if known is not None and not same:
            if _is_earlier(node, record, term, known):
                why = f"another process is instance {record.name!r} by now"
                detach = DoDetach(attachment=record.attachment, why=why)
                self._outbox.send(node.link, detach)
                return
            self._replace(known)
        if not term:
            term = self._names.numbers.mint()
        listed = _Listed(node, msgspec.structs.replace(record, term=term))
        if same and known is not None:
            listed.load, listed.load_s = known.load, known.load_s
        self._by_name[record.name] = listed
        if not record.term:
            seen = InstanceSeen(attachment=record.attachment, term=term)
            self._outbox.send(node.link, seen)
        self._note(listed, known if same else None)

    def _note(self, listed: _Listed, before: _Listed | None) -> None:
        record = listed.record
        if before is None:
            self._tell(listed, "attached, process {}", record.pid)
            self._emit("instance_attached", listed)
        elif record.poisoned and not before.record.poisoned:
            self._tell(listed, "poisoned: {}", record.poisoned)
            self._emit("instance_poisoned", listed)
        elif before.record.poisoned and not record.poisoned:
            self._tell(listed, "repaired")
            self._emit("instance_repaired", listed)

    def _replace(self, known: _Listed) -> None:
        why = f"another process is instance {known.record.name!r} by now"
        detach = DoDetach(attachment=known.record.attachment, why=why)
        self._outbox.send(known.node.link, detach)
        self._gone(known, why)

    def load(self, node: NodeRecord, message: InstanceLoad) -> None:
        """Keep what an instance pushed (rule 3)."""
        known = self._by_name.get(message.instance)
        if (
            known is None
            or known.node is not node
            or known.record.term != message.epoch
        ):
            return
        if known.load is None or known.load.number < message.number:
            known.load = message
            known.load_s = self._outbox.now_s - max(0.0, message.age_s)

    def node_gone(self, node: NodeRecord) -> None:
        """Strike what was attached to a node whose lease is over (rule 2)."""
        for known in self._of(node):
            self._gone(known, f"node {node.label} is gone")

    def _gone(self, known: _Listed, why: str) -> None:
        if self._by_name.get(known.record.name) is known:
            del self._by_name[known.record.name]
        self._tell(known, "gone: {}", why)
        self._emit("instance_gone", known)

    # ------------------------------------------------------------ questions
    def place(self, name: str) -> InstancePlace | None:
        """Say where an instance is attached."""
        listed = self._by_name.get(name)
        if listed is None:
            return None
        return InstancePlace(attachment=listed.record.attachment, card=listed.node.card)

    def asked(self, caller: Caller, _: InstancesAsked) -> None:
        """List them all."""
        states = tuple(
            self._state(self._by_name[name]) for name in sorted(self._by_name)
        )
        told = InstancesTold(instances=states)
        self._outbox.reply(caller.session, caller.rid, told)

    def _state(self, listed: _Listed) -> InstanceState:
        state = InstanceState(record=listed.record, card=listed.node.card)
        if listed.load is None:
            return state
        return msgspec.structs.replace(
            state,
            load=listed.load.values,
            load_age_s=self._outbox.now_s - listed.load_s,
            draining=listed.load.draining,
        )

    def facts(self) -> tuple[InstanceFacts, ...]:
        """Give them as rows."""
        return tuple(
            _facts(self._state(self._by_name[name])) for name in sorted(self._by_name)
        )

    # ------------------------------------------------------------ small parts
    def _of(self, node: NodeRecord) -> list[_Listed]:
        return [one for one in self._by_name.values() if one.node is node]

    def _at(self, node: NodeRecord, attachment: str) -> _Listed | None:
        return next(
            (one for one in self._of(node) if one.record.attachment == attachment), None
        )

    def _tell(self, listed: _Listed, form: str, *parts: str | float) -> None:
        subject = f"instance:{listed.record.name}"
        subjects = (subject, listed.node.node)
        names = (listed.record.name, listed.node.label)
        form = "instance {} at {} " + form
        self._stories.tell(self._outbox.now_s, subjects, form, *names, *parts)

    def _emit(self, topic: str, listed: _Listed) -> None:
        record = listed.record
        self._outbox.emit(
            topic,
            instance=record.name,
            attachment=record.attachment,
            node=listed.node.node,
            poisoned=record.poisoned,
        )


def _is_earlier(
    node: NodeRecord, record: InstanceRecord, term: int, known: _Listed
) -> bool:
    """Say whether a life that is told of came before the one that is listed (rule 1)."""
    if term:
        return term < known.record.term
    return node.host == known.node.host and record.since_s < known.record.since_s


def _facts(state: InstanceState) -> InstanceFacts:
    def text(value: object) -> str:
        return msgspec.json.encode(value, order="sorted").decode()

    record = state.record
    return InstanceFacts(
        name=record.name,
        node=state.card.node,
        node_name=state.card.name,
        attachment=record.attachment,
        term=record.term,
        pid=record.pid,
        functions=text(record.functions),
        engine=text(record.engine),
        labels=text(record.labels),
        holds=text(record.holds),
        poisoned=record.poisoned,
        draining=state.draining,
        load=text(state.load),
        load_age_s=state.load_age_s,
    )
