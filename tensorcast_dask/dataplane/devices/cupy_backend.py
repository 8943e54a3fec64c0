"""CUDA devices through cupy's runtime calls: no code of ours is compiled.

Rules:

1. Only `cupy.cuda.runtime`, streams and events. cupy's memory pools are not used: their
   memory cannot be exported one tenant at a time.
2. A slab is plain cudaMalloc in multiples of 2 MiB: smaller allocations share a block, and a
   handle would expose the neighbours.
3. Every stream is non-blocking: the legacy default stream would wait for all others.
4. The caller's current device is as it was after every call.
5. Not run on a GPU yet: `tests/gpu` is to be run where there is one.
"""

from __future__ import annotations

import contextlib
import importlib
import uuid
from typing import TYPE_CHECKING, Any, Final

from tensorcast_dask.dataplane.devices.base import Exported
from tensorcast_dask.dataplane.devices.cuda import (
    CudaTicket,
    allocation_of,
    error_of_code,
)
from tensorcast_dask.exceptions import TensorCastError, UnsupportedPlatform
from tensorcast_dask.tensors.devices import DeviceId, DeviceSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tensorcast_dask.dataplane.devices.base import Copy, Memory

__all__ = ["CupyDriver", "find", "open_driver"]

_BLOCK_BYTES: Final = 2 << 20


def _cupy() -> Any:  # noqa: ANN401
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        message = f"cupy cannot be imported ({error}); install it: pip install cupy-cuda12x (cupy-cuda13x for CUDA 13)"
        raise UnsupportedPlatform(message) from error


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    runtime = _cupy().cuda.runtime
    try:
        yield
    except runtime.CUDARuntimeError as error:
        raise error_of_code(int(error.status), str(error)) from error
    except (ImportError, OSError) as error:
        message = f"a library of CUDA is missing ({error}); install the CUDA runtime: pip install 'cupy-cuda12x[ctk]'"
        raise UnsupportedPlatform(message) from error


def find(spec: DeviceSpec, run_dir: str = "") -> tuple[DeviceId, ...]:  # noqa: ARG001
    """Return the devices that CUDA shows to this process."""
    runtime = _cupy().cuda.runtime
    with _errors():
        return tuple(
            DeviceId(f"GPU-{uuid.UUID(bytes=_uuid(runtime, n))}", "cuda", n)
            for n in range(runtime.getDeviceCount())
        )


def _uuid(runtime: Any, ordinal: int) -> bytes:  # noqa: ANN401
    return bytes(runtime.getDeviceProperties(ordinal)["uuid"][:16])


def open_driver(
    device: DeviceId,
    spec: DeviceSpec,  # noqa: ARG001
    run_dir: str = "",  # noqa: ARG001
) -> CupyDriver:
    """Open one of the devices that `find` gave."""
    return CupyDriver(device)


class CupyDriver:
    """One CUDA device, in this process.

    Parameters
    ----------
    device : DeviceId
        Which.
    """

    def __init__(self, device: DeviceId) -> None:
        self.id = device
        self.libraries: tuple[str, ...] = ("torch", "cupy")
        self._cuda = _cupy().cuda
        self._runtime = self._cuda.runtime
        self._streams: dict[int, Any] = {}
        #: Lengths of slabs by address.
        self._owned: dict[int, int] = {}
        self._opened: set[int] = set()
        self._pinned: set[int] = set()

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        with _errors(), self._cuda.Device(self.id.ordinal):
            yield

    # -------------------------------------------------------------- memory
    def allocate(self, nbytes: int) -> int:
        """Make a slab of whole blocks."""
        with self._current():
            address = int(
                self._runtime.malloc(-(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES)
            )
        self._owned[address] = nbytes
        return address

    def free(self, address: int) -> None:
        """Give a slab back."""
        self._owned.pop(address, None)
        with self._current():
            self._runtime.free(address)

    def export(self, address: int) -> Exported:
        """Make a CUDA IPC handle of a slab, or of what an array library allocated."""
        own_bytes = self._owned.get(address)
        base, nbytes = (
            allocation_of(address) if own_bytes is None else (address, own_bytes)
        )
        with self._current():
            data = bytes(self._runtime.ipcGetMemHandle(base))
        return Exported(data, address - base, nbytes)

    def open(self, what: bytes | tuple[int, int]) -> int:
        """Open a CUDA IPC handle, or register host memory."""
        with self._current():
            if isinstance(what, tuple):
                self._runtime.hostRegister(*what, 0)
                self._pinned.add(what[0])
                return what[0]
            lazily = self._runtime.cudaIpcMemLazyEnablePeerAccess
            address = int(self._runtime.ipcOpenMemHandle(what, lazily))
        self._opened.add(address)
        return address

    def close(self, address: int | None) -> None:
        """End what `open` gave, or all of it."""
        if address is None:
            self._close_all()
            return
        with self._current():
            if address in self._pinned:
                self._pinned.discard(address)
                self._runtime.hostUnregister(address)
            else:
                self._opened.discard(address)
                self._runtime.ipcCloseMemHandle(address)

    def _close_all(self) -> None:
        for stream in self._streams.values():
            with contextlib.suppress(TensorCastError), self._current():
                stream.synchronize()
        self._streams.clear()
        for address in [*self._opened, *self._pinned]:
            with contextlib.suppress(TensorCastError):
                self.close(address)
        for address in list(self._owned):
            with contextlib.suppress(TensorCastError):
                self.free(address)

    def wrap(self, memory: Memory, offset: int, nbytes: int, keep: object) -> object:
        """Make a cupy array of uint8; bfloat16 and float8 have no dtype there."""
        cupy = _cupy()
        with self._current():
            whole = self._cuda.UnownedMemory(
                memory.address, memory.nbytes, (memory, keep), self.id.ordinal
            )
            pointer = self._cuda.MemoryPointer(whole, offset)
            return cupy.ndarray((nbytes,), cupy.uint8, memptr=pointer)

    def list(self) -> tuple[int, int]:
        """Total and free bytes."""
        with self._current():
            free, total = self._runtime.memGetInfo()
        return int(total), int(free)

    # -------------------------------------------------------------- copies
    def copy(self, copy: Copy) -> CudaTicket:
        """Queue a cudaMemcpyAsync."""
        with self._current():
            stream = self._following(copy.stream, copy.after)
            if copy.nbytes:
                self._runtime.memcpyAsync(
                    copy.target.address,
                    copy.source.address,
                    copy.nbytes,
                    self._runtime.memcpyDefault,
                    stream.ptr,
                )
            return self._mark(stream)

    def event(self, stream: int, after: Sequence[CudaTicket]) -> CudaTicket:
        """Record an event."""
        with self._current():
            return self._mark(self._following(stream, after))

    def _following(self, number: int, after: Sequence[Any]) -> Any:  # noqa: ANN401
        stream = self._streams.get(number)
        if stream is None:
            stream = self._streams[number] = self._cuda.Stream(non_blocking=True)
        for ticket in after:
            stream.wait_event(ticket.event)
        return stream

    def _mark(self, stream: Any) -> CudaTicket:  # noqa: ANN401
        event = self._cuda.Event(disable_timing=True)
        event.record(stream)
        return CudaTicket(event, lambda: bool(event.done), event.synchronize, _errors)
