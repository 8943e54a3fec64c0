"""What is asked, answered out of one asynchronous session.

Rules:

1. The session is the only way to the cluster: nothing is decided here that it does not decide.
2. Bytes are given as memory: a map of the segment where a node of this host has it, and then nothing
   was copied; else the part that was asked for, brought from a holder.
3. Nothing that a stranger pickled, or had pickled, is unpickled.
4. Long lists are made in slices: on the scheduler another thread waits for the interpreter meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from tensorcast_dask.api.artifact import Artifact
from tensorcast_dask.api.plans.run import find as find_run
from tensorcast_dask.exceptions import InvalidArgument, TensorCastError
from tensorcast_dask.http.state import shapes, showing
from tensorcast_dask.http.state.openapi import document
from tensorcast_dask.http.state.ranges import etag_of, part_of, unchanged
from tensorcast_dask.http.state.statuses import RefusedError, answer_of
from tensorcast_dask.tensors.plans import PlanSpec
from tensorcast_dask.version import __version__

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

    from tensorcast_dask.api.plans.run import PlanRun
    from tensorcast_dask.http.state.routes import Asked

__all__ = ["Answer", "Conditions", "Desk", "packed"]

S = TypeVar("S")
T = TypeVar("T")

_LOOK_S: Final = 30.0
_SLICE: Final = 64
#: The loop of a plan's stream is over when its status is another.
_RUNNING: Final = "running"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Headers and body that a request brought."""

    method: str = "GET"
    range: str = ""
    if_range: str = ""
    if_none_match: str = ""
    body: bytes = b""


@dataclass(slots=True, kw_only=True)
class Answer:
    """What is sent."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    #: Memory that is sent in place of `body`; it lives as long as this.
    memory: memoryview | None = None
    #: Server-sent events in place of `body`.
    events: AsyncGenerator[bytes, None] | None = None


def packed(value: shapes.Shape, *, status: int = 200) -> Answer:
    """Answer with JSON."""
    headers = {"Content-Type": "application/json", "Cache-Control": "no-store"}
    return Answer(status=status, headers=headers, body=_json(value))


def _json(value: object) -> bytes:
    return msgspec.json.encode(value, enc_hook=str)


def _event(name: str, value: shapes.Shape) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), _json(value))


class Desk:
    """Answers requests.

    Parameters
    ----------
    session : Session
        Asynchronous.
    root : str
        Path below which the gateway is served.
    """

    def __init__(self, session: Any, root: str) -> None:  # noqa: ANN401 - both kinds of session are one class
        self._session = session
        self._root = root

    async def answer(self, asked: Asked, given: Conditions) -> Answer:
        """Answer a request that may be answered.

        Raises
        ------
        TensorCastError
            What the session raised, or what is wrong with the request.
        """
        answer: Answer = await getattr(self, f"_{asked.route.name}")(asked, given)
        return answer

    # ------------------------------------------------------------ artifacts
    async def _document(self, _: Asked, __: Conditions) -> Answer:
        body = _json(document(root=self._root, version=__version__))
        return Answer(headers={"Content-Type": "application/json"}, body=body)

    async def _list_artifacts(self, asked: Asked, _: Conditions) -> Answer:
        labels = dict(_pair(text) for text in asked.lists["label"])
        limit = asked.whole("limit") or 1
        found = await self._session.list(
            asked.text("prefix"),
            labels=labels,
            all_versions=bool(asked.query["all_versions"]),
            after=_cursor(asked.text("after")),
            limit=limit,
            deadline=_LOOK_S,
        )
        infos = [one.info for one in found]
        page = shapes.ArtifactPage(
            artifacts=await _each(showing.artifact, infos),
            after=showing.cursor_of(infos, limit),
        )
        return packed(page)

    async def _show_artifact(self, asked: Asked, _: Conditions) -> Answer:
        artifact = await self._artifact(asked)
        specs = await artifact.tensor_meta(deadline=_LOOK_S)
        places = await artifact.locations(deadline=_LOOK_S)
        whole = shapes.WholeArtifact(
            artifact=showing.artifact(artifact.info),
            tensors=await _each(partial(showing.tensor, artifact.info), specs.values()),
            replicas=[showing.replica(at) for at in places],
        )
        return packed(whole)

    async def _artifact(self, asked: Asked) -> Any:  # noqa: ANN401
        return await self._session.artifact(
            asked.path["id"], version=asked.whole("version"), deadline=_LOOK_S
        )

    async def _read_tensor(self, asked: Asked, given: Conditions) -> Answer:
        artifact, name = await self._artifact(asked), asked.path["name"]
        spec = await artifact.tensor_meta(name, deadline=_LOOK_S)
        etag = etag_of(artifact.generation, artifact.info.index_digest, name)
        headers = {
            "ETag": etag,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
            "X-Tensorcast-Version": str(artifact.version),
        }
        if unchanged(given.if_none_match, etag):
            return Answer(status=304, headers={"ETag": etag})
        part = part_of(given.range, spec.nbytes, etag=etag, if_range=given.if_range)
        if part.content_range:
            headers["Content-Range"] = part.content_range
        if part.status == 416:
            problem = RefusedError(416, f"the tensor has {spec.nbytes} bytes")
            failed = packed(answer_of(problem), status=416)
            failed.headers |= {"Content-Range": part.content_range, "ETag": etag}
            return failed
        headers["Content-Length"] = str(part.stop - part.start)
        if given.method == "HEAD":
            return Answer(status=part.status, headers=headers)
        memory = await self._session.read_part(artifact, name, part.start, part.stop)
        return Answer(status=part.status, headers=headers, memory=memory)

    # ------------------------------------------------------------ the cluster
    async def _list_nodes(self, _: Asked, __: Conditions) -> Answer:
        states = await self._session.nodes(deadline=_LOOK_S)
        return packed(shapes.Nodes(nodes=[showing.node(one) for one in states]))

    async def _list_instances(self, _: Asked, __: Conditions) -> Answer:
        found = await self._session.instances(deadline=_LOOK_S)
        shown = [showing.instance(one.state) for one in found]
        return packed(shapes.Instances(instances=shown))

    async def _read_signals(self, asked: Asked, _: Conditions) -> Answer:
        snapshot = await self._session.signals.snapshot(
            asked.lists["prefix"] or "", limit=asked.whole("limit") or 1
        )
        signals = shapes.Signals(
            signals=await _each(showing.signal, snapshot.values()),
            events=[showing.signal(one) for one in snapshot.events],
            more=snapshot.more,
        )
        return packed(signals)

    async def _watch_signals(self, asked: Asked, _: Conditions) -> Answer:
        watch = self._session.signals.watch(
            asked.lists["prefix"] or "", every=asked.number("every")
        )
        return Answer(events=self._changes(watch))

    async def _changes(self, watch: Any) -> AsyncGenerator[bytes, None]:  # noqa: ANN401
        try:
            while (changes := await watch.look()) is not None:
                if changes:
                    yield _event("changes", _shown(changes))
                else:  # a dead reader is found out by what is sent to it
                    yield b": nothing new\n\n"
        finally:
            with contextlib.suppress(TensorCastError):
                await watch.close()

    # ------------------------------------------------------------ plans
    async def _list_plans(self, asked: Asked, _: Conditions) -> Answer:
        snapshot = await self._session.signals.snapshot(
            f"plan/{asked.text('prefix')}", limit=asked.whole("limit") or 1
        )
        plans = [showing.plan_listed(one) for one in snapshot.values()]
        return packed(shapes.Plans(plans=plans, more=snapshot.more))

    async def _submit_plan(self, asked: Asked, given: Conditions) -> Answer:
        spec = PlanSpec.from_json(given.body)
        plan = self._session.plan(spec.context).load_spec(given.body)
        # Not offered to Dask: no worker has to wait for what only the catalog is asked.
        run = await plan._submit(asked.whole("concurrency"), "graph")  # noqa: SLF001
        return await self._state_of(run, status=202)

    async def _run(self, asked: Asked) -> PlanRun:
        return await find_run(self._session, asked.path["key"], offer=False)

    async def _show_plan(self, asked: Asked, _: Conditions) -> Answer:
        run = await self._run(asked)
        wait_s = asked.number("wait")
        if wait_s > 0:
            with contextlib.suppress(TimeoutError):
                return packed(_plan(await run.outcome(wait_s)))
        return await self._state_of(run)

    async def _watch_plan(self, asked: Asked, _: Conditions) -> Answer:
        run = await self._run(asked)
        return Answer(events=self._steps(run, asked.path["key"]))

    async def _steps(self, run: Any, key: str) -> AsyncGenerator[bytes, None]:  # noqa: ANN401
        told: object = None
        async with self._session.signals.watch(f"plan/{key}") as watch:
            while True:
                state = await run.state()
                stands = state.status, len(state)
                news = stands != told
                yield _event("plan", _plan(state)) if news else b": nothing new\n\n"
                told = stands
                if state.status != _RUNNING or await watch.look() is None:
                    return

    async def _cancel_plan(self, asked: Asked, _: Conditions) -> Answer:
        run = await self._run(asked)
        await run.cancel()
        return await self._state_of(run, status=202)

    async def _state_of(self, run: Any, *, status: int = 200) -> Answer:  # noqa: ANN401
        return packed(_plan(await run.state()), status=status)


async def _each(show: Callable[[S], T], given: Iterable[S]) -> list[T]:
    """Show one after the other (rule 4)."""
    made = []
    for number, one in enumerate(given):
        if number % _SLICE == 0:
            await asyncio.sleep(0)
        made.append(show(one))
    return made


def _shown(changes: Any) -> shapes.Changes:  # noqa: ANN401
    return shapes.Changes(
        changed=[showing.signal(one) for one in changes.changed.values()],
        gone=list(changes.gone),
        events=[showing.signal(one) for one in changes.events],
        missed=changes.missed,
    )


def _plan(result: Any) -> shapes.Plan:  # noqa: ANN401
    fault = result.error
    return shapes.Plan(
        key=result.key,
        status=result.status,
        message=result.message,
        error=None if fault is None else answer_of(fault).error,
        steps={name: _step(result[name]) for name in result},
    )


def _step(ended: Any) -> shapes.StepEnded:  # noqa: ANN401
    fault = ended.fault
    return shapes.StepEnded(
        status=ended.status,
        node=ended.node,
        bytes=ended.bytes,
        seconds=ended.seconds,
        attempts=ended.attempts,
        error=None if fault is None else answer_of(fault).error,
        value=None if ended.pickled else _value(ended.value),
    )


def _value(value: Any) -> object:  # noqa: ANN401
    """Show what a step gave; an artifact as artifacts are shown."""
    return showing.value(value.info if isinstance(value, Artifact) else value)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        message = f"parameter 'label' takes NAME=VALUE, not {text[:60]!r}"
        raise InvalidArgument(message)
    return name, value


def _cursor(text: str) -> tuple[str, int] | None:
    if not text:
        return None
    number, colon, name = text.partition(":")
    if not (colon and number.isascii() and number.isdecimal() and len(number) < 19):
        message = "parameter 'after' takes the `after` of a page"
        raise InvalidArgument(message)
    return name, int(number)
