"""From a caller's tensors to an index and the sources of its entries.

Rules:

1. Everything is described, and refused, before anything is allocated or copied.
2. Two names are tied when they are one tensor: same memory, dtype, shape and strides, in
   whichever library. Views that merely overlap are stored independently.
3. A library is asked only about its own values; torch and cupy are looked up among the loaded
   modules, never imported on behalf of a caller who has none of its tensors.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from tensorcast_dask.dataplane.arrays.cuda_arrays import CupyBackend, kind_of
from tensorcast_dask.dataplane.arrays.numpy_backend import NumpyBackend
from tensorcast_dask.dataplane.arrays.on_device import DeviceBackend, DeviceTensor
from tensorcast_dask.exceptions import (
    InvalidName,
    UnsupportedDtype,
    UnsupportedPlatform,
)
from tensorcast_dask.tensors.specs import Index

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from tensorcast_dask.dataplane.arrays.contract import ArrayBackend, Source

__all__ = [
    "ONLY_TENSOR",
    "backend_named",
    "canonical",
    "describe",
    "locate",
    "resident_bytes",
]

#: Name of the tensor of an artifact that was put as a single tensor.
ONLY_TENSOR: Final = "tensor"

_NUMPY: Final = NumpyBackend()
_ON_DEVICE: Final = DeviceBackend()
_CUPY: Final = CupyBackend()
_LOADED: Final[dict[str, ArrayBackend]] = {"numpy": _NUMPY}


def backend_named(name: str) -> ArrayBackend:
    """Return the backend called `name`, importing its library.

    Raises
    ------
    UnsupportedPlatform
        When the library is not installed, or none of that name is known.
    """
    loaded = _LOADED.get(name)
    if loaded is not None:
        return loaded
    if name == "torch":
        try:
            module = importlib.import_module(
                "tensorcast_dask.dataplane.arrays.torch_backend"
            )
        except ImportError as error:
            message = (
                "torch cannot be imported; install it or ask for framework='numpy'"
            )
            raise UnsupportedPlatform(message) from error
        backend: ArrayBackend = module.TorchBackend()
        return _LOADED.setdefault(name, backend)
    message = f"there is no array backend {name!r}; known: numpy, torch"
    raise UnsupportedPlatform(message)


def _owner(kind: type) -> ArrayBackend | None:
    """Who takes values of this type."""
    if issubclass(kind, np.ndarray | np.generic):
        return _NUMPY
    if issubclass(kind, DeviceTensor):
        return _ON_DEVICE
    cupy, torch = kind_of("cupy", "ndarray"), kind_of("torch", "Tensor")
    if cupy is not None and issubclass(kind, cupy):
        return _CUPY
    if torch is not None and issubclass(kind, torch):
        return backend_named("torch")
    return None


def _hint(kind: type) -> str:
    """Say what to give instead of a value that is no array."""
    if hasattr(kind, "state_dict"):
        return "give its state_dict()"
    if issubclass(kind, str):
        return "the tensors come first and the id second"
    if issubclass(kind, Mapping):
        return "give one flat mapping of names to tensors"
    if issubclass(kind, bool | int | float | complex | list | tuple):
        return "give numpy arrays or torch tensors: np.asarray(it) makes one"
    return "give numpy arrays or torch tensors"


def describe(tensors: Mapping[str, object]) -> list[Source]:
    """Describe every value, in order.

    Raises
    ------
    UnsupportedDtype
        For the first value that cannot be stored.
    """
    owners: dict[type, ArrayBackend] = {}
    for kind in dict.fromkeys(map(type, tensors.values())):
        owner = _owner(kind)
        if owner is None:
            name = next(n for n, value in tensors.items() if type(value) is kind)
            message = (
                f"tensor {name!r} is a {kind.__module__}.{kind.__qualname__}; "
                f"{_hint(kind)}"
            )
            raise UnsupportedDtype(message)
        owners[kind] = owner
    if len(set(owners.values())) == 1:
        return next(iter(owners.values())).describe_all(tensors)
    return [
        owners[type(value)].describe(name, value) for name, value in tensors.items()
    ]


def locate(sources: Sequence[Source]) -> None:
    """Find the address of every flat source that has bytes."""
    unknown = [source for source in sources if not source.address]
    backends = list(dict.fromkeys([source.backend for source in unknown]))
    for backend in backends:
        whole = len(backends) == 1
        backend.locate(
            unknown if whole else [s for s in unknown if s.backend is backend]
        )


def _entry_of(sources: Sequence[Source]) -> list[int] | None:
    """Entry of each source, tied ones alike; None when none are tied."""
    if all(source.alone for source in sources):
        # Owners of their memory: one tensor only when they are one object.
        starts = [id(source.value) for source in sources]
    else:
        # Cheap to ask for, and different for tensors that are not tied, but for views
        # that begin alike and tensors without elements.
        locate(sources)
        starts = [s.address or s.backend.extent(s)[0] for s in sources]
    if len(set(starts)) == len(starts):
        return None
    entries: dict[Hashable, int] = {}
    ties = [source.backend.tie(source) for source in sources]
    entry_of = [entries.setdefault(tie, len(entries)) for tie in ties]
    return entry_of if len(entries) < len(sources) else None


def canonical(tensors: object) -> tuple[Index, list[Source]]:
    """Describe a tensor or a mapping of tensors as it will be stored.

    Parameters
    ----------
    tensors : mapping of str to array, or one array
        A single array becomes the tensor called "tensor".

    Returns
    -------
    (Index, list of Source)
        The packed index, and the source of each of its entries.

    Raises
    ------
    UnsupportedDtype
        For what cannot be stored: objects, text, sparse, quantised, meta and nested tensors.
    InvalidName
        For a key that is no legal tensor name.
    """
    mapping = tensors if isinstance(tensors, Mapping) else {ONLY_TENSOR: tensors}
    for kind in dict.fromkeys(map(type, mapping)):
        if not issubclass(kind, str):
            message = f"tensor names are text, not {kind.__name__}"
            raise InvalidName(message)
    sources = describe(mapping)
    entry_of = _entry_of(sources)
    if entry_of is not None:
        # Reversed, so that the first of the tied ones stays.
        last = dict(zip(reversed(entry_of), reversed(sources), strict=True))
        sources = [last[at] for at in range(len(last))]
    index = Index(
        list(mapping),
        [source.dtype for source in sources],
        [source.shape for source in sources],
        entry_of=entry_of,
    )
    return index, sources


def resident_bytes(sources: Sequence[Source]) -> int:
    """Bytes of host memory that the sources touch, each byte counted once."""
    extents = np.array(
        [source.backend.extent(source) for source in sources], np.uint64
    ).reshape(-1, 2)
    low, high = extents[np.argsort(extents[:, 0], kind="stable")].T
    if not low.size:
        return 0
    # Reach of everything before each extent: what lies below it is counted already.
    reach = np.maximum.accumulate(high)
    start = np.maximum(low, np.concatenate([low[:1], reach[:-1]]))
    return int(np.sum(np.maximum(high, start) - start))
