"""CUDA devices through torch, where cupy is not installed.

Rules:

1. Only public calls of `torch.cuda`, and of the runtime that it binds (`cudart`): which has no
   cudaMalloc and no IPC. So slabs come from torch's allocator and cannot be exported, and
   handles cannot be opened: Unimplemented, which names cupy.
2. Freed memory is handed back to the device at once (`empty_cache`).
3. Not run on a GPU yet: `tests/gpu` is to be run where there is one.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Final, NoReturn

from tensorcast_dask.dataplane.devices.cuda import CudaTicket, error_of_code
from tensorcast_dask.exceptions import (
    CapacityError,
    DeviceError,
    TensorCastError,
    Unimplemented,
    UnsupportedPlatform,
)
from tensorcast_dask.tensors.devices import DeviceId, DeviceSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tensorcast_dask.dataplane.devices.base import Copy, Memory, Side

__all__ = ["TorchDriver", "find", "open_driver"]

_NOT_WITH_TORCH: Final = (
    "torch cannot share device memory by handle without its own allocator's bookkeeping; "
    "install cupy (pip install cupy-cuda12x) and leave tensorcast.device unset"
)


def _torch() -> Any:  # noqa: ANN401
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        message = f"torch cannot be imported ({error}); install it with CUDA, or cupy (pip install cupy-cuda12x)"
        raise UnsupportedPlatform(message) from error
    if torch.version.cuda is None:
        message = f"torch {torch.__version__} is built without CUDA; install torch with CUDA, or cupy (pip install cupy-cuda12x)"
        raise UnsupportedPlatform(message)
    return torch


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    torch = _torch()
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        message = f"the device has no room ({error}); evict, or free memory of others"
        raise CapacityError(message, {"tier": "device"}) from error
    except RuntimeError as error:
        message = f"CUDA failed: {error}; end this process and look at nvidia-smi"
        raise DeviceError(message) from error


def find(spec: DeviceSpec, run_dir: str = "") -> tuple[DeviceId, ...]:  # noqa: ARG001
    """Return the devices that torch sees."""
    torch = _torch()
    if not torch.cuda.is_available():
        message = "torch sees no CUDA device; install the NVIDIA driver, or use emulated devices (tensorcast.device)"
        raise UnsupportedPlatform(message)
    with _errors():
        return tuple(
            DeviceId(f"GPU-{torch.cuda.get_device_properties(n).uuid}", "cuda", n)
            for n in range(torch.cuda.device_count())
        )


def open_driver(
    device: DeviceId,
    spec: DeviceSpec,  # noqa: ARG001
    run_dir: str = "",  # noqa: ARG001
) -> TorchDriver:
    """Open one of the devices that `find` gave."""
    return TorchDriver(device)


class _Bytes:
    """Memory by its address, for libraries that read CUDA's array interface."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class TorchDriver:
    """One CUDA device, in this process.

    Parameters
    ----------
    device : DeviceId
        Which.
    """

    def __init__(self, device: DeviceId) -> None:
        self.id = device
        self.libraries: tuple[str, ...] = ("torch", "cupy")
        self._torch = _torch()
        self._device = self._torch.device("cuda", device.ordinal)
        self._streams: dict[int, Any] = {}
        #: Slabs by address.
        self._owned: dict[int, Any] = {}
        self._pinned: set[int] = set()

    # -------------------------------------------------------------- memory
    def allocate(self, nbytes: int) -> int:
        """Make a slab."""
        with _errors():
            slab = self._torch.empty(
                nbytes, dtype=self._torch.uint8, device=self._device
            )
        self._owned[int(slab.data_ptr())] = slab
        return int(slab.data_ptr())

    def free(self, address: int) -> None:
        """Give a slab back to the device."""
        del self._owned[address]
        with _errors():
            self._torch.cuda.empty_cache()

    def export(self, address: int) -> NoReturn:  # noqa: ARG002
        """Not with torch."""
        raise Unimplemented(_NOT_WITH_TORCH)

    def open(self, what: bytes | tuple[int, int]) -> int:
        """Register host memory."""
        if not isinstance(what, tuple):
            raise Unimplemented(_NOT_WITH_TORCH)
        with _errors(), self._torch.cuda.device(self._device):
            self._checked(self._torch.cuda.cudart().cudaHostRegister(*what, 0))
        self._pinned.add(what[0])
        return what[0]

    def close(self, address: int | None) -> None:
        """End what `open` gave, or all of it."""
        if address is None:
            self._close_all()
            return
        self._pinned.discard(address)
        with _errors(), self._torch.cuda.device(self._device):
            self._checked(self._torch.cuda.cudart().cudaHostUnregister(address))

    def _checked(self, code: Any) -> None:  # noqa: ANN401
        if int(code):
            text = self._torch.cuda.cudart().cudaGetErrorString(code)
            raise error_of_code(int(code), str(text))

    def _close_all(self) -> None:
        for stream in self._streams.values():
            with contextlib.suppress(TensorCastError), _errors():
                stream.synchronize()
        for address in list(self._pinned):
            with contextlib.suppress(TensorCastError):
                self.close(address)
        self._streams.clear()
        self._owned.clear()
        with contextlib.suppress(TensorCastError), _errors():
            self._torch.cuda.empty_cache()

    def wrap(self, memory: Memory, offset: int, nbytes: int, keep: object) -> object:  # noqa: ARG002 - torch counts
        """Make a tensor of uint8 over a range; torch keeps the slab alive for it."""
        return self._owned[memory.address][offset : offset + nbytes]

    def list(self) -> tuple[int, int]:
        """Total and free bytes."""
        with _errors():
            free, total = self._torch.cuda.mem_get_info(self._device)
        return int(total), int(free)

    # -------------------------------------------------------------- copies
    def copy(self, copy: Copy) -> CudaTicket:
        """Queue a copy."""
        with _errors():
            stream = self._following(copy.stream, copy.after)
            if not copy.target.on_device and not copy.source.on_device:
                stream.synchronize()  # torch copies between two host sides at once
            if copy.nbytes:
                with self._torch.cuda.stream(stream):
                    self._tensor(copy.target, copy.nbytes).copy_(
                        self._tensor(copy.source, copy.nbytes), non_blocking=True
                    )
            return self._mark(stream)

    def event(self, stream: int, after: Sequence[CudaTicket]) -> CudaTicket:
        """Record an event."""
        with _errors():
            return self._mark(self._following(stream, after))

    def _tensor(self, side: Side, nbytes: int) -> Any:  # noqa: ANN401
        if side.on_device:
            return self._slab(side.address, nbytes)
        host = (ctypes.c_ubyte * nbytes).from_address(side.address)
        return self._torch.frombuffer(host, dtype=self._torch.uint8)

    def _slab(self, address: int, nbytes: int) -> Any:  # noqa: ANN401
        """Give bytes of a slab, or of an array that somebody else made."""
        bases = sorted(self._owned)
        base = bases[bisect_right(bases, address) - 1] if bases else address
        offset = address - base
        slab = self._owned.get(base)
        if slab is not None and 0 <= offset <= slab.nbytes - nbytes:
            return slab[offset : offset + nbytes]
        return self._torch.as_tensor(_Bytes(address, nbytes), device=self._device)

    def _following(self, number: int, after: Sequence[Any]) -> Any:  # noqa: ANN401
        stream = self._streams.get(number)
        if stream is None:
            stream = self._streams[number] = self._torch.cuda.Stream(self._device)
        for ticket in after:
            stream.wait_event(ticket.event)
        return stream

    def _mark(self, stream: Any) -> CudaTicket:  # noqa: ANN401
        event = self._torch.cuda.Event()
        event.record(stream)
        return CudaTicket(event, event.query, event.synchronize, _errors)
