from __future__ import annotations

from pathlib import Path

from tensorcast_dask.scheduler_plugin.identity import read_secret, write_secret


def test_id_and_token_are_kept_for_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    assert read_secret(path) == ("", b"")
    write_secret(path, "c1", b"\x00secret")
    assert read_secret(path) == ("c1", b"\x00secret")
    assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "token.new").write_bytes(b"left by a crash")
    write_secret(path, "c2", b"t")
    assert read_secret(path) == ("c2", b"t")
    assert [one.name for one in tmp_path.iterdir()] == ["token"]


def test_a_broken_file_counts_as_absent(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"\xc1\x00")
    assert read_secret(path) == ("", b"")
