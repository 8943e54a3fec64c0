"""A plan with a step of each kind whose effect only its doer has, and a process that submits it.

python plan_process.py SCHEDULER KEY EXECUTOR WORKER ARTIFACT FOLDER    until it is killed
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorcast_dask as tc
from tests.kit.tasks import note

if TYPE_CHECKING:
    from tensorcast_dask.api.plans.run import PlanRun

__all__ = ["effects", "submitted"]


def submitted(
    cast: tc.Session,
    key: str,
    executor: Any,
    *,
    worker: Any,
    artifact: Any,
    folder: Path,
) -> PlanRun:
    """Submit it: a call of instance `e` and another one after it; with Dask also `copy` and `submit`."""
    plan = cast.plan(tc.context(key=key, ddl=100))
    call = plan.on_instance("e").call("note", str(folder / "call"), name="call")
    plan.on_instance("e").call("total", name="after", after=[call])
    if executor == "graph":
        at = plan.on_worker(worker)
        at.copy(artifact, id=f"{key}/copy", name="copy")
        at.submit(note, str(folder / "submit"), "ran", name="submit")
    return plan.submit(executor=executor)


def effects(cast: tc.Session, key: str, folder: Path) -> dict[str, int]:
    """Count what each step has done."""
    copies = [one for one in cast.list(all_versions=True) if one.id == f"{key}/copy"]
    done = {
        name: len((folder / name).read_text().split())
        for name in ("call", "submit")
        if (folder / name).exists()
    }
    return {"call": 0, "submit": 0, "copy": len(copies)} | done


def main() -> None:
    address, key, executor, worker, artifact, folder = sys.argv[1:]
    with tc.connect(address) as cast:
        submitted(
            cast,
            key,
            executor,
            worker=worker,
            artifact=cast.artifact(artifact),
            folder=Path(folder),
        )
        sys.stdout.write("submitted\n")
        sys.stdout.flush()
        while True:
            time.sleep(1.0)  # scene: until it is killed


if __name__ == "__main__":
    main()
