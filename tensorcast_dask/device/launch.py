"""Starting a device process beside a store, and hearing whether it is there.

Rules:

1. It is detached as a store is: a session of its own, its log in the store's folder. It ends
   with the store's connection, not with the worker that started it.
2. What it is told goes over its stdin; what became of it comes back over its stdout, once.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

from tensorcast_dask.exceptions import DeviceError, TensorCastError
from tensorcast_dask.tensors.messages import DeviceStart, DeviceTold, decode, encode

__all__ = ["LOG_NAME", "launch"]

LOG_NAME: Final = "device-log"
_PIECE_BYTES: Final = 65536


def launch(told: DeviceStart, timeout_s: float) -> DeviceTold:
    """Start a device process and wait until it is attached to its store.

    Raises
    ------
    UnsupportedPlatform, DeviceError, CapacityError
        When there is no such device, or it cannot be used; it says what is missing.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorcast_dask.device"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        close_fds=True,
        start_new_session=True,
        cwd="/",
        env=_environment(),
    )
    threading.Thread(target=process.wait, name="tensorcast-reap", daemon=True).start()
    assert process.stdin is not None, "device: Popen was asked for a pipe"
    assert process.stdout is not None, "device: Popen was asked for a pipe"
    try:
        with process.stdin as pipe:
            pipe.write(encode(told))
        with process.stdout as pipe:
            answer = _read(pipe.fileno(), time.monotonic() + timeout_s)
        found = decode(answer, DeviceTold)
    except (OSError, TensorCastError) as error:
        process.kill()
        log = Path(told.card.socket).with_name(LOG_NAME)
        message = f"the device process did not come up within {timeout_s:g} s ({error}); see {log}"
        raise DeviceError(message) from error
    except BaseException:
        process.kill()
        raise
    if found.fault is not None:
        raise found.fault.error()
    return found


def _read(fd: int, until_s: float) -> bytes:
    """Read until the other end closes."""
    data = b""
    while True:
        ready, _, _ = select.select([fd], [], [], max(0.0, until_s - time.monotonic()))
        if not ready:
            message = "it says nothing"
            raise TimeoutError(message)
        piece = os.read(fd, _PIECE_BYTES)
        if not piece:
            return data
        data += piece


def _environment() -> dict[str, str]:
    """Let it import what we import, wherever that came from."""
    package = str(Path(__file__).resolve().parents[2])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    known = [path for path in paths if path and path != package]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([package, *known])}
