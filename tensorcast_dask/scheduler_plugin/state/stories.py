"""Why is it as it is: a few lines about each artifact, node and request.

Rules:

1. Memory is bounded twice: lines of one subject, and subjects. The subject that was
   spoken of longest ago is forgotten first.
2. A line is put together only when somebody asks: telling one costs a tuple.
"""

from __future__ import annotations

from collections import deque
from operator import itemgetter
from typing import Final, TypeAlias

__all__ = ["MAX_SUBJECTS", "Stories"]

MAX_SUBJECTS: Final = 20_000

Line: TypeAlias = tuple[float, str, tuple[str | int | float, ...]]


class Stories:
    """What happened to whom.

    Parameters
    ----------
    lines : int
        How many lines of one subject are kept.
    """

    def __init__(self, *, lines: int) -> None:
        self._lines = lines
        self._subjects: dict[str, deque[Line]] = {}

    def tell(
        self,
        now_s: float,
        subjects: tuple[str, ...],
        form: str,
        *parts: str | float,
    ) -> None:
        """Add a line; `form` takes `parts` by str.format."""
        line = (now_s, form, parts)
        for subject in subjects:
            if not subject:
                continue
            ring = self._subjects.pop(subject, None)
            if ring is None:
                ring = deque(maxlen=self._lines)
                if len(self._subjects) >= MAX_SUBJECTS:
                    del self._subjects[next(iter(self._subjects))]
            self._subjects[subject] = ring  # now the newest
            ring.append(line)

    def of(self, subject: str, *, now_s: float) -> tuple[tuple[float, str], ...]:
        """Lines of a subject, oldest first: (seconds ago, what).

        What a node tells of an order comes with its end, after what happened meanwhile.
        """
        lines = sorted(self._subjects.get(subject, ()), key=itemgetter(0))
        return tuple(
            (round(now_s - at_s, 6), form.format(*parts)) for at_s, form, parts in lines
        )
