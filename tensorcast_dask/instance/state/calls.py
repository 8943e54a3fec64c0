"""What was asked of this instance under a key: each carried out once.

Rules:

1. The first call under a key is carried out; a repeat gets its outcome. A repeat with another
   function or other arguments is Mismatch.
2. Outcomes are kept up to `keep` and `keep_bytes`, the oldest given up first. Of one that was
   given up its key is still known: a repeat of it is Unknown, never carried out again.
3. A call whose caller gave up before it began does not begin.
4. While the instance holds half of an update, only what can repair it is carried out, also of
   what waited already. What is refused so was not carried out, and is not remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from tensorcast_dask.exceptions import Mismatch, Poisoned, Unknown
from tensorcast_dask.tensors.messages import REPAIRS, Call, CallEnded, Fault

__all__ = ["Calls"]


@dataclass(slots=True)
class _Kept:
    """One key."""

    #: Of function and arguments.
    asked: bytes
    #: None where it was given up.
    outcome: CallEnded | None


class Calls:
    """Calls that wait, and outcomes of those that had a key.

    Parameters
    ----------
    keep : int
        Outcomes at most; keys at most sixteen times as many.
    keep_bytes : int
        Bytes of their values at most.

    Attributes
    ----------
    poisoned : str
        Why only what repairs is carried out; "" while everything is.
    """

    def __init__(self, *, keep: int = 4096, keep_bytes: int = 64 << 20) -> None:
        self._keep = keep
        self._keep_bytes = keep_bytes
        self._known: OrderedDict[str, _Kept] = OrderedDict()
        self._outcomes: OrderedDict[str, int] = OrderedDict()
        self._held_bytes = 0
        self.poisoned = ""
        #: Calls to be carried out, with the instant until which they may begin.
        self._queue: OrderedDict[int, tuple[Call, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue)

    # ------------------------------------------------------------ waiting
    def asked(self, call: Call, *, now_s: float) -> None:
        """Take a call."""
        self._queue[call.number] = (call, now_s + call.deadline_s)

    def dropped(self, number: int) -> None:
        """Forget a call that nobody waits for (rule 3)."""
        self._queue.pop(number, None)

    def forget_waiting(self) -> None:
        """Forget every call that has not begun: its node, which minted its number, is gone."""
        self._queue.clear()

    def next(self, *, now_s: float) -> Call | None:
        """Take the next call that is to be looked at."""
        while self._queue:
            _, (call, until_s) = self._queue.popitem(last=False)
            if now_s < until_s:
                return call
        return None

    # ------------------------------------------------------------ once
    def known(self, call: Call) -> CallEnded | None:
        """Give what a call comes to that is not carried out now; None: carry it out (rules 1, 4)."""
        kept = self._known.get(call.key) if call.key else None
        error: Mismatch | Poisoned | Unknown
        if kept is None and (not self.poisoned or call.function in REPAIRS):
            return None
        if kept is None:
            error = Poisoned(
                f"this instance holds half of an update ({self.poisoned}); give it all of its "
                "weights by transform_into, or start it anew"
            )
            return CallEnded(number=call.number, fault=Fault.of(error))
        if kept.asked != _digest(call):
            error = Mismatch(
                f"key {call.key!r} was used for another call of this instance; take another"
            )
        elif kept.outcome is None:
            error = Unknown(
                f"call {call.key!r} of {call.function!r} was carried out, and its outcome is not "
                "kept; look at its effects"
            )
        else:
            return msgspec.structs.replace(kept.outcome, number=call.number)
        return CallEnded(number=call.number, fault=Fault.of(error))

    def ended(self, call: Call, outcome: CallEnded) -> None:
        """Keep an outcome (rule 2)."""
        if not call.key:
            return
        self._known[call.key] = _Kept(_digest(call), outcome)
        size = len(outcome.value)
        self._outcomes[call.key] = size
        self._held_bytes += size
        while self._outcomes and (
            len(self._outcomes) > self._keep or self._held_bytes > self._keep_bytes
        ):
            key, freed = self._outcomes.popitem(last=False)
            self._held_bytes -= freed
            self._known[key].outcome = None
        while len(self._known) > 16 * self._keep:
            self._known.popitem(last=False)


def _digest(call: Call) -> bytes:
    return call.function.encode() + b"\0" + call.args
