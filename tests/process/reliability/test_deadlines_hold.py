"""P34: every call that takes a deadline, with every kind of deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.exceptions import (
    DeadlineExceeded,
    InvalidArgument,
    TensorCastError,
)
from tests.kit.baseline import baseline
from tests.kit.faulty import Faults, faulty_cluster, others, whole

GOOD = (0, 0.0, 1e-9, None, math.inf)
BAD = (-1, math.nan, "3")
#: What a call that is to look once may take on a machine that is busy with other things.
LOOK_S = 10.0
CONTENT = {"x": np.arange(400_000.0)}
SPEC = {"x": ((400_000,), "float64")}

Call = Callable[[Any, Any, Any], Any]


def mine(session: Any, ref: Any) -> list[Any]:
    """Two nodes: one that holds it, where one does, and another."""
    first, second = session.workers()
    if isinstance(ref, tc.Artifact) and others(session, ref) == [first]:
        return [second, first]
    return [first, second]


def commit(session: Any, deadline: Any) -> None:
    with session.create(SPEC, "p34/made") as draft:
        draft.commit(deadline=deadline)


def register(session: Any, deadline: Any) -> None:
    with tc.connect(session.client) as lender:  # it is a node until it is closed
        lender.register(CONTENT, "p34/made", deadline=deadline)


#: Calls on what is there or not: an id of something half made, or a handle.
ON_ARTIFACTS: dict[str, Call] = {
    "artifact": lambda s, r, d: s.artifact(getattr(r, "id", r), deadline=d),
    "latest": lambda s, r, d: s.latest(getattr(r, "id", r), deadline=d),
    "exists": lambda s, r, d: s.exists(getattr(r, "id", r), deadline=d),
    "list": lambda s, r, d: s.list(getattr(r, "id", r), deadline=d),
    "publish": lambda s, r, d: s.publish(r, deadline=d),
    "replicate": lambda s, r, d: s.replicate(r, mine(s, r)[1], deadline=d),
    "prefetch": lambda s, r, d: s.prefetch(r, deadline=d, wait=True),
    "migrate": lambda s, r, d: s.migrate(r, *mine(s, r), deadline=d),
    "release": lambda s, r, d: s.release(r, worker=mine(s, r)[1], deadline=d),
    "pin": lambda s, r, d: s.unpin(r, s.pin(r, deadline=d).pin),
    "save": lambda s, r, d: s.save(r, s.folder / "m.safetensors", deadline=d),
    "destroy": lambda s, r, d: s.destroy(r, deadline=d),
    "locations": lambda s, r, d: s.locations(r, deadline=d),
}
#: Calls on a handle only.
ON_HANDLES: dict[str, Call] = {
    "tensor_dict": lambda _, r, d: r.tensor_dict(framework="numpy", deadline=d),
    "tensor_meta": lambda _, r, d: r.tensor_meta(deadline=d),
    "view": lambda _, r, d: r.view(tc.s_[:10], deadline=d),
    "tensor": lambda _, r, d: r.tensor(framework="numpy", deadline=d),
    "into": lambda _, r, d: r.tensor_dict_into({"x": np.zeros(400_000)}, deadline=d),
    "alias": lambda s, r, d: s.alias("p34/alias", r, deadline=d),
}
#: Calls that make something, or ask the whole cluster.
OTHERS: dict[str, Call] = {
    "put": lambda s, _, d: s.put(CONTENT, "p34/made", deadline=d),
    "create": lambda s, _, d: s.create(SPEC, "p34/made", deadline=d).abort(),
    "commit": lambda s, _, d: commit(s, d),
    "register": lambda s, _, d: register(s, d),
    "load": lambda s, _, d: s.load(s.folder / "there", "p34/made", deadline=d),
    "sql": lambda s, _, d: s.sql("select count(*) from versions", deadline=d),
    "workers": lambda s, _, d: s.workers(deadline=d),
    "nodes": lambda s, _, d: s.nodes(deadline=d),
    "pool": lambda s, _, d: s.pool(deadline=d),
    "explain": lambda s, _, d: s.explain(s.workers()[0], deadline=d),
    "debug_state": lambda s, _, d: s.debug_state(deadline=d),
    "wait": lambda s, r, d: s.publish(r).wait(d),
    "result": lambda s, r, d: s.publish(r).result(d),
    "exception": lambda s, r, d: s.publish(r).exception(d),
    "connect": lambda s, _, d: tc.connect(s.client, deadline=d).close(),
}


@pytest.fixture(scope="module")
def scene(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Any, Faults]]:
    with (
        faulty_cluster(
            tmp_path_factory.mktemp("run"),
            2,
            host_memory="24 MiB",
            disk=True,
            settings={"lease": {"ttl": "2s"}},
        ) as (cluster, faults),
        tc.connect(cluster) as session,
    ):
        whole(session, 2)
        session.folder = tmp_path_factory.mktemp("files")
        session.alias("p34/alias", session.put(CONTENT, "p34/there"))
        clear(session)  # the count of an alias's moves is kept for ever
        yield session, faults


def timed(call: Call, session: Any, ref: Any, deadline: Any) -> Any:
    """Call; give what it returned, or the typed error it raised."""
    began_s = time.monotonic()
    try:
        outcome = call(session, ref, deadline)
    except TensorCastError as error:
        outcome = error
    assert time.monotonic() - began_s < LOOK_S
    return outcome


def clear(session: Any) -> None:
    session.alias("p34/alias", None)
    for artifact in session.list("p34", all_versions=True):
        session.destroy(artifact.id)
    session.destroy("p34/made")


def refuses(call: Call, session: Any, ref: Any) -> None:
    for bad in BAD:
        with pytest.raises(InvalidArgument, match="deadline"):
            call(session, ref, bad)


@pytest.mark.parametrize("name", [*ON_ARTIFACTS, *ON_HANDLES, *OTHERS])
def test_p34_a_call_on_what_is_there_ends_in_time_or_is_refused(
    scene: tuple[Any, Faults], name: str
) -> None:
    session, _ = scene
    call = (ON_ARTIFACTS | ON_HANDLES | OTHERS)[name]
    with baseline(session):
        for deadline in GOOD:
            artifact = session.put(CONTENT, "p34/there")
            if name == "load":
                session.save(artifact, session.folder / "there")
            outcome = timed(call, session, artifact, deadline)
            if deadline in {None, math.inf}:
                assert not isinstance(outcome, DeadlineExceeded), outcome
            elif isinstance(outcome, TensorCastError):
                assert isinstance(outcome, DeadlineExceeded) or name in {
                    "latest",
                    "release",
                }
            if session.exists("p34/there"):
                got = session.artifact("p34/there").tensor(framework="numpy")
                assert (got == CONTENT["x"]).all()
                del got
            del outcome, artifact
            clear(session)
        refuses(call, session, session.put(CONTENT, "p34/there"))
        clear(session)


@pytest.mark.parametrize("name", ON_ARTIFACTS)
def test_p34_a_call_on_what_is_not_there_yet_ends_in_time_or_is_refused(
    scene: tuple[Any, Faults], name: str
) -> None:
    session, _ = scene
    call = ON_ARTIFACTS[name]
    with baseline(session):
        for deadline in GOOD:
            draft = session.create(SPEC, "p34/half")
            timed(call, session, "p34/half", deadline)
            draft.abort()
        refuses(call, session, "p34/half")
        clear(session)


def test_p34_who_does_not_wait_is_not_held_up_by_a_slow_disk(
    scene: tuple[Any, Faults],
) -> None:
    """After many saves a disk may be slow: a read that must wait for it says so."""
    session, faults = scene
    contents = [np.full(4 << 20, n, np.uint8) for n in range(14)]
    with baseline(session):
        made = [session.put({"x": c}, f"p34/{n}") for n, c in enumerate(contents)]
        for artifact in made:
            session.save(artifact, session.folder / "same.safetensors")
        rows = session.sql("select id, tier from replicas order by id").rows
        on_disk = {name for name, tier in rows if tier == "disk"}
        in_memory = {name for name, tier in rows if tier == "host"}
        assert on_disk - in_memory
        with faults.armed("load.chunk=delay:0.7"), tc.connect(session.client) as fresh:
            for reader in (session, fresh):
                for artifact, content in zip(made, contents, strict=True):
                    got = timed(read, reader, reader.artifact(artifact.id), 0)
                    if artifact.id in in_memory:
                        assert (got == content).all()
                    else:
                        assert isinstance(got, DeadlineExceeded), got
            slow = next(a for a in made if a.id in on_disk - in_memory)
            got = timed(read, fresh, slow, 0.2)  # late by a moment, or refused
            assert isinstance(got, np.ndarray | DeadlineExceeded), got
        for artifact, content in zip(made, contents, strict=True):
            assert (artifact.tensor(framework="numpy") == content).all()
        del got
        clear(session)


read = ON_HANDLES["tensor"]
