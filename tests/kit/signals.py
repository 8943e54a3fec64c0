"""Questions about signals, at a desk."""

from __future__ import annotations

from tensorcast_dask.tensors import messages as m
from tensorcast_dask.tensors.ids import RequestId
from tensorcast_dask.tensors.signals import Signal
from tests.kit.catalogs import Program

__all__ = ["begin_watch", "by_name", "frame", "load", "next_watch", "snapshot"]


def frame(program: Program, *prefixes: str, **more: object) -> m.SignalFrame:
    ask = m.SignalsAsked(rid=program.rid(), prefixes=prefixes or ("",), **more)  # type: ignore[arg-type]
    return program.call(ask, m.SignalFrame)


def by_name(found: m.SignalFrame) -> dict[str, Signal]:
    return {one.name: one for one in found.changed}


def snapshot(program: Program, *prefixes: str) -> dict[str, Signal]:
    return by_name(frame(program, *prefixes))


def begin_watch(program: Program, *prefixes: str, **more: object) -> m.SignalFrame:
    """The first frame of a watch: all that there is."""
    ask = m.SignalsAsked(rid=program.rid(), prefixes=prefixes, wait_s=5.0, **more)  # type: ignore[arg-type]
    return program.call(ask, m.SignalFrame)


def next_watch(
    program: Program, last: m.SignalFrame, *prefixes: str, **more: object
) -> RequestId:
    """Ask for the next one; its answer comes when there is something to tell."""
    given = {"wait_s": 5.0, "epoch": last.epoch, "since": last.number, **more}
    ask = m.SignalsAsked(rid=program.rid(), prefixes=prefixes, **given)  # type: ignore[arg-type]
    return program.ask(ask)


def load(
    number: int,
    *,
    name: str = "i",
    epoch: int = 1,
    ttl_s: float = 10.0,
    versions: dict[str, int] | None = None,
    requests: tuple[m.RequestLoad, ...] = (),
    **values: float,
) -> m.InstanceLoad:
    return m.InstanceLoad(
        instance=name,
        epoch=epoch,
        number=number,
        values=values,
        ttl_s=ttl_s,
        versions=versions or {},
        requests=requests,
    )
