"""What both CUDA backends share: waiting for events, the meaning of error codes.

Rules:

1. A code means one of four things: no room, something that the caller gave, a machine that
   cannot, or the end of the device for this process. What is not known is the last.
2. Waiting without a bound leaves it to the driver; with one it polls.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.exceptions import (
    AlreadyExists,
    CapacityError,
    DeviceError,
    InvalidArgument,
    OwnerGone,
    TensorCastError,
    UnsupportedPlatform,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = ["CudaTicket", "allocation_of", "error_of_code"]

_LONGEST_PAUSE_S: Final = 0.001

# Numbers of `cudaError_t`, which NVIDIA does not change.
_INVALID_VALUE: Final = 1
_MEMORY_ALLOCATION: Final = 2
_NO_MACHINE: Final = {
    3: "CUDA cannot start here",
    34: "only a stub of the CUDA driver is installed",
    35: "there is no NVIDIA driver, or an older one than this CUDA needs",
    100: "the NVIDIA driver shows no device",
    803: "the NVIDIA driver and its libraries are of different releases",
    804: "the NVIDIA driver is too old for this CUDA on this device",
}
_HANDLES: Final = (201, 208, 400)
_REGISTERED: Final = 712
# Numbers of `CUpointer_attribute`.
_IPC_CAPABLE: Final = 10
_RANGE_START: Final = 11
_RANGE_SIZE: Final = 12
_POOL: Final = 17
_NO_HANDLE: Final = {
    True: "comes from a pool of cudaMallocAsync: set PYTORCH_CUDA_ALLOC_CONF=backend:native for torch, "
    "cupy.cuda.set_allocator(cupy.cuda.MemoryPool().malloc) for cupy, another resource than rmm's async one",
    False: "comes from expandable segments, or is managed: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False for torch",
}
_NOT_REGISTERED: Final = 713


def error_of_code(code: int, text: str) -> TensorCastError:
    """Make the error that a code of CUDA's runtime means."""
    if code == _MEMORY_ALLOCATION:
        message = f"the device has no room ({text}); evict, or free memory of others"
        return CapacityError(message, {"tier": "device"})
    if code in _NO_MACHINE:
        message = f"{_NO_MACHINE[code]} ({text}); install the NVIDIA driver, or use emulated devices (tensorcast.device)"
        return UnsupportedPlatform(message)
    if code in _HANDLES:
        message = f"the handle opens nothing here ({text}); ask for a new one"
        return OwnerGone(message)
    if code == _REGISTERED:
        message = f"some of this host memory is pinned already ({text}); close that"
        return AlreadyExists(message)
    if code in (_INVALID_VALUE, _NOT_REGISTERED):
        message = f"CUDA refuses what it was given ({text})"
        return InvalidArgument(message)
    message = f"CUDA failed: {text}; end this process and look at nvidia-smi"
    return DeviceError(message, {"code": code})


def allocation_of(address: int) -> tuple[int, int]:
    """Find what an address of a library's own lies in: its beginning and its length.

    Raises
    ------
    UnsupportedPlatform
        When its allocator's memory cannot be opened by other processes; it names the setting.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        message = f"{_NO_MACHINE[35]} ({error}); install the NVIDIA driver, or use emulated devices (tensorcast.device)"
        raise UnsupportedPlatform(message) from error

    def ask(attribute: int) -> int:
        found = ctypes.c_uint64()
        pointer = ctypes.c_uint64(address)
        code = driver.cuPointerGetAttribute(ctypes.byref(found), attribute, pointer)
        if code:
            message = f"CUDA knows no memory at this address (error {code} of the driver); give tensors of a device"
            raise InvalidArgument(message)
        return found.value

    if not ask(_IPC_CAPABLE) & 1:
        message = f"other processes cannot open this memory: it {_NO_HANDLE[bool(ask(_POOL))]}; or have it copied (copy=True)"
        raise UnsupportedPlatform(message)
    return ask(_RANGE_START), ask(_RANGE_SIZE)


class CudaTicket:
    """An event of CUDA.

    Parameters
    ----------
    event : object
        The library's own, for streams that follow it.
    query : callable
        Says whether it has happened.
    synchronize : callable
        Waits for it.
    errors : callable
        Gives a context that turns the library's errors into ours.
    """

    def __init__(
        self,
        event: Any,  # noqa: ANN401
        query: Callable[[], bool],
        synchronize: Callable[[], object],
        errors: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.event = event
        self._query = query
        self._synchronize = synchronize
        self._errors = errors

    def done(self) -> bool:
        """Say whether it has happened."""
        with self._errors():
            return self._query()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for it; False when the time was too short."""
        if timeout_s is None:
            with self._errors():
                self._synchronize()
            return True
        end_s = time.monotonic() + timeout_s
        pause_s = 0.00002
        while not self.done():
            if time.monotonic() >= end_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True
