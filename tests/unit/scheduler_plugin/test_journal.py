from __future__ import annotations

import resource
import shutil
from pathlib import Path

import msgspec
import pytest

from tensorcast_dask.exceptions import CatalogUnavailable
from tensorcast_dask.scheduler_plugin.state.events import (
    JournalBack,
    JournalStalled,
    Persist,
    Row,
)
from tensorcast_dask.scheduler_plugin.state.numbers import digest_of
from tensorcast_dask.tensors.ids import ClusterId
from tests.kit.eventually import eventually
from tests.kit.journals import OpenJournal, batch

FLIPS = 10


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir())


def test_what_was_told_is_found_again_one_epoch_up(tmp_path: Path) -> None:
    path = tmp_path / "j" / "catalog.duckdb"
    with OpenJournal(path, fresh_epoch=7) as one:
        assert (one.journal.recovered.epoch, one.journal.recovered.cluster) == (7, "")
        one.journal.name_cluster(ClusterId("c1"), b"token")
        one.journal.remember_link_port(4711)
        one.write(1, 20)
    with OpenJournal(path, fresh_epoch=7) as again:
        found = again.journal.recovered
        assert again.changes() == list(range(1, 21))
        assert (found.seq, found.epoch, found.cluster) == (20, 8, "c1")
        assert (found.lost, found.said) == (False, "")
        assert found.issued == {digest_of("x"): 20}
        assert (again.journal.token, again.journal.link_port) == (b"token", 4711)
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o700


def test_the_newest_row_of_a_key_counts_and_none_takes_it_away(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with OpenJournal(path) as one:
        for seq, blob in ((1, b"a"), (2, b"b"), (3, None)):
            row = Row(kind="alias", key="k", blob=blob)
            one.journal.submit(Persist(seq=seq, rows=(row,)))
        eventually(lambda: one.durable == 3, within_s=10)
    with OpenJournal(path) as again:
        blobs = [row.blob for row in again.journal.recovered.rows]
        assert blobs == [b"a", b"b", None]


def test_a_raised_epoch_is_on_disk_before_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with OpenJournal(path) as one:
        one.journal.submit(Persist(seq=1, rows=(), epoch=50))
        eventually(lambda: one.durable == 1, within_s=10)
    with OpenJournal(path) as again:
        assert again.journal.recovered.epoch == 51


def test_waiting_batches_are_committed_together_in_order(tmp_path: Path) -> None:
    with OpenJournal(tmp_path / "j") as one:
        one.write(1, 500)
        seqs = [news.seq for news in one.news if hasattr(news, "seq")]
        assert seqs == sorted(seqs)
        assert len(seqs) < 500


def test_a_lazy_batch_rides_with_the_next_or_is_committed_after_a_moment(
    tmp_path: Path,
) -> None:
    with OpenJournal(tmp_path / "j") as one:
        one.journal.submit(msgspec.structs.replace(batch(1), lazy=True))
        one.journal.submit(batch(2))
        eventually(lambda: one.durable == 2, within_s=10)
        assert [n.seq for n in one.news if hasattr(n, "seq")] == [2]
        one.journal.submit(msgspec.structs.replace(batch(3), lazy=True))
        eventually(lambda: one.durable == 3, within_s=10)
        one.journal.submit(msgspec.structs.replace(batch(4), lazy=True))
    with OpenJournal(tmp_path / "j") as again:
        assert again.changes() == [1, 2, 3, 4]


def test_committed_rows_are_handed_to_the_tables_recovered_ones_first(
    tmp_path: Path,
) -> None:
    path = tmp_path / "j"
    with OpenJournal(path) as one:
        one.write(1, 3)
    taken: list[str] = []
    with OpenJournal(path) as again:
        again.journal.on_commit(lambda rows: taken.extend(row.key for row in rows))
        again.write(4, 5)
    assert taken == [f"{seq}.{n}" for seq in range(1, 6) for n in (0, 1)]


def test_a_journal_in_memory_tells_and_leaves_nothing(tmp_path: Path) -> None:
    with OpenJournal(":memory:", fresh_epoch=3) as one:
        one.journal.name_cluster(ClusterId("c"), b"t")
        one.journal.remember_link_port(1)
        one.write(1, 5)
        assert one.journal.recovered.epoch == 3
    assert names(tmp_path) == []


def test_a_temporary_journal_is_removed_by_a_clean_stop_unless_told_otherwise(
    tmp_path: Path,
) -> None:
    path = tmp_path / "j"
    with OpenJournal(path, temporary=True) as one:
        one.write(1, 2)
        one.journal.close(keep=True)
    with OpenJournal(path, temporary=True) as again:
        assert again.changes() == [1, 2]
    assert names(tmp_path) == []


def test_a_second_scheduler_on_the_same_journal_is_refused_and_harms_nothing(
    tmp_path: Path,
) -> None:
    with OpenJournal(tmp_path / "j") as one:
        one.write(1, 3)
        with pytest.raises(CatalogUnavailable, match="another process"):
            OpenJournal(tmp_path / "j")
        one.write(4, 5)
    with OpenJournal(tmp_path / "j") as again:
        assert again.changes() == [1, 2, 3, 4, 5]


def test_a_place_where_nothing_can_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CatalogUnavailable):
        OpenJournal(tmp_path / "file" / "j")


def crashed(path: Path, to: Path) -> None:
    """Copy the files of an open journal as a kill at this moment would leave them."""
    to.mkdir()
    for one in path.parent.glob(path.name + "*"):
        shutil.copy(one, to / one.name)


def test_p32_a_flipped_byte_in_the_log_is_found_and_said_and_never_stops_a_start(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a" / "j"
    with OpenJournal(path) as one:
        one.write(1, 50)
        crashed(path, tmp_path / "crash")
    size = (tmp_path / "crash" / "j.wal").stat().st_size
    for flip in range(FLIPS):
        folder = tmp_path / f"flip{flip}"
        shutil.copytree(tmp_path / "crash", folder)
        wal = folder / "j.wal"
        raw = bytearray(wal.read_bytes())
        raw[size * flip // FLIPS + 7] ^= 0x20
        wal.write_bytes(raw)
        with OpenJournal(folder / "j") as again:
            found = again.journal.recovered
            complete = again.changes() == list(range(1, 51))
            assert complete or (found.lost and found.said)
            assert found.issued == {digest_of("x"): 50}
            assert found.seq == 50
            assert found.epoch == 2
            if found.lost:
                assert [n for n in names(folder) if "quarantined" in n]
            again.write(51, 60)
        with OpenJournal(folder / "j") as third:
            assert not third.journal.recovered.lost
            assert third.changes()[-10:] == list(range(51, 61))


def test_p32_a_missing_log_is_a_loss_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a" / "j"
    with OpenJournal(path) as one:
        one.write(1, 10)
        crashed(path, tmp_path / "b")
    (tmp_path / "b" / "j.wal").unlink()
    with OpenJournal(tmp_path / "b" / "j") as again:
        assert again.journal.recovered.lost
        assert "10 were acknowledged" in again.journal.recovered.said
        assert again.journal.recovered.seq == 10


@pytest.mark.parametrize("at", [0, 4100, 8200, 12300, 100_000, 200_000])
def test_p32_a_flipped_byte_in_the_database_never_stops_a_start(
    tmp_path: Path, at: int
) -> None:
    path = tmp_path / "j"
    with OpenJournal(path) as one:
        one.write(1, 30)
    raw = bytearray(path.read_bytes())
    raw[at % len(raw)] ^= 0xFF
    path.write_bytes(raw)
    with OpenJournal(path) as again:
        found = again.journal.recovered
        assert again.changes() == list(range(1, 31)) or (found.lost and found.said)
        assert found.issued == {digest_of("x"): 30}
        again.write(31, 32)


def test_a_database_that_is_no_database_is_kept_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with OpenJournal(path) as one:
        one.journal.name_cluster(ClusterId("c1"), b"t")
        one.write(1, 5)
    path.write_bytes(b"this is no database" * 1000)
    with OpenJournal(path) as again:
        found = again.journal.recovered
        assert found.lost
        assert (found.cluster, found.epoch, found.seq) == ("c1", 2, 5)
        assert again.journal.token == b"t"
        again.write(6, 7)
    assert any("quarantined" in name for name in names(tmp_path))


@pytest.mark.parametrize("keep", [b"", b"\xff" * 8192])
def test_a_head_file_that_is_missing_or_broken_is_made_again_from_the_others(
    tmp_path: Path, keep: bytes
) -> None:
    path, head = tmp_path / "j", tmp_path / "j.head"
    with OpenJournal(path) as one:
        one.journal.name_cluster(ClusterId("c1"), b"t")
        one.write(1, 5)
    head.unlink()
    if keep:
        head.write_bytes(keep)
    with OpenJournal(path) as again:
        found = again.journal.recovered
        assert not found.lost
        assert ("head file" in found.said) is bool(keep)
        assert again.changes() == [1, 2, 3, 4, 5]
        assert (found.epoch, found.cluster, found.seq) == (2, "c1", 5)


def test_a_version_log_that_is_missing_makes_the_end_uncertain_and_says_so(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a" / "j"
    with OpenJournal(path) as one:
        one.write(1, 5)
        crashed(path, tmp_path / "b")
    (tmp_path / "b" / "j.versions").unlink()
    with OpenJournal(tmp_path / "b" / "j") as again:
        found = again.journal.recovered
        assert found.lost
        assert "version log" in found.said
        assert again.changes() == [1, 2, 3, 4, 5]
        assert found.epoch == 2


def test_a_broken_record_of_the_version_log_is_said(tmp_path: Path) -> None:
    path, log = tmp_path / "j", tmp_path / "j.versions"
    with OpenJournal(path) as one:
        one.write(1, 5)
    raw = bytearray(log.read_bytes())
    raw[-40] ^= 1  # the last number; its change's mark comes after it
    log.write_bytes(raw)
    with OpenJournal(path) as again:
        assert "version log" in again.journal.recovered.said
        assert again.journal.recovered.issued == {digest_of("x"): 4}


def test_a_full_disk_stalls_the_journal_and_it_goes_on_by_itself(
    tmp_path: Path,
) -> None:
    path = tmp_path / "j"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with OpenJournal(path) as one:
        one.write(1, 5)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        try:
            for seq in range(6, 9):
                one.journal.submit(batch(seq, size=200_000))
            eventually(
                lambda: any(isinstance(n, JournalStalled) for n in one.news),
                within_s=20,
            )
            assert one.durable == 5
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        eventually(lambda: one.durable == 8, within_s=20)
        stalls = [n for n in one.news if isinstance(n, JournalStalled | JournalBack)]
        assert [type(n).__name__ for n in stalls] == ["JournalStalled", "JournalBack"]
    with OpenJournal(path) as again:
        assert again.changes() == list(range(1, 9))
        assert not again.journal.recovered.lost


def test_a_stalled_journal_can_be_closed(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with OpenJournal(tmp_path / "j") as one:
        one.write(1, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        try:
            one.journal.submit(batch(3, size=200_000))
            eventually(
                lambda: any(isinstance(n, JournalStalled) for n in one.news),
                within_s=20,
            )
            one.journal.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with OpenJournal(tmp_path / "j") as again:
        assert again.changes() in ([1, 2], [1, 2, 3])
        assert not again.journal.recovered.lost
