from __future__ import annotations

from tensorcast_dask.worker_plugin.state.tries import Tries


def test_each_failure_doubles_the_pause_up_to_a_minute() -> None:
    tries = Tries()
    assert [tries.failed() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_what_lived_for_a_minute_begins_anew() -> None:
    tries = Tries()
    tries.failed()
    tries.lived(59.0)
    assert tries.failed() == 2
    tries.lived(60.0)
    assert tries.failed() == 1
