"""P32: what was told is there after a kill -9 at any moment of a commit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tensorcast_dask.scheduler_plugin.state.numbers import digest_of
from tests.kit.journals import OpenJournal

WRITER = """
import sys, threading
from tensorcast_dask.scheduler_plugin.journal import Journal
from tensorcast_dask.scheduler_plugin.state.events import Journaled
from tests.kit.journals import batch

def tell(news):
    if isinstance(news, Journaled):
        sys.stdout.write(f"{news.seq}\\n")
        sys.stdout.flush()
        room.release()

room = threading.Semaphore(8)
journal = Journal.open(sys.argv[1], notify=tell)
for seq in range(journal.recovered.seq + 1, 1 << 30):
    room.acquire()
    journal.submit(batch(seq))
"""

LIVES = 6


def killed_after(path: Path, told: int) -> int:
    """Write in a child, kill it once it has told so many; the last number it told."""
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdout is not None
    last = 0
    try:
        for count, line in enumerate(child.stdout):
            last = int(line)
            if count >= told:
                break
        child.send_signal(signal.SIGKILL)
        for line in child.stdout:  # what it told before it died
            last = int(line) if line.endswith("\n") else last
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    return last


@pytest.mark.timeout(120)
def test_p32_nothing_that_was_told_is_lost_by_kills_in_the_middle_of_commits(
    tmp_path: Path,
) -> None:
    path = tmp_path / "j"
    for life in range(LIVES):
        told = killed_after(path, 3 + 7 * life)
        with OpenJournal(path) as again:
            found = again.journal.recovered
            assert not found.lost, found.said
            assert found.epoch == 2 * life + 2
            assert found.seq >= told
            assert again.changes() == list(range(1, found.seq + 1))
            assert found.issued[digest_of("x")] >= told
