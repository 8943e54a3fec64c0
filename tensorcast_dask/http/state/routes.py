"""What can be asked: one table, from which requests are routed and the document is written.

Rules:

1. A path's parameter is one segment, percent-encoded: the id `toy/weights` is `toy%2Fweights`.
2. A query parameter that is not in the table, or not of its kind, is refused.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, TypeAlias
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec

from tensorcast_dask.http.state import shapes
from tensorcast_dask.http.state.access import Need
from tensorcast_dask.http.state.statuses import RefusedError

__all__ = [
    "DOCUMENT",
    "MAX_PAGE",
    "MAX_WAIT_S",
    "ROUTES",
    "Asked",
    "Form",
    "Param",
    "Route",
    "find",
]

DOCUMENT: Final = "/openapi.json"
MAX_PAGE: Final = 1000
MAX_WAIT_S: Final = 60.0
_MAX_QUERY: Final = 64

Value: TypeAlias = str | int | float | bool


class Form(StrEnum):
    """How the answer comes."""

    JSON = "json"
    EVENTS = "events"
    BYTES = "bytes"


class Param(msgspec.Struct, frozen=True, kw_only=True):
    """One query parameter; without `default` it may be left out and is not there."""

    name: str
    kind: type[str] | type[int] | type[float] | type[bool]
    says: str
    default: Value | None = None
    low: float = 0
    high: float = 0
    many: bool = False


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that can be asked.

    Attributes
    ----------
    name : str
        Of the work behind it, and of the operation in the document.
    methods : tuple of str
        By which it is asked; `HEAD` goes with `GET`.
    path : str
        With parameters in braces.
    need : Need
        What it gives away.
    shape : type
        What the answer, or each event's data, is made of.
    """

    name: str
    method: str
    path: str
    need: Need
    says: str
    shape: type[shapes.Shape] | None = None
    form: Form = Form.JSON
    status: int = 200
    params: tuple[Param, ...] = ()

    @property
    def named(self) -> tuple[str, ...]:
        """Parameters of the path."""
        return tuple(re.findall(r"{(\w+)}", self.path))

    @property
    def methods(self) -> tuple[str, ...]:
        """By which it is asked."""
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the table knows."""

    route: Route
    #: Of the path, decoded.
    path: dict[str, str]
    query: dict[str, Value]
    #: Parameters that may occur several times.
    lists: dict[str, tuple[str, ...]]

    def text(self, name: str) -> str:
        """Give a text of the query."""
        return str(self.query[name])

    def number(self, name: str) -> float:
        """Give a number of the query."""
        return float(self.query[name])

    def whole(self, name: str) -> int | None:
        """Give a whole number of the query; None where it was left out."""
        return int(self.query[name]) if name in self.query else None


_VERSION: Final = Param(
    name="version",
    kind=int,
    says="That version; else the newest published one.",
    low=1,
    high=float(2**53),
)
_LIMIT: Final = Param(
    name="limit",
    kind=int,
    says="At most so many.",
    default=100,
    low=1,
    high=MAX_PAGE,
)
_PREFIX: Final = Param(
    name="prefix",
    kind=str,
    says="Names that begin so; several are one or the other.",
    many=True,
)

ROUTES: Final = (
    Route(
        name="document",
        method="GET",
        path=DOCUMENT,
        need=Need.LOOK,
        says="This document.",
    ),
    Route(
        name="list_artifacts",
        method="GET",
        path="/v1/artifacts",
        need=Need.LOOK,
        says="List artifacts by id, a page at a time.",
        shape=shapes.ArtifactPage,
        params=(
            Param(name="prefix", kind=str, says="Ids that begin so.", default=""),
            Param(
                name="label",
                kind=str,
                says="NAME=VALUE that it must carry; several: all of them.",
                many=True,
            ),
            Param(
                name="all_versions",
                kind=bool,
                says="Every committed version, not the newest published.",
                default=False,
            ),
            _LIMIT,
            Param(
                name="after",
                kind=str,
                says="The `after` of the last page.",
                default="",
            ),
        ),
    ),
    Route(
        name="show_artifact",
        method="GET",
        path="/v1/artifacts/{id}",
        need=Need.LOOK,
        says="One version: its tensors, and where its replicas are.",
        shape=shapes.WholeArtifact,
        params=(_VERSION,),
    ),
    Route(
        name="read_tensor",
        method="GET",
        path="/v1/artifacts/{id}/tensors/{name}",
        need=Need.BYTES,
        says="The bytes of a tensor, all or a range.",
        form=Form.BYTES,
        params=(_VERSION,),
    ),
    Route(
        name="list_nodes",
        method="GET",
        path="/v1/nodes",
        need=Need.LOOK,
        says="Nodes, and what their tiers hold.",
        shape=shapes.Nodes,
    ),
    Route(
        name="list_instances",
        method="GET",
        path="/v1/instances",
        need=Need.LOOK,
        says="Processes that are attached to nodes.",
        shape=shapes.Instances,
    ),
    Route(
        name="read_signals",
        method="GET",
        path="/v1/signals",
        need=Need.LOOK,
        says="Signals as they are now.",
        shape=shapes.Signals,
        params=(_PREFIX, _LIMIT),
    ),
    Route(
        name="watch_signals",
        method="GET",
        path="/v1/signals/stream",
        need=Need.LOOK,
        says="Server-sent events: what changes.",
        shape=shapes.Changes,
        form=Form.EVENTS,
        params=(
            _PREFIX,
            Param(
                name="every",
                kind=float,
                says="Least seconds between two events; values between are passed over.",
                default=1.0,
                low=0.1,
                high=3600,
            ),
        ),
    ),
    Route(
        name="list_plans",
        method="GET",
        path="/v1/plans",
        need=Need.LOOK,
        says="Runs of plans that are known.",
        shape=shapes.Plans,
        params=(
            Param(name="prefix", kind=str, says="Keys that begin so.", default=""),
            _LIMIT,
        ),
    ),
    Route(
        name="submit_plan",
        method="POST",
        path="/v1/plans",
        need=Need.ACT,
        says="Begin a plan, given as JSON; under a known key: the run that is there.",
        shape=shapes.Plan,
        status=202,
        params=(
            Param(
                name="concurrency",
                kind=int,
                says="Most steps under way at once.",
                low=1,
                high=10_000,
            ),
        ),
    ),
    Route(
        name="show_plan",
        method="GET",
        path="/v1/plans/{key}",
        need=Need.LOOK,
        says="How a run stands; with `wait` at its end, or after so long.",
        shape=shapes.Plan,
        params=(
            Param(
                name="wait",
                kind=float,
                says="Seconds to wait for the end.",
                default=0.0,
                high=MAX_WAIT_S,
            ),
        ),
    ),
    Route(
        name="watch_plan",
        method="GET",
        path="/v1/plans/{key}/stream",
        need=Need.LOOK,
        says="Server-sent events: the run whenever a step has ended, until its end.",
        shape=shapes.Plan,
        form=Form.EVENTS,
    ),
    Route(
        name="cancel_plan",
        method="POST",
        path="/v1/plans/{key}/cancel",
        need=Need.ACT,
        says="Begin no further step.",
        shape=shapes.Plan,
        status=202,
    ),
)


def _pattern(route: Route) -> re.Pattern[str]:
    parts = re.split(r"({\w+})", route.path)
    made = [
        f"(?P<{part[1:-1]}>[^/]+)" if part.startswith("{") else re.escape(part)
        for part in parts
    ]
    return re.compile("".join(made))


_PATTERNS: Final = tuple((_pattern(route), route) for route in ROUTES)


def find(method: str, path: str, query: str) -> Asked:
    """Say what a request asks.

    Parameters
    ----------
    method : str
        Its method.
    path : str
        Below the gateway's root, as it was sent.
    query : str
        As it was sent, without the question mark.

    Raises
    ------
    RefusedError
        When it asks nothing that there is.
    """
    known = [
        (route, found)
        for pattern, route in _PATTERNS
        if (found := pattern.fullmatch(path)) is not None
    ]
    if not known:
        message = (
            f"there is no such path; {DOCUMENT} lists all, and an id is one part: a%2Fb"
        )
        raise RefusedError(404, message)
    for route, found in known:
        if method in route.methods:
            named = {name: _text(raw) for name, raw in found.groupdict().items()}
            values, lists = _query(route, query)
            return Asked(route=route, path=named, query=values, lists=lists)
    allowed = ", ".join(m for route, _ in known for m in route.methods)
    message = f"this path takes {allowed}, not {method[:20]}"
    raise RefusedError(405, message)


def _text(raw: str) -> str:
    try:
        return unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        message = "a part of the path is not UTF-8"
        raise RefusedError(400, message) from None


def _query(
    route: Route, query: str
) -> tuple[dict[str, Value], dict[str, tuple[str, ...]]]:
    try:
        pairs = parse_qsl(
            query, keep_blank_values=True, errors="strict", max_num_fields=_MAX_QUERY
        )
    except (ValueError, UnicodeDecodeError):
        message = f"the query cannot be read: UTF-8, at most {_MAX_QUERY} parameters"
        raise RefusedError(400, message) from None
    known = {param.name: param for param in route.params}
    values: dict[str, Value] = {}
    lists: dict[str, tuple[str, ...]] = {
        param.name: () for param in route.params if param.many
    }
    for name, text in pairs:
        param = known.get(name)
        if param is None or (name in values and not param.many):
            there = ", ".join(known) or "none"
            message = f"parameter {name[:60]!r} is not known or given twice; there are: {there}"
            raise RefusedError(400, message)
        if param.many:
            lists[name] = (*lists[name], text)
        else:
            values[name] = _value(param, text)
    for param in route.params:
        if param.default is not None:
            values.setdefault(param.name, param.default)
    return values, lists


def _value(param: Param, text: str) -> Value:
    if param.kind is str:
        return text
    if param.kind is bool:
        if text in {"true", "false"}:
            return text == "true"
        message = f"parameter {param.name!r} takes true or false"
        raise RefusedError(400, message)
    shape = r"-?\d{1,18}" if param.kind is int else r"-?\d{1,18}(\.\d{1,18})?"
    if re.fullmatch(shape, text, re.ASCII) and param.low <= float(text) <= param.high:
        return int(text) if param.kind is int else float(text)
    message = f"parameter {param.name!r} takes {_sort(param)} from {param.low:g} to {param.high:g}"
    raise RefusedError(400, message)


def _sort(param: Param) -> str:
    return "a whole number" if param.kind is int else "a number"
