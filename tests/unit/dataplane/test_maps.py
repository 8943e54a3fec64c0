from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tensorcast_dask.dataplane import maps
from tensorcast_dask.dataplane.maps import (
    PrivateMap,
    SharedMap,
    WritableMap,
    live_maps,
)
from tensorcast_dask.dataplane.segments import MemoryFile
from tensorcast_dask.exceptions import CapacityError

if TYPE_CHECKING:
    from collections.abc import Iterator

NBYTES = 3 << 12


def settled() -> int:
    """Count the maps once those that earlier tests left as garbage are gone."""
    gc.collect()
    return live_maps()


@pytest.fixture
def file() -> Iterator[MemoryFile]:
    with MemoryFile(NBYTES) as made:
        made.map_shared().view[:5] = b"first"
        yield made


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def run_child(code: str) -> str:
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


def test_a_map_keeps_no_descriptor(file: MemoryFile) -> None:
    before = descriptors()
    held = PrivateMap(file.read_description(), NBYTES)
    assert descriptors() == before
    assert bytes(held.view[:5]) == b"first"


def test_the_descriptor_is_closed_also_when_the_map_fails(file: MemoryFile) -> None:
    before = descriptors()
    directory = os.open("/", os.O_RDONLY)
    with pytest.raises(OSError, match="mmap"):
        PrivateMap(directory, NBYTES)
    assert descriptors() == before


def test_edits_in_place_stay_the_readers_own(file: MemoryFile) -> None:
    one = PrivateMap(file.read_description(), NBYTES)
    two = PrivateMap(file.read_description(), NBYTES)
    one.view[:5] = b"other"
    assert bytes(two.view[:5]) == b"first"
    assert bytes(file.map_shared().view[:5]) == b"first"


def test_an_array_keeps_the_map_alive_and_its_end_ends_it(file: MemoryFile) -> None:
    before = settled()
    array = np.frombuffer(PrivateMap(file.read_description(), NBYTES).buffer, np.uint8)
    tail = array[1:3]
    del array
    gc.collect()
    assert live_maps() == before + 1
    assert bytes(tail) == b"ir"
    assert tail.flags.writeable
    del tail
    gc.collect()
    assert live_maps() == before
    assert file.sole_owner()


def test_a_tensor_keeps_the_map_alive(file: MemoryFile) -> None:
    torch = pytest.importorskip("torch")
    before = settled()
    held = PrivateMap(file.read_description(), NBYTES)
    tensor = torch.frombuffer(held.buffer, dtype=torch.uint8)[:5]
    del held
    gc.collect()
    assert live_maps() == before + 1
    tensor.add_(1)
    assert bytes(tensor.tolist()) == b"gjstu"
    del tensor
    gc.collect()
    assert live_maps() == before


def test_an_empty_segment_maps_to_nothing() -> None:
    with MemoryFile(0) as file:
        before = settled()
        held = PrivateMap(file.read_description(), 0)
        assert (held.address, len(held.buffer), held.view.nbytes) == (0, 0, 0)
        assert live_maps() == before
        assert held.populate()


def test_pages_can_be_brought_in_at_once(file: MemoryFile) -> None:
    held = PrivateMap(file.read_description(), NBYTES)
    assert held.populate()
    assert bytes(held.view[:5]) == b"first"


def test_a_producers_addresses_stay_while_the_segment_freezes(
    file: MemoryFile,
) -> None:
    filling = WritableMap(file.write_description(), NBYTES)
    array = np.frombuffer(filling.buffer, np.uint8)
    array[:5] = np.frombuffer(b"built", np.uint8)
    assert not file.sole_owner()

    filling.reserve()
    assert file.sole_owner(), "the kernel proves that no writer is left"

    filling.attach_private(file.read_description())
    assert bytes(array[:5]) == b"built"
    array[:5] = 0
    assert bytes(file.map_shared().view[:5]) == b"built"
    assert filling.state == "private"


def test_nothing_can_be_written_through_a_reservation() -> None:
    out = run_child(
        """
        import os
        from tensorcast_dask.dataplane.maps import WritableMap
        from tensorcast_dask.dataplane.segments import MemoryFile
        file = MemoryFile(4096)
        held = WritableMap(file.write_description(), 4096)
        held.reserve()
        pid = os.fork()
        if pid == 0:
            held.view[0] = 1
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """
    )
    assert out == "-11\n"


def test_an_abandoned_map_is_harmless_memory(file: MemoryFile) -> None:
    filling = WritableMap(file.write_description(), NBYTES)
    array = np.frombuffer(filling.buffer, np.uint8)
    filling.abandon()
    assert file.sole_owner()
    assert not array.any()
    array[:] = 7
    assert bytes(file.map_shared().view[:5]) == b"first"
    filling.abandon()


def test_a_reservation_that_is_not_granted_can_be_abandoned(file: MemoryFile) -> None:
    filling = WritableMap(file.write_description(), NBYTES)
    filling.reserve()
    filling.abandon()
    assert filling.state == "abandoned"
    filling.view[:] = bytes(NBYTES)


def test_an_empty_producers_map_goes_through_the_same_states() -> None:
    with MemoryFile(0) as file:
        filling = WritableMap(file.write_description(), 0)
        filling.reserve()
        assert file.sole_owner()
        filling.attach_private(file.read_description())
        assert filling.view.nbytes == 0


def test_a_shared_map_is_gone_when_closed(file: MemoryFile) -> None:
    writer = file.write_description()
    held = SharedMap(writer, NBYTES, writable=True)
    os.close(writer)
    held.close()
    held.close()
    assert file.sole_owner()


def test_a_forked_child_reads_its_maps_and_ends_them_without_harm() -> None:
    out = run_child(
        """
        import gc, os
        from tensorcast_dask.dataplane.maps import PrivateMap
        from tensorcast_dask.dataplane.segments import MemoryFile
        file = MemoryFile(8192)
        file.map_shared().view[:5] = b"bytes"
        held = PrivateMap(file.read_description(), 8192)
        pid = os.fork()
        if pid == 0:
            assert held.pid != os.getpid()
            assert bytes(held.view[:5]) == b"bytes"
            held.view[:5] = b"child"
            del held
            gc.collect()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert bytes(held.view[:5]) == b"bytes"
        print("fine")
        """
    )
    assert out == "fine\n"


def test_an_array_that_outlives_the_interpreter_is_no_crash() -> None:
    out = run_child(
        """
        import atexit, sys
        import numpy as np
        from tensorcast_dask.dataplane.maps import PrivateMap
        from tensorcast_dask.dataplane.segments import MemoryFile
        file = MemoryFile(8192)
        array = np.frombuffer(PrivateMap(file.read_description(), 8192).buffer, "u1")
        atexit.register(lambda: print(array[:1], flush=True))
        sys.modules["kept"] = array
        """
    )
    assert out == "[0]\n"


def test_a_limit_on_address_space_is_a_capacity_error() -> None:
    out = run_child(
        """
        import resource
        from tensorcast_dask.dataplane.maps import PrivateMap
        from tensorcast_dask.dataplane.segments import MemoryFile
        from tensorcast_dask.exceptions import CapacityError
        file = MemoryFile(1 << 34)
        resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))
        try:
            PrivateMap(file.read_description(), 1 << 34)
        except CapacityError as error:
            print(error.data["nbytes"])
        """
    )
    assert out == f"{1 << 34}\n"


@pytest.mark.slow
def test_maps_are_refused_before_the_kernels_limit(file: MemoryFile) -> None:
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 200_000:
        pytest.skip("this machine allows too many maps to try")
    held: list[PrivateMap] = []

    def fill() -> None:
        while len(held) < limit:
            held.append(PrivateMap(file.read_description(), NBYTES))

    with pytest.raises(CapacityError, match="max_map_count"):
        fill()
    assert len(held) < limit
    # What the process needs for itself still works.
    assert len(bytearray(64 << 20)) == 64 << 20
    held.clear()
    gc.collect()
    assert maps.live_maps() < 10


def test_getting_ready_leaves_no_map_and_no_descriptor() -> None:
    gc.collect()
    before = maps.live_maps(), len(list(Path("/proc/self/fd").iterdir()))
    maps.get_ready()
    gc.collect()
    assert (maps.live_maps(), len(list(Path("/proc/self/fd").iterdir()))) == before
