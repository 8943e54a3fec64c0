"""Holders that send over UCX, ended and stopped in the middle of a message.

A reader's memory is its own again once the error is there: nothing writes to it any more,
whatever the holder does when it goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from tensorcast_dask.dataplane.channel import Credentials, Prefer
from tensorcast_dask.dataplane.memory import private
from tensorcast_dask.dataplane.server import Limits
from tensorcast_dask.dataplane.transports import ucx_line
from tensorcast_dask.dataplane.transports.base import Context, Work, open_source
from tensorcast_dask.exceptions import PeerLost
from tensorcast_dask.tensors.messages import Location, NodeCard, Tier
from tests.kit.eventually import eventually
from tests.kit.holders import CLUSTER, GENERATION, TOKEN, holder_process, serve
from tests.kit.leaks import Footprint, no_leaks
from tests.kit.ucx_holders import NO_UCX, UcxHolder

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX),
]

#: One chunk, of many pieces: its transfer takes long enough to have a middle.
CHUNK_BYTES = 128 << 20
LANES = ["tcp,self", "tcp,cma,self"]

_CODE = f"""
import msgspec, sys
from tensorcast_dask.dataplane.transports import ucx_line
from tests.kit.holders import serve
from tests.kit.ucx_holders import UcxHolder
ucx_line.offered()  # loading it takes longer than the reader's patience
with serve(b"x" * {CHUNK_BYTES}, chunk_bytes={CHUNK_BYTES}, holder=UcxHolder) as served:
    print(msgspec.json.encode(served.card).decode(), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(params=LANES)
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("UCX_TLS", request.param)
    return str(request.param)


@pytest.fixture
def holder(lanes: str) -> Iterator[tuple[subprocess.Popen[bytes], NodeCard]]:
    with holder_process(_CODE) as made:
        yield made


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_holder_lost_in_a_message_is_an_error_and_memory_is_given_back(
    holder: tuple[subprocess.Popen[bytes], NodeCard], how: signal.Signals
) -> None:
    process, card = holder
    ucx_line.offered()  # what loading it opens stays
    before = Footprint.now().descriptors
    context = Context(
        credentials=Credentials(
            cluster=CLUSTER, token=TOKEN, host=card.host, stall_s=2.0
        ),
        prefer=Prefer.TCP,
        until_s=time.monotonic() + 60,
        any_lane=True,
    )
    source = open_source(
        Location(card=card, tier=Tier.HOST), GENERATION, scheme="ucx", context=context
    )
    into = private(CHUNK_BYTES)

    def strike() -> None:
        eventually(lambda: into[1] == ord("x"), within_s=30)
        process.send_signal(how)

    striker = threading.Thread(target=strike)
    striker.start()
    todo = [Work(0, into)]
    try:
        arrived = list(source.read_chunks(lambda: todo.pop() if todo else None))
    except PeerLost:
        assert into[-1] == 0  # it was in the middle
    else:  # a stopped process's memory can be read all the same
        assert how is signal.SIGSTOP
        assert "cma" in source.via
        assert arrived[0].nbytes == CHUNK_BYTES
    striker.join()
    source.close()
    assert Footprint.now().descriptors == before
    into[:] = bytes(CHUNK_BYTES)
    process.send_signal(signal.SIGCONT)  # what it still has to say reaches nobody
    time.sleep(0.3)  # scene: time enough to write
    assert bytes(into) == bytes(CHUNK_BYTES)


_READER = """
import msgspec, sys, time
from tensorcast_dask.dataplane.channel import Credentials, Prefer
from tensorcast_dask.dataplane.memory import private
from tensorcast_dask.dataplane.transports.base import Context, Work, open_source
from tensorcast_dask.tensors.messages import Location, NodeCard, Tier
from tests.kit.holders import CLUSTER, GENERATION, TOKEN
card = msgspec.json.decode(sys.argv[1], type=NodeCard)
context = Context(
    credentials=Credentials(cluster=CLUSTER, token=TOKEN, host=card.host),
    prefer=Prefer.TCP, any_lane=True,
)
source = open_source(
    Location(card=card, tier=Tier.HOST), GENERATION, scheme="ucx", context=context
)
into = private(card.pid)
print("open", flush=True)
while True:
    work = [Work(0, into)]
    for arrived in source.read_chunks(lambda: work.pop() if work else None):
        pass
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_lost_in_a_message_gives_the_lease_back(
    lanes: str, how: signal.Signals
) -> None:
    nbytes = 32 << 20
    ucx_line.offered()
    limits = Limits(stall_s=1.0)
    with (
        serve(
            b"x" * nbytes, chunk_bytes=nbytes, holder=UcxHolder, limits=limits
        ) as served,
        no_leaks(threads=True, within_s=20),
    ):
        card = msgspec.structs.replace(served.card, pid=nbytes)
        process = subprocess.Popen(
            [sys.executable, "-c", _READER, msgspec.json.encode(card).decode()],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"open\n"
            time.sleep(0.2)  # scene: it reads without end
            process.send_signal(how)
            # Stopped between two messages it only holds its connection, as any reader may.
            handler = served.server._handler
            assert isinstance(handler, UcxHolder)
            eventually(lambda: not handler.sending, within_s=10)
        finally:
            process.kill()
            process.communicate()
