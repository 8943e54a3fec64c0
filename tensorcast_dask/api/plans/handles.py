"""A step, as the plan that it is of hands it out."""

from __future__ import annotations

from typing import Any

__all__ = ["StepHandle"]


class StepHandle:
    """A step of a plan; as an argument of a later step, its result.

    Attributes
    ----------
    name : str
        Unique in the plan.
    """

    __slots__ = ("name", "plan")

    def __init__(self, plan: Any, name: str) -> None:
        self.plan = plan
        self.name = name

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, StepHandle)
            and self.plan is other.plan
            and self.name == other.name
        )

    def __hash__(self) -> int:
        return hash((id(self.plan), self.name))

    def __repr__(self) -> str:
        return f"<Step {self.name!r}>"
