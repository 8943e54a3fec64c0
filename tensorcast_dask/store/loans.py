"""What one instance lends, as its store serves it.

Rules:

1. An instance that lends is a node of its own in the catalog. Its link is kept by the store, so that
   no code of the engine can hold its lease up.
2. Bytes that the store cannot read are asked of the instance, over its connection.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from tensorcast_dask.dataplane.hosts import process_start
from tensorcast_dask.dataplane.lending import Lending
from tensorcast_dask.exceptions import (
    CatalogUnavailable,
    OwnerGone,
    PeerLost,
    TensorCastError,
)
from tensorcast_dask.store.device_copies import gathered
from tensorcast_dask.store.lent import RemoteMemory
from tensorcast_dask.tensors.ids import Generation, Incarnation, NodeId
from tensorcast_dask.tensors.messages import (
    BeginLending,
    Lend,
    LendEnded,
    Mutating,
    PartAsked,
    Unlend,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensorcast_dask.dataplane.framing import Payload
    from tensorcast_dask.dataplane.hosts import PidWatch
    from tensorcast_dask.store.core import Core
    from tensorcast_dask.store.devices import Devices
    from tensorcast_dask.store.identity import Identity
    from tensorcast_dask.tensors.messages import InstanceRecord, Part, ToInstance

__all__ = ["Loans"]

#: How long the catalog may take to greet a process that lends.
_GREETED_S: Final = 10.0
#: How long an instance may take to give bytes that the store cannot read.
_PART_S: Final = 10.0


@dataclass(slots=True, eq=False)
class _Wanted:
    """Bytes that the instance was asked for."""

    room: memoryview
    done: threading.Event = field(default_factory=threading.Event)
    error: TensorCastError | None = None


class Loans:
    """The memory that one instance lends.

    Parameters
    ----------
    attachment : str
        Its life, which is its name as a node.
    watch : PidWatch
        Its process.
    core, identity, devices : Core, Identity, Devices
        This store.
    say, say_later : callable
        Say something to it: now, or from a thread that must not wait for it.
    """

    def __init__(
        self,
        attachment: str,
        watch: PidWatch,
        *,
        core: Core,
        identity: Identity,
        devices: Devices,
        say: Callable[[ToInstance], None],
        say_later: Callable[[ToInstance], None],
    ) -> None:
        self._node = NodeId(attachment)
        self._watch = watch
        self._core = core
        self._identity = identity
        self._devices = devices
        self._say = say
        self._say_later = say_later
        self._numbers = itertools.count(1)
        self._wanted: dict[int, _Wanted] = {}
        self.lending: Lending | None = None
        #: Guards that nothing is begun for an instance that is gone.
        self._beginning = threading.Lock()
        self._closed = ""

    def take(
        self,
        request: BeginLending | Lend | Mutating | Unlend,
        record: InstanceRecord,
    ) -> None:
        """Take the instance's word.

        Raises
        ------
        CatalogUnavailable
            When it cannot be made a node now.
        """
        match request:
            case BeginLending():
                if not self._begin(record).wait_up(_GREETED_S):
                    message = "the catalog did not take this process as a node in time; register again"
                    raise CatalogUnavailable(message)
            case Lend():
                gather = partial(gathered, self._devices)
                lent = RemoteMemory(request, self._watch, self._ask, gather)
                self._begin(record).lend(lent)
            case Mutating() if self.lending is not None:
                known = self.lending.find(request.generation)
                if isinstance(known, RemoteMemory):
                    known.mutating(request.stamp)
            case Unlend() if self.lending is not None:
                self.lending.forget(request.generation)
            case _:
                pass  # it lends nothing

    def _begin(self, record: InstanceRecord) -> Lending:
        with self._beginning:
            if self._closed:
                message = f"the instance is gone: {self._closed}"
                raise OwnerGone(message)
            if self.lending is None:
                self.lending = self._made(record)
            return self.lending

    def _made(self, record: InstanceRecord) -> Lending:
        target, own = self._identity.link, self._identity.card
        if target is None:
            message = "this node has no catalog yet; register again in a moment"
            raise CatalogUnavailable(message)
        card = msgspec.structs.replace(
            own,
            node=self._node,
            incarnation=Incarnation(1),
            name=record.name,
            worker="",
            pid=record.pid,
            pid_start=process_start(record.pid),
            roles=(),
            labels=record.labels,
            kind="instance",
            ucx=(),
            instances=0,
        )
        return Lending(
            card,
            target,
            chunk_bytes=self._core.settings.chunk_bytes,
            on_end=lambda generation, why: self._say_later(
                LendEnded(generation=generation, why=why)
            ),
        )

    def aim(self) -> None:
        """Link to the catalog that the store has now."""
        if self.lending is not None and self._identity.link is not None:
            self.lending.aim(self._identity.link)

    def close(self, why: str) -> None:
        """End it all: the process is gone, or let go."""
        with self._beginning:
            self._closed = why
        for wanted in list(self._wanted.values()):
            wanted.error = OwnerGone(f"the instance that lent it is gone: {why}")
            wanted.done.set()
        if self.lending is not None:
            self.lending.close(f"the process that lent it is gone: {why}")

    # -------------------------------------------------------------- bytes
    def _ask(self, generation: int, start: int, room: memoryview) -> None:
        number, wanted = next(self._numbers), _Wanted(room)
        self._wanted[number] = wanted
        asked = PartAsked(
            number=number,
            generation=Generation(generation),
            offset=start,
            nbytes=len(room),
        )
        try:
            self._say(asked)
            if not wanted.done.wait(_PART_S):
                message = "the process that lent the memory does not give it in time"
                raise PeerLost(message, {"stalled": True})
        finally:
            del self._wanted[number]
        if wanted.error is not None:
            raise wanted.error

    def part_came(self, message: Part, payload: Payload) -> None:
        """Take bytes that were asked for."""
        wanted = self._wanted.get(message.number)
        if wanted is None:
            return  # nobody waits any more; the server skips the payload
        if message.fault is not None:
            wanted.error = message.fault.error()
        elif payload.nbytes == len(wanted.room):
            payload.read_into(wanted.room)
        else:
            wanted.error = PeerLost("the process that lent the memory gave too little")
        wanted.done.set()
