"""What the scheduler keeps in its cluster's folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorcast_dask.scheduler_plugin.folder import (
    forget_cluster,
    fresh_epoch,
    name_cluster,
    write_link,
)
from tensorcast_dask.scheduler_plugin.journal import Journal
from tensorcast_dask.scheduler_plugin.state.numbers import begin_of
from tensorcast_dask.tensors.ids import ClusterId, Epoch
from tensorcast_dask.tensors.messages import LinkTarget

IN_2026_S = 1_796_000_000.0


@contextmanager
def journal(where: str, folder: Path) -> Iterator[Journal]:
    opened = Journal.open(
        where,
        notify=lambda _: None,
        fresh_epoch=fresh_epoch(folder, wall_s=IN_2026_S),
    )
    try:
        yield opened
    finally:
        opened.close()


def test_a_cluster_is_named_once_and_keeps_its_name_without_its_journal(
    tmp_path: Path,
) -> None:
    with journal(":memory:", tmp_path) as first:
        before, token = name_cluster(first, tmp_path)
        assert before.begin == begin_of(before.cluster) > 0
        assert len(before.cluster) == len(token) == 32
        assert not before.lost
    with journal(":memory:", tmp_path) as second:
        after, same_token = name_cluster(second, tmp_path)
    assert (after.cluster, same_token) == (before.cluster, token)
    assert after.epoch > before.epoch
    assert after.lost
    assert "journal is gone" in after.said


def test_a_journal_that_is_there_names_the_cluster(tmp_path: Path) -> None:
    where = str(tmp_path / "j.duckdb")
    with journal(where, tmp_path) as first:
        before, token = name_cluster(first, tmp_path)
    (tmp_path / "cluster.json").unlink()
    with journal(where, tmp_path) as second:
        after, same_token = name_cluster(second, tmp_path)
    assert (after.cluster, same_token) == (before.cluster, token)
    assert not after.lost


def test_secrets_are_for_this_user_alone_and_go_with_the_cluster(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir(mode=0o700)
    with journal(":memory:", folder) as opened:
        named, token = name_cluster(opened, folder)
    link = LinkTarget(
        host="127.0.0.1",
        port=9100,
        cluster=ClusterId(named.cluster),
        token=token,
        epoch=Epoch(named.epoch),
    )
    write_link(folder, link)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    told = json.loads((folder / "link.json").read_text())
    assert told == {
        "host": "127.0.0.1",
        "port": 9100,
        "cluster": named.cluster,
        "epoch": named.epoch,
    }
    forget_cluster(folder)
    assert not folder.exists()


def test_a_folder_that_cannot_be_read_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text("{")
    with journal(":memory:", tmp_path) as opened:
        named, _ = name_cluster(opened, tmp_path)
    assert not named.lost
