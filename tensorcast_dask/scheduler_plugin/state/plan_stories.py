"""What the story of a plan tells of its run and its steps."""

from __future__ import annotations

from typing import Final

from tensorcast_dask.scheduler_plugin.state.ground import Ground
from tensorcast_dask.scheduler_plugin.state.runs import Run
from tensorcast_dask.tensors.messages import StepOutcome
from tensorcast_dask.tensors.plans import Step

__all__ = ["STEP_LINES", "Telling"]

#: Lines on steps that the story of a plan has; each step has one of its own.
STEP_LINES: Final = 40


class Telling:
    """Tells."""

    def __init__(self, ground: Ground) -> None:
        self._outbox = ground.outbox
        self._stories = ground.stories

    def note(self, run: Run, form: str, *parts: str | float) -> None:
        """Tell of a run."""
        subjects = (run.subject, run.asker)
        self._stories.tell(self._outbox.now_s, subjects, form, *parts)

    def of_step(self, run: Run, step: Step, form: str, *parts: str | float) -> None:
        """Tell of a step: in its own story, and of the first ones in the plan's."""
        subjects = [f"{run.subject}/{step.name}"]
        if run.told < STEP_LINES:
            run.told += 1
            subjects += [run.subject, run.asker]
        self._stories.tell(self._outbox.now_s, tuple(subjects), form, step.name, *parts)

    def of_call(self, run: Run, step: Step, outcome: StepOutcome) -> None:
        """Tell what came of a call of an instance: in the step's story and in the instance's."""
        self._stories.tell(
            self._outbox.now_s,
            (f"{run.subject}/{step.name}", f"instance:{step.instance}"),
            "instance {}: {} for step {} of plan {} is {} after {:.3f} s",
            step.instance,
            str(step.options.get("function", "")),
            step.name,
            run.key,
            str(outcome.status),
            outcome.seconds,
        )
