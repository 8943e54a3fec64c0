"""Whether a new artifact is taken, and where it goes, where policies or quotas have a say.

Rules:

1. Quotas are checked before anything is allocated, and again after a policy was asked: others
   may have come meanwhile.
2. A policy's choice of a node that cannot take the bytes is no choice: the default decides.
3. What a process registers is its own memory: nobody admits or places it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from tensorcast_dask.exceptions import (
    AbsentError,
    CapacityError,
    QuotaExceeded,
    ReachError,
    StaleOwner,
    TensorCastError,
)
from tensorcast_dask.policies.views import Decided, Wanted
from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.operations import Caller
from tensorcast_dask.scheduler_plugin.state.policies import Policies
from tensorcast_dask.scheduler_plugin.state.quotas import Quotas
from tensorcast_dask.scheduler_plugin.state.records import SessionRecord
from tensorcast_dask.scheduler_plugin.state.sessions import Sessions
from tensorcast_dask.tensors.ids import NodeId
from tensorcast_dask.tensors.messages import Create, LoadFile, Owner

__all__ = ["Admission"]

Make: TypeAlias = Callable[[Create], None]
Refuse: TypeAlias = Callable[[TensorCastError], None]


class Admission:
    """The way from a `Create` to its making."""

    def __init__(
        self, ground: Ground, quotas: Quotas, policies: Policies, sessions: Sessions
    ) -> None:
        self._outbox = ground.outbox
        self._quotas = quotas
        self._policies = policies
        self._sessions = sessions

    def load(self, ask: LoadFile) -> None:
        """Check what can be known before a file is read: whether anything may come.

        Raises
        ------
        QuotaExceeded
            When not.
        """
        self._quotas.check(ask.id, ask.labels, 0)

    def create(
        self,
        caller: Caller,
        session: SessionRecord,
        ask: Create,
        *,
        make: Make,
        refuse: Refuse,
    ) -> None:
        """Have a creation decided on, then made; at once where nobody is to be asked.

        Raises
        ------
        TensorCastError
            When it is refused at once; later, `refuse` is told.
        """
        if ask.owner is Owner.CALLER:
            make(ask)
            return
        self._quotas.check(ask.id, ask.labels, ask.nbytes)
        wanted = Wanted(
            id=ask.id,
            nbytes=ask.nbytes,
            host=ask.host or caller.host,
            replicas=ask.replicas,
            labels=ask.labels,
        )

        def decided(answer: Decided) -> None:
            try:
                if self._sessions.get(caller.session) is not session:
                    message = "the session that asked is over"
                    raise StaleOwner(message)
                self._make_as_decided(ask, answer, make)
            except TensorCastError as error:
                refuse(error)

        placed = bool(ask.node)
        if not self._policies.admit_and_place(wanted, placed=placed, then=decided):
            make(ask)

    def _make_as_decided(self, ask: Create, answer: Decided, make: Make) -> None:
        if answer.refusal:
            message = f"{ask.id!r} is not admitted: {answer.refusal}"
            raise QuotaExceeded(message, {"nbytes": ask.nbytes})
        self._quotas.check(ask.id, ask.labels, ask.nbytes)
        if answer.node:
            try:
                make(msgspec.structs.replace(ask, node=NodeId(answer.node)))
            except (CapacityError, AbsentError, ReachError) as error:
                text = f"a policy chose node {answer.node!r}, which cannot: {error}"
                self._outbox.log("info", text)
            else:
                return
        make(ask)
