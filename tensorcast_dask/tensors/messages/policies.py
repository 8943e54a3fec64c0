"""What a session says of policies and quotas."""

from __future__ import annotations

from tensorcast_dask.tensors.ids import Generation, RequestId
from tensorcast_dask.tensors.messages.shared import Message, Wire

__all__ = [
    "DoWeigh",
    "InstallPolicy",
    "PoliciesAsked",
    "PolicyState",
    "PolicyStates",
    "QuotaState",
    "RemovePolicy",
    "SetQuota",
]


class InstallPolicy(Message, frozen=True, kw_only=True):
    """Let a policy decide from now on. Answer: `PolicyState`.

    Of evict, admit and place there is one: another takes its place. InvalidArgument when it
    cannot be loaded at the scheduler; then the one before goes on.
    """

    rid: RequestId
    name: str
    role: str
    #: The object, pickled; opaque to the catalog.
    blob: bytes
    #: How often it is asked, where nobody else asks it.
    every_s: float = 1.0
    #: How long one decision may take.
    limit_s: float = 0.25


class RemovePolicy(Message, frozen=True, kw_only=True):
    """Let a policy decide no more; the default takes over. Answer: nothing."""

    rid: RequestId
    name: str


class PolicyState(Wire, frozen=True, kw_only=True):
    """How a policy stands."""

    name: str
    role: str
    #: starting, running, or aside: it raised or stalled, and the default has taken over.
    status: str
    why: str = ""
    decisions: int = 0
    every_s: float = 0.0
    limit_s: float = 0.0


class SetQuota(Message, frozen=True, kw_only=True):
    """Bound what artifacts take together. Answer: `QuotaState`.

    Of those whose id begins with `prefix` and, where `tenant` is given, whose label `tenant` is
    that. A limit of -1 is none; both -1 take the quota away.
    """

    rid: RequestId
    name: str
    prefix: str = ""
    tenant: str = ""
    nbytes: int = -1
    artifacts: int = -1


class QuotaState(Wire, frozen=True, kw_only=True):
    """A quota, and what is used of it."""

    name: str
    prefix: str
    tenant: str
    nbytes: int
    artifacts: int
    used_bytes: int = 0
    used_artifacts: int = 0


class PoliciesAsked(Message, frozen=True, kw_only=True):
    """Answer: `PolicyStates`."""

    rid: RequestId


class PolicyStates(Wire, frozen=True, kw_only=True):
    """All of them."""

    policies: tuple[PolicyState, ...]
    quotas: tuple[QuotaState, ...]


class DoWeigh(Message, frozen=True, kw_only=True):
    """What replicas are worth to keep, whole each time: what is not in it weighs nothing."""

    weights: dict[Generation, float]
