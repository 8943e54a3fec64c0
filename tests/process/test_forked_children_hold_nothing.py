"""A process that serves or talks forks a child and dies: nobody takes it for alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from tensorcast_dask.dataplane.channel import Channel, Credentials, Prefer
from tensorcast_dask.exceptions import PeerLost
from tensorcast_dask.tensors.messages import NodeCard
from tests.kit.eventually import eventually
from tests.kit.holders import CLUSTER, TOKEN, Served, serve

pytestmark = pytest.mark.process

_TALK = """
import msgspec, os, sys
from tensorcast_dask.dataplane.channel import Channel, Credentials, Prefer
from tensorcast_dask.tensors.messages import NodeCard, State, StateAsked
from tests.kit.holders import CLUSTER, TOKEN
card = msgspec.json.decode(sys.argv[1], type=NodeCard)
ours = Credentials(cluster=CLUSTER, token=TOKEN, host=card.host)
channels = [Channel.connect(card, credentials=ours, prefer=p) for p in (Prefer.UNIX, Prefer.TCP)]
"""

_SERVE = """
import msgspec, os, sys
from tests.kit.holders import serve
held = serve(b"bytes")
print(msgspec.json.encode(held.__enter__().card).decode(), flush=True)
"""

# The child outlives its parent until the test ends the pipe.
_FORK = """
pid = os.fork()
if pid == 0:
    sys.stdin.read()
    os._exit(0)
print(pid, flush=True)
os.kill(os.getpid(), 9)
"""


def start(code: str, *args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code + _FORK, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.fixture
def served() -> Iterator[Served]:
    with serve(b"bytes") as served:
        yield served


def lives(pid: int) -> bool:
    os.kill(pid, 0)
    return True


def test_the_connections_of_a_dead_process_end_while_its_child_lives(
    served: Served,
) -> None:
    process = start(_TALK, msgspec.json.encode(served.card).decode())
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert process.wait(30) == -signal.SIGKILL
    eventually(lambda: served.server.connections == 0, within_s=10)
    assert lives(child)
    process.communicate()


def test_the_ports_of_a_dead_process_are_closed_while_its_child_lives() -> None:
    process = start(_SERVE)
    assert process.stdout is not None
    card = msgspec.json.decode(process.stdout.readline(), type=NodeCard)
    child = int(process.stdout.readline())
    assert process.wait(30) == -signal.SIGKILL
    ours = Credentials(cluster=CLUSTER, token=TOKEN, host=card.host)
    for prefer in (Prefer.UNIX, Prefer.TCP):
        with pytest.raises(PeerLost, match=r"cannot be reached|reset by peer"):
            Channel.connect(card, credentials=ours, prefer=prefer)
    assert lives(child)
    process.communicate()
