"""Long-lived tensors as first-class citizens of a Dask cluster.

Names are imported when they are first used, so that `import tensorcast_dask` costs next
to nothing and never loads an array library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorcast_dask.api.artifact import Artifact as Artifact
    from tensorcast_dask.api.cluster import LocalCluster as LocalCluster
    from tensorcast_dask.api.connect import connect as connect
    from tensorcast_dask.api.connection.operation import Operation as Operation
    from tensorcast_dask.api.functions import artifact as artifact
    from tensorcast_dask.api.functions import latest as latest
    from tensorcast_dask.api.functions import plan as plan
    from tensorcast_dask.api.functions import put as put
    from tensorcast_dask.api.functions import register as register
    from tensorcast_dask.api.plans.plan import Plan as Plan
    from tensorcast_dask.api.plans.plan import context as context
    from tensorcast_dask.api.plans.run import PlanResult as PlanResult
    from tensorcast_dask.api.plans.run import PlanRun as PlanRun
    from tensorcast_dask.api.session import Session as Session
    from tensorcast_dask.api.worker import Worker as Worker
    from tensorcast_dask.exceptions import TensorCastError as TensorCastError
    from tensorcast_dask.tensors.views import s_ as s_

from tensorcast_dask.version import __version__ as __version__

_HOMES = {
    "Artifact": "tensorcast_dask.api.artifact",
    "LocalCluster": "tensorcast_dask.api.cluster",
    "Operation": "tensorcast_dask.api.connection.operation",
    "Plan": "tensorcast_dask.api.plans.plan",
    "PlanResult": "tensorcast_dask.api.plans.run",
    "PlanRun": "tensorcast_dask.api.plans.run",
    "Session": "tensorcast_dask.api.session",
    "TensorCastError": "tensorcast_dask.exceptions",
    "Worker": "tensorcast_dask.api.worker",
    "artifact": "tensorcast_dask.api.functions",
    "connect": "tensorcast_dask.api.connect",
    "context": "tensorcast_dask.api.plans.plan",
    "latest": "tensorcast_dask.api.functions",
    "plan": "tensorcast_dask.api.functions",
    "put": "tensorcast_dask.api.functions",
    "register": "tensorcast_dask.api.functions",
    "s_": "tensorcast_dask.tensors.views",
}

__all__ = [
    "Artifact",
    "LocalCluster",
    "Operation",
    "Plan",
    "PlanResult",
    "PlanRun",
    "Session",
    "TensorCastError",
    "Worker",
    "artifact",
    "connect",
    "context",
    "latest",
    "plan",
    "put",
    "register",
    "s_",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__", "exceptions"]
