from __future__ import annotations

from pathlib import Path

import pytest

from tensorcast_dask.scheduler_plugin import versionlog
from tensorcast_dask.scheduler_plugin.state.events import Issued
from tensorcast_dask.scheduler_plugin.state.numbers import digest_of
from tensorcast_dask.scheduler_plugin.versionlog import (
    RECORD_BYTES,
    Mark,
    VersionLog,
)


def issued(name: str, version: int) -> Issued:
    return Issued(digest=digest_of(name), version=version)


def filled(path: Path, count: int) -> None:
    log = VersionLog(path)
    for number in range(1, count + 1):
        log.append([issued(f"a{number % 3}", number)], Mark(1, 0, number))
    log.close()


def read(path: Path) -> VersionLog:
    log = VersionLog(path)
    log.close()
    return log


def test_the_highest_number_of_each_id_is_found_again(tmp_path: Path) -> None:
    filled(tmp_path / "v", 10)
    log = read(tmp_path / "v")
    assert log.issued == {
        digest_of("a0"): 9,
        digest_of("a1"): 10,
        digest_of("a2"): 8,
    }
    assert log.damaged == 0
    assert log.mark == Mark(1, 0, 10)
    assert (tmp_path / "v").stat().st_size == 20 * RECORD_BYTES


@pytest.mark.parametrize("at", range(0, 20 * RECORD_BYTES, 29))
def test_a_flipped_byte_costs_its_record_and_no_other(tmp_path: Path, at: int) -> None:
    path = tmp_path / "v"
    filled(path, 10)
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)
    log = read(path)
    assert log.damaged == 1
    record = at // RECORD_BYTES  # each change is an issued number, then its mark
    lost = record // 2 + 1 if record % 2 == 0 else 0
    left = [n for n in range(1, 11) if n != lost]
    assert log.mark.seq == (9 if record == 19 else 10)
    assert log.issued == {
        digest_of(f"a{rest}"): max(n for n in left if n % 3 == rest)
        for rest in range(3)
    }


def test_a_torn_end_is_cut_off_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "v"
    filled(path, 4)
    path.write_bytes(path.read_bytes() + b"torn")
    log = VersionLog(path)
    assert log.damaged == 1
    log.append([issued("a0", 99)], Mark(1, 7, 5))
    log.close()
    again = read(path)
    assert again.issued[digest_of("a0")] == 99
    assert again.damaged == 0


def test_a_long_log_is_rewritten_with_the_highest_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versionlog, "_REWRITE_RECORDS", 8)
    path = tmp_path / "v"
    filled(path, 20)
    before = read(path).issued
    log = VersionLog(path)
    log.tidy()
    assert path.stat().st_size == 4 * RECORD_BYTES
    assert read(path).issued == before
    assert read(path).mark == Mark(1, 0, 20)
    log.tidy()
    log.append([issued("new", 1)], Mark(1, 0, 21))
    log.close()
    assert read(path).issued == before | {digest_of("new"): 1}


def test_a_change_without_numbers_leaves_its_mark(tmp_path: Path) -> None:
    log = VersionLog(tmp_path / "v")
    log.append([], Mark(3, 8, 5))
    log.close()
    assert read(tmp_path / "v").mark == Mark(3, 8, 5)
