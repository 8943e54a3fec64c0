"""P35: bytes move and small reads are answered while a worker's interpreter is held."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

import tensorcast_dask as tc
from tensorcast_dask.dataplane import memory
from tests.kit.baseline import baseline, no_lease_lost
from tests.kit.eventually import eventually
from tests.kit.faulty import faulty_cluster, whole
from tests.kit.tasks import keep_the_gil, keep_the_gil_until

SMALL = np.arange(100)


class Asking(threading.Thread):
    """A program that reads something small again and again."""

    def __init__(self, session: tc.Session) -> None:
        super().__init__()
        self.session = session
        self.over = threading.Event()
        self.reads = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        while not self.over.is_set() and not self.wrong:
            try:
                small = self.session.artifact("small", deadline=20)
                got = small.tensor(framework="numpy", deadline=20)
                assert (got == SMALL).all()
            except Exception as error:  # noqa: BLE001 - whatever it is, the test tells it
                self.wrong.append(repr(error))
            self.reads += 1
            self.over.wait(0.01)  # scene: not as fast as it can


_SLOW = pytest.mark.slow  # up to 4 GiB are moved


@pytest.mark.timeout(300)  # for hangs, not for busy machines
@pytest.mark.parametrize(
    ("strangers", "nbytes"),
    [
        pytest.param(True, 64 << 20, id="strangers"),
        pytest.param(True, 512 << 20, id="strangers, much", marks=_SLOW),
        pytest.param(False, 512 << 20, id="one host, much", marks=_SLOW),
    ],
)
def test_p35_no_worker_and_no_lease_is_lost_while_bytes_move_and_the_gil_is_held(
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
    nbytes: int,
    strangers: bool,
) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    with (
        faulty_cluster(
            tmp_path_factory.mktemp("run"),
            2,
            separate_hosts=strangers,
            host_memory=4 * nbytes,
            settings={"lease": {"ttl": "2s"}},
        ) as (cluster, _),
        tc.connect(cluster) as session,
    ):
        whole(session, 2)
        with baseline(session), no_lease_lost(session.client, session.nodes()):
            workers = session.workers()
            session.put(SMALL, "small")
            asking = Asking(session)
            asking.start()
            client = session.client
            held = client.submit(
                keep_the_gil_until, fifo, workers=[workers[0].address], pure=False
            )
            eventually(lambda: any(client.processing().values()), within_s=30)
            content = np.full(nbytes, 7, np.uint8)
            content[::4096] = np.arange(nbytes // 4096) % 251
            for number, worker in enumerate(workers):
                artifact = session.put({"x": content}, f"big/{number}", worker=worker)
                session.save(artifact, tmp_path / "m.safetensors")
                loaded = session.load(
                    tmp_path / "m.safetensors", f"loaded/{number}", worker=worker
                ).result()
                got = loaded.tensor(framework="numpy")
                assert memory.sum_of(got) == memory.sum_of(content)
                del got
            seen = asking.reads
            eventually(lambda: asking.reads > seen + 2, within_s=30)
            assert not held.done()
            fd = os.open(fifo, os.O_WRONLY)
            os.write(fd, b"x")
            os.close(fd)
            assert held.result(60)
            # Longer than the lease, with nothing else to do.
            assert client.submit(
                keep_the_gil, 3, workers=[workers[1].address], pure=False
            ).result(60)
            asking.over.set()
            asking.join(60)
            assert not asking.wrong
            assert {w.address for w in session.workers()} == {
                w.address for w in workers
            }
            for found in session.list():
                session.destroy(found.id)
