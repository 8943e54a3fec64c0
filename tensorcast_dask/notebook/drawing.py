"""A plan as a picture: SVG text, with nothing to install.

Rules:

1. A step stands one row below the lowest of those that it waits for; in its row, in the plan's order.
2. Steps that undo are dashed. Equal plans are equal pictures.
3. Boxes are pale and their words dark, so that they can be read on any page; looks stand in the
   tags, since a style sheet would reach the other pictures of a page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tensorcast_dask.tensors.plans import Step

__all__ = ["Picture", "as_svg"]

_LETTER: Final = 7
_WIDE, _HIGH, _GAP, _EDGE = 24, 44, 36, 12
_FONT: Final = 'font-family="sans-serif" font-size="12" text-anchor="middle"'


class Picture(str):
    """A plan as text, which a notebook shows as a picture.

    Attributes
    ----------
    svg : str
        The picture.
    """

    __slots__ = ("svg",)
    svg: str

    def __new__(cls, text: str, svg: str) -> Self:  # noqa: D102 - the class says it
        made = super().__new__(cls, text)
        made.svg = svg
        return made

    def __reduce__(self) -> tuple[type[Picture], tuple[str, str]]:
        return Picture, (str(self), self.svg)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/plain": str(self), "image/svg+xml": self.svg}


def as_svg(steps: Sequence[Step], says: Mapping[str, str]) -> str:
    """Draw steps.

    Parameters
    ----------
    steps : sequence of Step
        In the plan's order.
    says : mapping of str to str
        What stands below each name: what it does, and where.
    """
    row_of: dict[str, int] = {}
    rows: list[list[Step]] = []
    for step in steps:
        at = 1 + max((row_of[one] for one in step.needs), default=-1)
        row_of[step.name] = at
        if at == len(rows):
            rows.append([])
        rows[at].append(step)
    places: dict[str, tuple[int, int, int]] = {}  # left, top, width
    for at, row in enumerate(rows):
        left = _EDGE
        for step in row:
            wide = _WIDE + _LETTER * max(len(step.name), len(says[step.name]))
            places[step.name] = (left, _EDGE + at * (_HIGH + _GAP), wide)
            left += wide + _GAP
    boxes = [_box(step, says[step.name], places[step.name]) for step in steps]
    lines = [
        _line(places[before], places[step.name])
        for step in steps
        for before in step.needs
    ]
    wide = max((left + width for left, _, width in places.values()), default=0) + _EDGE
    high = len(rows) * (_HIGH + _GAP) + _EDGE
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}">'
    return "\n".join([head, *lines, *boxes, "</svg>", ""])


def _box(step: Step, says: str, place: tuple[int, int, int]) -> str:
    left, top, wide = place
    middle = left + wide // 2
    mark = ' class="undo" stroke-dasharray="4 3"' if step.compensates else ""
    return (
        f'<rect x="{left}" y="{top}" width="{wide}" height="{_HIGH}" rx="5"{mark}'
        ' fill="#eef4fb" stroke="#3b6ea5"/>'
        f'<text x="{middle}" y="{top + 18}" {_FONT} fill="#1b2a3a">{escape(step.name)}</text>'
        f'<text x="{middle}" y="{top + 35}" {_FONT} fill="#4a5560">{escape(says)}</text>'
    )


def _line(above: tuple[int, int, int], below: tuple[int, int, int]) -> str:
    from_x, from_y = above[0] + above[2] // 2, above[1] + _HIGH
    to_x, to_y = below[0] + below[2] // 2, below[1]
    bend = (from_y + to_y) // 2
    curve = f"M{from_x} {from_y}C{from_x} {bend} {to_x} {bend} {to_x} {to_y}"
    return f'<path d="{curve}" fill="none" stroke="#8a939b"/>'
