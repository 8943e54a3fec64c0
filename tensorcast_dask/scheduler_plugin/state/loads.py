"""What instances say of their load: the last push of each, and a smoothed value.

Rules:

1. A push replaces the last one whole; nothing is added up, so nothing drifts when a request
   is cancelled or its client dies.
2. An earlier attachment, or an earlier push, is late and ignored.
3. A push stands for its `ttl_s`, then the signal is stale, and away after as long again. It
   ends with the instance, and is stale at once when the node that passed it on is gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tensorcast_dask.tensors.ids import NodeId
from tensorcast_dask.tensors.messages import MAX_REQUESTS, InstanceLoad
from tensorcast_dask.tensors.signals import Reading, ewma, rounded

__all__ = ["MAX_INSTANCES", "MAX_VALUES", "Load", "Loads"]

MAX_INSTANCES: Final = 1024
MAX_VALUES: Final = 64
_ALPHA: Final = 0.3


@dataclass(slots=True)
class Load:
    """One instance."""

    node: NodeId
    said: InstanceLoad
    #: When the numbers were true.
    as_of_s: float
    #: When they were heard.
    heard_s: float
    smooth: dict[str, float]

    def fresh(self, now_s: float) -> bool:
        """Whether the push still stands."""
        return now_s - self.heard_s <= self.said.ttl_s

    @property
    def reading(self) -> Reading:
        """Numbers as pushed, each with its smoothed one."""
        found: Reading = {
            "node": self.node,
            "draining": self.said.draining,
            "requests": len(self.said.requests),
        }
        for name, value in self.said.values.items():
            found[name] = value
            found[f"{name}.ewma"] = rounded(self.smooth[name], 6)
        return found


class Loads:
    """The last push of every instance."""

    def __init__(self) -> None:
        self._loads: OrderedDict[str, Load] = OrderedDict()

    def __len__(self) -> int:
        return len(self._loads)

    def pushed(self, node: NodeId, said: InstanceLoad, *, now_s: float) -> bool:
        """Take a push; False when it is late."""
        known = self._loads.get(said.instance)
        again = known is not None and known.said.epoch == said.epoch
        if known is not None and (
            said.epoch < known.said.epoch
            or (again and said.number <= known.said.number)
        ):
            return False
        before = known.smooth if known is not None and again else {}
        values = dict(list(said.values.items())[:MAX_VALUES])
        self._loads.pop(said.instance, None)
        self._loads[said.instance] = Load(
            node=node,
            said=_bounded(said, values),
            as_of_s=now_s - max(0.0, said.age_s),
            heard_s=now_s,
            smooth={
                name: ewma(before.get(name), value, _ALPHA)
                for name, value in values.items()
            },
        )
        if len(self._loads) > MAX_INSTANCES:
            self._loads.popitem(last=False)
        return True

    def gone(self, instance: str, epoch: int) -> bool:
        """Forget an instance; False when a later attachment has its name."""
        known = self._loads.get(instance)
        if known is None or known.said.epoch > epoch:
            return False
        del self._loads[instance]
        return True

    def expire(self, now_s: float) -> None:
        """Forget those of whom nothing was heard for twice their time."""
        for name, load in list(self._loads.items()):
            if now_s - load.heard_s > 2 * load.said.ttl_s:
                del self._loads[name]

    def values(self) -> Iterator[Load]:
        """Go through all of them."""
        yield from self._loads.values()

    def get(self, instance: str) -> Load | None:
        """Find one."""
        return self._loads.get(instance)


def _bounded(said: InstanceLoad, values: dict[str, float]) -> InstanceLoad:
    """Keep no more of a push than the catalog may hold."""
    return InstanceLoad(
        instance=said.instance,
        epoch=said.epoch,
        number=said.number,
        values=values,
        age_s=said.age_s,
        ttl_s=said.ttl_s,
        draining=said.draining,
        requests=said.requests[:MAX_REQUESTS],
        versions=dict(list(said.versions.items())[:MAX_VALUES]),
    )
