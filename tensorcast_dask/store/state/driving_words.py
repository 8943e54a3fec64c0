"""What a run that a store drives has its shell do."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from tensorcast_dask.tensors.messages import CallInstance, Message, NodeCard

__all__ = ["GiveUp", "Instruction", "Make", "Say"]


class _Value(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what is only a value."""


class Say(_Value, frozen=True, kw_only=True):
    """Ask the catalog; the answer comes back under the number (0: to nobody)."""

    number: int
    request: Message


class Make(_Value, frozen=True, kw_only=True):
    """Call an instance by way of its node; what it came to comes back under the number."""

    number: int
    card: NodeCard
    request: CallInstance


class GiveUp(_Value, frozen=True, kw_only=True):
    """Nobody waits for a call any more."""

    number: int


Instruction: TypeAlias = Say | Make | GiveUp
