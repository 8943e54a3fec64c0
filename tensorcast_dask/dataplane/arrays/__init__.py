"""Arrays in and out of segments: numpy, torch and cupy behind one contract.

`canonical` describes a caller's tensors. `copy_into` copies them into a segment that is
mapped, `write_into` writes them into one that is not, `spans` lists their memory for a
process that reads it by itself. `materialise` makes arrays over a segment, `copy_out`
fills a caller's own arrays.
"""

from __future__ import annotations

from tensorcast_dask.dataplane.arrays.canonical import (
    ONLY_TENSOR,
    backend_named,
    canonical,
    describe,
    resident_bytes,
)
from tensorcast_dask.dataplane.arrays.contract import ArrayBackend, Places, Source
from tensorcast_dask.dataplane.arrays.copying import (
    check_targets,
    copy_into,
    copy_out,
    staged,
    zero_gaps,
)
from tensorcast_dask.dataplane.arrays.cuda_arrays import (
    adopted,
    lies_on_device,
    settle,
)
from tensorcast_dask.dataplane.arrays.making import (
    RawTensor,
    default_framework,
    materialise,
)
from tensorcast_dask.dataplane.arrays.on_device import (
    DeviceTensor,
    LentSlabs,
    fill_slab,
    lent_slabs,
    materialise_on,
)
from tensorcast_dask.dataplane.arrays.ranges import RangeReader
from tensorcast_dask.dataplane.arrays.writing import spans, write_into

__all__ = [
    "ONLY_TENSOR",
    "ArrayBackend",
    "DeviceTensor",
    "LentSlabs",
    "Places",
    "RangeReader",
    "RawTensor",
    "Source",
    "adopted",
    "backend_named",
    "canonical",
    "check_targets",
    "copy_into",
    "copy_out",
    "default_framework",
    "describe",
    "fill_slab",
    "lent_slabs",
    "lies_on_device",
    "materialise",
    "materialise_on",
    "resident_bytes",
    "settle",
    "spans",
    "staged",
    "write_into",
    "zero_gaps",
]
