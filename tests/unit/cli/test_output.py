"""What commands print, and how they end."""

from __future__ import annotations

import errno
import os

import pytest

from tensorcast_dask.cli import output


def test_a_table_whose_reader_has_gone_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr("sys.stdout", gone)
        output.run(lambda: output.show_table("", ("id",), [("a" * 1000,)] * 100))


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "FileError"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "FileError"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), 3, "CatalogUnav"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_the_system_refuses_is_said_as_what_it_is(
    error: BaseException,
    status: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def action() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        output.run(action)
    assert ended.value.code == status
    assert capsys.readouterr().err.startswith(said)
