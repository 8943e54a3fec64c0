from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tensorcast_dask.dataplane.congestion import allowed_congestion
from tensorcast_dask.store.tuning import congestion_for

BOOT = Path("/proc/sys/kernel/random/boot_id")


def note(run_dir: Path, *, boot: str, name: str) -> Path:
    path = run_dir / "congestion.json"
    said = {"boot": boot, "allowed": allowed_congestion(), "name": name}
    path.write_bytes(msgspec.json.encode(said))
    return path


@pytest.mark.parametrize("host", ["10.1.2.3", "node-7", "::ffff:10.0.0.1"])
def test_for_another_host_the_kernels_default_stays(tmp_path: Path, host: str) -> None:
    note(tmp_path, boot=BOOT.read_text().strip(), name="reno")
    assert congestion_for(tmp_path, host, scratch=tmp_path) == ""


def test_what_a_store_of_this_boot_found_is_used(tmp_path: Path) -> None:
    note(tmp_path, boot=BOOT.read_text().strip(), name="noted")
    for host in ("127.0.0.1", "localhost", "::1"):
        assert congestion_for(tmp_path, host, scratch=tmp_path) == "noted"


def test_a_note_of_another_boot_or_no_note_is_measured_and_kept(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    path = note(tmp_path, boot="another", name="noted")
    found = congestion_for(tmp_path, "127.0.0.1", scratch=scratch)
    assert found in {"", *allowed_congestion()}
    kept = msgspec.json.decode(path.read_bytes())
    # What a busy machine left uncertain is not kept.
    assert kept["boot"] == "another" or kept["name"] == found
    assert list(scratch.iterdir()) == []
    path.write_text("no json")
    assert congestion_for(tmp_path, "127.0.0.1", scratch=tmp_path / "gone") in {
        "",
        *allowed_congestion(),
    }
