"""Changes under a request id: carried out once, whatever how often they are asked for.

Rules:

1. The first answer is the answer; another payload under the id is refused (Mismatch).
2. A repeat that comes while the first is being carried out waits for it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from tensorcast_dask.dataplane.server import Reply
from tensorcast_dask.exceptions import (
    Incomplete,
    TensorCastError,
)
from tensorcast_dask.store.core import Core, now_s
from tensorcast_dask.store.state.results import NEW, RUNNING
from tensorcast_dask.tensors.checksums import chunk_sum
from tensorcast_dask.tensors.messages import (
    Adopt,
    Commit,
    End,
    Fault,
    LetGo,
    Refused,
    StoreReply,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["once"]

_REPEAT_S: Final = 10.0


def once(
    core: Core,
    request: Commit | Adopt | LetGo | End,
    change: Callable[[], StoreReply],
    *,
    extra: bytes = b"",
) -> Reply:
    """Carry a change out once, whatever how often it is asked for (rule 3)."""
    rid, results = request.rid, core.results
    digest = chunk_sum(encode(request) + extra)
    until_s = now_s() + _REPEAT_S
    while True:
        with core.lock:
            begun = results.begin(rid, digest=digest, now_s=now_s())
        if begun is not RUNNING:
            break
        if now_s() >= until_s:
            message = f"request {rid!r} is still being carried out; ask again"
            raise Incomplete(message)
        time.sleep(0.005)
    if begun is not NEW:
        return Reply(message=begun)
    answer: StoreReply | None = None
    try:
        answer = change()
    except TensorCastError as error:
        answer = Refused(fault=Fault.of(error))
    finally:
        with core.lock:
            if answer is None:
                results.forget(rid)
            else:
                results.finish(rid, answer, now_s=now_s())
    return Reply(message=answer)
