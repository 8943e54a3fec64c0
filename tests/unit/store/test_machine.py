from __future__ import annotations

from pathlib import Path

import pytest

from tensorcast_dask.dataplane import memory
from tensorcast_dask.exceptions import CapacityError
from tensorcast_dask.store.machine import Machine

GIB = 1 << 30


def machine(tmp_path: Path, cgroup: str) -> Machine:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(
        "MemTotal:       8388608 kB\nMemFree: 1 kB\nMemAvailable:   4194304 kB\n"
    )
    (proc / "self/cgroup").write_text(cgroup)
    return Machine(proc=proc, cgroups=tmp_path / "cgroup")


def group(path: Path, **files: object) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (path / name.replace("_", ".", 1)).write_text(f"{value}\n")


def test_without_cgroups_only_the_machine_limits(tmp_path: Path) -> None:
    found = machine(tmp_path, "").headroom()
    assert (found.available_bytes, found.total_bytes) == (4 * GIB, 8 * GIB)
    assert (found.cgroup_limit_bytes, found.cgroup_free_bytes) == (-1, -1)


def test_the_tightest_group_of_the_whole_path_counts(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(root)
    group(root / "a", memory_max=3 * GIB, memory_current=2 * GIB, memory_stat="")
    group(root / "a/b", memory_max="max", memory_current=GIB, memory_stat="")
    group(
        root / "a/b/c",
        memory_max=2 * GIB,
        memory_current=GIB // 2,
        memory_stat=f"anon 1\ninactive_file {GIB // 4}",
    )
    found = machine(tmp_path, "0::/a/b/c\n").headroom()
    assert (found.cgroup_limit_bytes, found.cgroup_free_bytes) == (3 * GIB, GIB)


def test_file_cache_that_can_be_dropped_is_free(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(
        root / "a",
        memory_max=GIB,
        memory_current=GIB,
        memory_stat=f"inactive_file {GIB // 2}",
    )
    found = machine(tmp_path, "0::/a\n").headroom()
    assert found.cgroup_free_bytes == GIB // 2


def test_version_one_is_read_too(tmp_path: Path) -> None:
    folder = tmp_path / "cgroup/memory/x"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(str(GIB))
    (folder / "memory.usage_in_bytes").write_text(str(GIB // 4))
    (folder / "memory.stat").write_text("total_inactive_file 100\n")
    found = machine(tmp_path, "4:memory:/x\n2:cpu:/y\n").headroom()
    assert found.cgroup_free_bytes == GIB - GIB // 4 + 100


def test_a_limit_that_is_none_limits_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "cgroup/memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712")
    (folder / "memory.usage_in_bytes").write_text("5")
    found = machine(tmp_path, "4:memory:/\n").headroom()
    assert found.cgroup_limit_bytes == -1


def test_what_cannot_be_read_refuses_nothing(tmp_path: Path) -> None:
    found = Machine(proc=tmp_path / "no", cgroups=tmp_path / "no").headroom()
    assert (found.available_bytes, found.cgroup_limit_bytes) == (-1, -1)


def test_memory_that_is_not_there_is_refused_before_it_is_filled(
    tmp_path: Path,
) -> None:
    root = tmp_path / "cgroup"
    group(root / "a", memory_max=3 * GIB, memory_current=2 * GIB, memory_stat="")
    looked = machine(tmp_path, "0::/a\n")
    looked.check_room(GIB)
    with pytest.raises(CapacityError) as refused:
        looked.check_room(GIB + 1)
    assert refused.value.data == {"wanted": GIB + 1, "free": GIB}
    with pytest.raises(CapacityError):
        memory.private(1 << 50)
    unknown = Machine(proc=tmp_path / "none", cgroups=tmp_path / "none")
    unknown.check_room(1 << 50)  # what cannot be read is no limit
