from __future__ import annotations

from pathlib import Path

from tensorcast_dask.scheduler_plugin.ledger import Ledger
from tensorcast_dask.scheduler_plugin.state.events import Row


def row(key: str, blob: bytes | None = b"b") -> Row:
    return Row(kind="k", key=key, blob=blob)


def test_compacting_keeps_the_newest_of_each_key_and_its_own_proof(
    tmp_path: Path,
) -> None:
    ledger = Ledger(tmp_path / "l")
    for seq in range(1, 40):
        ledger.append([row("same", b"%d" % seq), row(f"one{seq}")], seq=seq, epoch=2)
    ledger.append([row("one1", None)], seq=40, epoch=2)
    before = (tmp_path / "l.wal").stat().st_size
    ledger.compact(seq=40, epoch=2)
    assert before > 0
    assert not (tmp_path / "l.wal").exists()
    ledger.append([row("after")], seq=41, epoch=2)
    ledger.close()
    again = Ledger(tmp_path / "l")
    found = again.found
    again.close()
    assert (found.lost, found.seq, found.epoch) == (False, 41, 2)
    keys = {one.key: one.blob for one in found.rows}
    assert keys["same"] == b"39"
    assert "one1" not in keys
    assert len(found.rows) == 40


def test_a_row_that_was_changed_in_the_file_is_found_by_its_checksum(
    tmp_path: Path,
) -> None:
    import duckdb

    ledger = Ledger(tmp_path / "l")
    ledger.append([row("a"), row("b")], seq=1, epoch=1)
    ledger.close()
    connection = duckdb.connect(tmp_path / "l")
    connection.execute("UPDATE log SET blob = 'evil'::BLOB WHERE key = 'a'")
    connection.execute("DELETE FROM log WHERE key = 'b'")
    connection.close()
    again = Ledger(tmp_path / "l")
    assert again.found.lost
    assert again.found.rows == ()
    assert again.found.said is not None
    assert len(again.found.said) == 2
    again.close()


def test_a_failed_write_can_be_looked_up_and_repeated(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    assert ledger.again() == 0
    ledger.append([row("a")], seq=1, epoch=1)
    assert ledger.again() == 1
    ledger.append([row("b")], seq=2, epoch=1)
    ledger.checkpoint()
    ledger.close()
    again = Ledger(tmp_path / "l")
    assert not again.found.lost
    assert [one.key for one in again.found.rows] == ["a", "b"]
    again.close()
