"""A step, as the plan that it is of hands it out."""

from __future__ import annotations

from typing import Any

__all__ = ["StepHandle"]


class StepHandle:
    """A step of a plan; as an argument of a later step, its result.

    Once the plan is submitted `client.submit` takes it as it takes a Future: the task gets the
    step's value, or is not run where the step fails.

    Attributes
    ----------
    name : str
        Unique in the plan.
    """

    __slots__ = ("name", "plan")
    #: Tells Dask to go by `key`.
    __dask_future__ = True

    def __init__(self, plan: Any, name: str) -> None:
        self.plan = plan
        self.name = name

    @property
    def key(self) -> str:
        """What Dask calls the value of the step.

        Raises
        ------
        InvalidArgument
            While the plan is not submitted.
        """
        return str(self.plan._value_of(self.name).key)  # noqa: SLF001 - of one room

    def __dask_tokenize__(self) -> tuple[str, str]:
        return ("tensorcast-step", self.key)

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
