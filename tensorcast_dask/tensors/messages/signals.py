"""What is said of signals: by nodes for their instances, by sessions that read them."""

from __future__ import annotations

from typing import Final

from tensorcast_dask.tensors.ids import RequestId
from tensorcast_dask.tensors.messages.shared import Message, Wire
from tensorcast_dask.tensors.signals import EVERYTHING, Reading, Signal

__all__ = [
    "MAX_REQUESTS",
    "HistoryAsked",
    "InstanceGone",
    "InstanceLoad",
    "RequestLoad",
    "SignalFrame",
    "SignalHistory",
    "SignalsAsked",
]

#: Candidates that an instance may name in one push.
MAX_REQUESTS: Final = 1024


class RequestLoad(Wire, frozen=True, kw_only=True):
    """One request (session, sequence) of an engine, as a policy sees it."""

    request: str
    tokens: int
    #: Seconds since it was last active, when this was said.
    idle_s: float = 0.0
    migrations: int = 0
    running: bool = False
    migrating: bool = False


class InstanceLoad(Message, frozen=True, kw_only=True):
    """An instance's own numbers, passed on by the node that it is attached to.

    No answer. What has a lower `epoch`, or in the same epoch a `number` that is not higher, is
    late and ignored. Each push replaces the last one whole: what is not said any more is not
    so any more, and nothing has to be subtracted.
    """

    instance: str
    #: Which attachment of this name speaks; a later one has a higher epoch.
    epoch: int
    number: int
    values: dict[str, float]
    #: How old the numbers were when they were sent.
    age_s: float = 0.0
    #: Without another push the signal is stale after so long.
    ttl_s: float = 10.0
    #: It takes nothing new.
    draining: bool = False
    #: Candidates for a move, at most `MAX_REQUESTS`.
    requests: tuple[RequestLoad, ...] = ()
    #: Version that it works with, by artifact id.
    versions: dict[str, int] = {}


class InstanceGone(Message, frozen=True, kw_only=True):
    """An instance has detached or died; its signals end. No answer."""

    instance: str
    epoch: int


class SignalsAsked(Message, frozen=True, kw_only=True):
    """What changed since? Answer: `SignalFrame`, at the earliest after `after_s`.

    With `wait_s` 0 at once; else when there is something to tell, at the latest after
    `wait_s`. `epoch` and `since` are those of the last frame, 0 for none: then the frame is
    whole. A watcher asks for one frame after the other: the catalog never has more than one
    on its way, whoever is slow gets the newest values and not those between.
    """

    rid: RequestId
    prefixes: tuple[str, ...] = EVERYTHING
    epoch: int = 0
    since: int = 0
    after_s: float = 0.0
    wait_s: float = 0.0
    #: How often the truth is looked at while there is nothing to tell.
    every_s: float = 0.1
    limit: int = 1000


class SignalFrame(Wire, frozen=True, kw_only=True):
    """What changed."""

    epoch: int
    number: int
    #: All that there is, not only changes: what is not in it is away.
    whole: bool = False
    changed: tuple[Signal, ...] = ()
    gone: tuple[str, ...] = ()
    #: Events, in their order; each is told once.
    events: tuple[Signal, ...] = ()
    #: Events were forgotten before they could be told.
    missed: bool = False
    #: There is more than `limit`: ask with a longer prefix.
    more: bool = False


class HistoryAsked(Message, frozen=True, kw_only=True):
    """The last readings of one signal. Answer: `SignalHistory`."""

    rid: RequestId
    name: str
    seconds: float


class SignalHistory(Wire, frozen=True, kw_only=True):
    """Readings, oldest first: (seconds ago, value)."""

    points: tuple[tuple[float, Reading], ...]
