"""How a store's process is ended."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace

import pytest

from tensorcast_dask.store.main import _signals


@pytest.mark.timeout(20)
def test_a_signal_that_meets_the_main_thread_at_its_clock_ends_the_store() -> None:
    ends = SimpleNamespace(ending=threading.Event(), signalled=0)
    kept = {
        n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGHUP, signal.SIGIO)
    }
    before = signal.getsignal(signal.SIGTERM)
    try:
        _signals(ends)  # type: ignore[arg-type]
        with ends.ending._cond:  # where `wait` is when its time is over
            os.kill(os.getpid(), signal.SIGTERM)
        assert ends.signalled == signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
        for number, handler in kept.items():
            signal.signal(number, handler)
