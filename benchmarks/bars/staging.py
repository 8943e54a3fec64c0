"""1 GiB through the staging ring, both ways, against the emulated device's own copies."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable

from benchmarks.harness import emit, paired
from benchmarks.sizes import Sizes, parse
from tensorcast_dask.dataplane import memory
from tensorcast_dask.dataplane.devices import open_device
from tensorcast_dask.dataplane.devices.staging import Ring, to_device, to_host
from tensorcast_dask.tensors.devices import DeviceSpec

WAYS = ("host to device", "device to host")


def rate(nbytes: int, action: Callable[[], object]) -> float:
    """GB/s of one action."""
    begin = time.perf_counter()
    action()
    return nbytes / 1e9 / (time.perf_counter() - begin)


def main(sizes: Sizes) -> None:
    """Two lines."""
    nbytes = sizes.big_bytes
    host, back = memory.private(nbytes), memory.private(nbytes)
    memory.copy(back, host)  # makes the pages
    memory.copy(host, back)
    run_dir = tempfile.mkdtemp(prefix="tc-")
    spec = DeviceSpec("emulated", 1, nbytes)
    with open_device("emulated:0", spec, run_dir) as device, Ring(device) as ring:
        slab = device.allocate(nbytes).range()
        ways: list[tuple[Callable[[], object], Callable[[], object]]] = [
            (
                lambda: list(to_device(ring, host, slab)),
                lambda: device.copy(slab, host).wait(),
            ),
            (
                lambda: list(to_host(ring, slab, back)),
                lambda: device.copy(back, slab).wait(),
            ),
        ]
        for way, (staged, own) in zip(WAYS, ways, strict=True):
            emit(
                paired(
                    f"{nbytes >> 20} MiB through the staging ring, {way}",
                    lambda staged=staged: rate(nbytes, staged),  # type: ignore[misc]
                    lambda own=own: rate(nbytes, own),  # type: ignore[misc]
                    bar=0.8,
                    better="higher",
                    unit="GB/s",
                    pairs=sizes.pairs,
                )
            )
    shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    main(parse())
