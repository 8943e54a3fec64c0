"""The token of HTTP callers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorcast_dask.dataplane import bearer
from tensorcast_dask.exceptions import InvalidArgument


def test_it_is_the_same_on_every_host_and_another_for_another_cluster() -> None:
    assert bearer.derived(b"a" * 32) == bearer.derived(b"a" * 32)
    assert bearer.derived(b"a" * 32) != bearer.derived(b"b" * 32)
    assert (b"a" * 32).hex() not in bearer.derived(b"a" * 32)


def test_what_is_kept_can_be_read_by_this_user_only(tmp_path: Path) -> None:
    token = bearer.derived(b"a" * 32)
    bearer.keep(tmp_path, token)
    bearer.keep(tmp_path, token)
    path = tmp_path / bearer.FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert bearer.of_file(str(path)) == token
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o620])
def test_a_file_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text("a-token-of-my-own\n")
    path.chmod(mode)
    with pytest.raises(InvalidArgument, match="chmod 600"):
        bearer.of_file(str(path))
    path.chmod(0o600)
    assert bearer.of_file(str(path)) == "a-token-of-my-own"


@pytest.mark.parametrize(
    "content", [b"", b"short", b"two words of a token", b"\xff" * 32]
)
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(InvalidArgument, match="holds no token"):
        bearer.of_file(str(path))
    with pytest.raises(InvalidArgument, match="cannot be read"):
        bearer.of_file(str(tmp_path / "nothing"))
