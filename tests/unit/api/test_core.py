"""What every call of a session does with errors that are not ours."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest
from tornado.ioloop import IOLoop

from tensorcast_dask.api.connection.core import Core, typed
from tensorcast_dask.exceptions import CapacityError, DeadlineExceeded


async def fails(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    "number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC]
)
def test_what_the_system_has_run_out_of_is_a_capacity_error(number: int) -> None:
    with pytest.raises(CapacityError, match="left"):
        asyncio.run(typed(fails, OSError(number, "why")))


@pytest.mark.parametrize(
    "error", [DeadlineExceeded("late"), FileNotFoundError(2, "none"), OSError("said")]
)
def test_every_other_error_is_left_as_it_is(error: OSError) -> None:
    with pytest.raises(type(error)) as raised:
        asyncio.run(typed(fails, error))
    assert raised.value is error


def test_what_a_notebook_shows_is_left_out_when_the_event_loop_is_gone() -> None:
    loop = IOLoop(make_current=False)
    loop.close()
    nothing: Any = None
    core = Core(
        loop=loop,
        link=nothing,
        stores=nothing,
        client=nothing,
        host=nothing,
        devices=nothing,
        deadline_default_s=1.0,
    )

    async def look(_: object) -> str:
        return "never seen"

    assert core.glimpse(look) is None
    core.close()
    assert core.glimpse(look) is None
