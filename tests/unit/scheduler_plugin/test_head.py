from __future__ import annotations

from pathlib import Path

import pytest

from tensorcast_dask.exceptions import CatalogUnavailable
from tensorcast_dask.scheduler_plugin.head import Head, HeadFile


def reopened(path: Path) -> HeadFile:
    file = HeadFile(path)
    file.close()
    return file


def test_the_last_write_is_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "head"
    file = HeadFile(path)
    assert file.head == Head()
    for seq in range(1, 6):
        file.write(Head(seq=seq, epoch=3, cluster="c" * 64, link_port=80))
    file.close()
    again = reopened(path)
    assert (again.head.seq, again.head.epoch, again.head.link_port) == (5, 3, 80)
    assert again.head.cluster == "c" * 64
    assert not again.damaged
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("at", [0, 3, 8, 12, 20, 40])
def test_a_torn_write_leaves_the_one_before(tmp_path: Path, at: int) -> None:
    path = tmp_path / "head"
    file = HeadFile(path)
    file.write(Head(seq=1, epoch=1))
    file.write(Head(seq=2, epoch=1))  # the second write lies in the first slot
    file.close()
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    again = reopened(path)
    assert again.head.seq == 1
    assert not again.damaged


def test_two_broken_slots_are_damage_not_a_fresh_start(tmp_path: Path) -> None:
    path = tmp_path / "head"
    file = HeadFile(path)
    file.write(Head(seq=1))
    file.write(Head(seq=2))
    file.close()
    path.write_bytes(b"\xff" * 8192)
    assert reopened(path).damaged
    path.write_bytes(b"short")
    assert reopened(path).damaged


def test_one_process_writes_a_journal(tmp_path: Path) -> None:
    file = HeadFile(tmp_path / "head")
    with pytest.raises(CatalogUnavailable, match="another process"):
        HeadFile(tmp_path / "head")
    file.close()
    reopened(tmp_path / "head")


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(CatalogUnavailable):
        HeadFile(tmp_path / "no" / "such" / "folder")
