"""Who asks, by when, under which key: what a plan carries through every hop.

Rules:

1. `ddl` is seconds for the whole: None the service's default, 0 one look at each step, a
   positive number at most so long. Negative numbers, NaN, infinity below zero and what is no
   number are refused before anything is done. It is one instant: no retry or hop adds to it.
2. `key` names one run. The same key with the same plan is the same run, whoever asks.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from tensorcast_dask.exceptions import InvalidArgument
from tensorcast_dask.tensors.ids import check_name

__all__ = ["MAX_PRIORITY", "Context", "check_ddl"]

MAX_PRIORITY: Final = 1_000_000
_MAX_LABELS: Final = 64


class Context(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who asks.

    Attributes
    ----------
    id : str
        Who, for people: it stands in stories and logs.
    ddl : float or None
        Seconds for all of it; see rule 1.
    key : str
        Idempotency key, "" where the caller gave none.
    priority : int
        Of the steps among other Dask tasks; higher runs sooner.
    tags : tuple of str
        For whoever reads the plan later.
    labels : dict of str to str
        For whoever reads the plan later.
    """

    id: str = "plan"
    ddl: float | None = None
    key: str = ""
    priority: int = 0
    tags: tuple[str, ...] = ()
    labels: dict[str, str] = {}

    def __post_init__(self) -> None:
        check_name(self.id, what="the context's id")
        if self.key != "":
            check_name(self.key, what="the context's key")
        check_ddl(self.ddl)
        _check_priority(self.priority)
        _check_words(self.tags, self.labels)


def check_ddl(ddl: object) -> float | None:
    """Return seconds, or None for the default.

    Raises
    ------
    InvalidArgument
        When it is negative, NaN or no number.
    """
    if ddl is None:
        return None
    if isinstance(ddl, bool) or not isinstance(ddl, int | float):
        message = f"ddl must be seconds or None, not {type(ddl).__name__}"
        raise InvalidArgument(message)
    if math.isnan(ddl) or ddl < 0:
        message = f"ddl must be 0 (look once), positive seconds or None, not {ddl}"
        raise InvalidArgument(message)
    return ddl


def _check_priority(priority: object) -> None:
    whole = isinstance(priority, int) and not isinstance(priority, bool)
    if not whole or abs(priority) > MAX_PRIORITY:  # type: ignore[arg-type]
        message = f"priority must be a whole number of at most {MAX_PRIORITY}, not {priority!r}"
        raise InvalidArgument(message)


def _check_words(tags: object, labels: object) -> None:
    if not isinstance(tags, tuple) or len(tags) > _MAX_LABELS:
        message = f"tags must be at most {_MAX_LABELS} texts"
        raise InvalidArgument(message)
    for tag in tags:
        check_name(tag, what="tag")
    if not isinstance(labels, dict) or len(labels) > _MAX_LABELS:
        message = f"labels must be at most {_MAX_LABELS} pairs of text"
        raise InvalidArgument(message)
    for name, value in labels.items():
        check_name(name, what="label")
        if not isinstance(value, str):
            message = f"label {name!r} must be text, not {type(value).__name__}"
            raise InvalidArgument(message)
