"""Real processes that serve bytes, ended and stopped while somebody reads from them."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tensorcast_dask.dataplane.channel import Credentials
from tensorcast_dask.dataplane.transports.base import (
    Context,
    Source,
    Work,
    open_source,
)
from tensorcast_dask.exceptions import DeadlineExceeded, PeerLost
from tensorcast_dask.tensors.messages import Location, NodeCard, Tier
from tests.kit.contracts_transport import pattern
from tests.kit.holders import CLUSTER, GENERATION, TOKEN, holder_process

pytestmark = pytest.mark.process

CHUNK_BYTES = 64 << 10
CHUNKS = 64

# The holder sends at a few megabytes a second, so that there is a middle to die in.
_CODE = f"""
import msgspec, sys
from tensorcast_dask.dataplane.server import Limits
from tests.kit.contracts_transport import pattern
from tests.kit.holders import serve
slow = Limits(bandwidth_bytes_per_s=4 << 20)
with serve(pattern({CHUNKS * CHUNK_BYTES}), chunk_bytes={CHUNK_BYTES}, limits=slow) as served:
    print(msgspec.json.encode(served.card).decode(), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder() -> Iterator[tuple[subprocess.Popen[bytes], NodeCard]]:
    with holder_process(_CODE) as made:
        yield made


def source_on(card: NodeCard, scheme: str, *, stall_s: float = 5.0) -> Source:
    credentials = Credentials(
        cluster=CLUSTER, token=TOKEN, host=card.host, stall_s=stall_s
    )
    return open_source(
        Location(card=card, tier=Tier.HOST),
        GENERATION,
        scheme=scheme,
        context=Context(credentials=credentials, until_s=time.monotonic() + 20),
    )


def read_until(source: Source, then: int, act: threading.Event) -> list[bytes]:
    """Read all chunks; set `act` once `then` of them have arrived."""
    todo = iter(range(CHUNKS))
    got: list[bytes] = []

    def work() -> Work | None:
        chunk = next(todo, None)
        return None if chunk is None else Work(chunk, bytearray(CHUNK_BYTES))

    for arrived in source.read_chunks(work):
        got.append(bytes(arrived.work.into))
        if len(got) == then:
            act.set()
    return got


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
def test_a_holder_that_is_killed_while_it_sends_is_peer_lost(
    holder: tuple[subprocess.Popen[bytes], NodeCard], scheme: str
) -> None:
    process, card = holder
    source = source_on(card, scheme)
    act = threading.Event()

    def kill() -> None:
        act.wait(20)
        process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(PeerLost):
        read_until(source, 5, act)
    killer.join()
    source.close()


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
def test_a_holder_that_is_stopped_while_it_sends_is_left(
    holder: tuple[subprocess.Popen[bytes], NodeCard], scheme: str
) -> None:
    process, card = holder
    source = source_on(card, scheme, stall_s=0.5)
    act = threading.Event()

    def stop() -> None:
        act.wait(20)
        process.send_signal(signal.SIGSTOP)

    stopper = threading.Thread(target=stop)
    stopper.start()
    began_s = time.monotonic()
    with pytest.raises(PeerLost, match="stalled"):
        read_until(source, 5, act)
    assert time.monotonic() - began_s < 10
    stopper.join()
    source.close()


def test_a_stopped_holder_lets_nobody_in_and_the_deadline_holds(
    holder: tuple[subprocess.Popen[bytes], NodeCard],
) -> None:
    process, card = holder
    process.send_signal(signal.SIGSTOP)
    for scheme in ("tcp", "unix"):
        credentials = Credentials(cluster=CLUSTER, token=TOKEN, host=card.host)
        context = Context(credentials=credentials)
        with pytest.raises(DeadlineExceeded):
            open_source(
                Location(card=card, tier=Tier.HOST),
                GENERATION,
                scheme=scheme,
                context=replace(context, until_s=time.monotonic() + 0.3),
            )


def test_what_is_mapped_outlives_its_holder(
    holder: tuple[subprocess.Popen[bytes], NodeCard],
) -> None:
    process, card = holder
    source = source_on(card, "shm")
    into = bytearray(CHUNK_BYTES)
    source.read_chunk(0, into)
    process.kill()
    process.wait()
    act = threading.Event()
    assert b"".join(read_until(source, 1, act)) == pattern(CHUNKS * CHUNK_BYTES)
    source.close()
