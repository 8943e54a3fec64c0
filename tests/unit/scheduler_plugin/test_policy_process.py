"""The process of a policy, as it is started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
from distributed.protocol.pickle import dumps

from tensorcast_dask.policies import Copy, MoveRequest, Role, Spread, View, Wanted
from tensorcast_dask.policies.views import Decided, NodeView
from tensorcast_dask.scheduler_plugin.policy_process import (
    LENGTH,
    Answered,
    Question,
    checked,
)
from tests.kit.source import ROOT

MODULE = "tensorcast_dask.scheduler_plugin.policy_process"
VIEW = View(
    now_s=1.0, nodes=(NodeView(node="a", host="h", capacity_bytes=9, free_bytes=9),)
)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-m", MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as started:
        yield started
        started.kill()


def ask(process: subprocess.Popen[bytes], question: Question) -> Answered:
    assert process.stdin is not None
    assert process.stdout is not None
    raw = msgspec.msgpack.encode(question)
    process.stdin.write(LENGTH.pack(len(raw)) + raw)
    process.stdin.flush()
    (length,) = LENGTH.unpack(process.stdout.read(LENGTH.size))
    return msgspec.msgpack.decode(process.stdout.read(length), type=Answered)


def test_a_policy_is_loaded_asked_and_ends_with_its_pipe_however_busy(
    process: subprocess.Popen[bytes],
) -> None:
    class Odd:
        role = Role.PLACE

        def decide(self, view: View, wanted: Wanted) -> str:
            print("what a policy prints is no frame")  # noqa: T201
            if wanted.id == "bad":
                raise ValueError(wanted.id)
            while wanted.id == "for ever":
                pass
            return view.nodes[0].node

    assert ask(process, Question(blob=dumps(Odd()))) == Answered()
    good = Question(number=1, view=VIEW, wanted=Wanted(id="x", nbytes=1))
    assert ask(process, good) == Answered(number=1, decided=Decided(node="a"))
    bad = Question(number=2, view=VIEW, wanted=Wanted(id="bad", nbytes=1))
    assert ask(process, bad) == Answered(number=2, error="ValueError: bad")
    assert process.stdin is not None
    busy = Question(number=3, view=VIEW, wanted=Wanted(id="for ever", nbytes=1))
    raw = msgspec.msgpack.encode(busy)
    process.stdin.write(LENGTH.pack(len(raw)) + raw)
    process.stdin.close()
    assert process.wait(60) == 0


def test_what_cannot_be_loaded_is_said(process: subprocess.Popen[bytes]) -> None:
    assert "UnpicklingError" in ask(process, Question(blob=b"x")).error
    assert "AttributeError" in ask(process, Question(blob=dumps(3))).error
    assert ask(process, Question(blob=dumps(Spread()))) == Answered()


def test_what_a_policy_returns_must_fit_its_role() -> None:
    copy = Copy(generation=1, node="a")
    move = MoveRequest(request="r", source="i", target="k")
    assert checked(Role.PLACE, "a") == Decided(node="a")
    assert checked(Role.ADMIT, "no") == Decided(refusal="no")
    assert checked(Role.ADMIT, None) == Decided()
    assert checked(Role.EVICT, {1: 2}) == Decided(weights={1: 2.0})
    assert checked(Role.REPLICATE, iter([copy])) == Decided(actions=(copy,))
    assert checked(Role.REBALANCE, [move]) == Decided(actions=(move,))
    for role, bad in (
        (Role.PLACE, 3),
        (Role.ADMIT, False),
        (Role.EVICT, [1]),
        (Role.REPLICATE, ["a"]),
        (Role.REBALANCE, None),
    ):
        with pytest.raises(TypeError, match=str(role)):
            checked(role, bad)
