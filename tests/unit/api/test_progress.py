"""What shows how far an operation is, and where it shows nothing."""

from __future__ import annotations

import io

import pytest

from tensorcast_dask.api.connection.progress import meter


class Terminal(io.StringIO):
    """A text stream that somebody looks at."""

    def isatty(self) -> bool:
        return True


def test_where_nobody_looks_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert meter("put x") is None


def test_a_terminal_is_shown_bytes_and_how_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    shown = meter("put [b]x")
    assert shown is not None
    shown.show(1_000_000_000, 0)  # the total is not known yet
    shown.show(1_500_000_000, 2_000_000_000)
    shown.close("failed")
    assert "put [b]x" in terminal.getvalue()
    assert "1.5/2.0 GB" in terminal.getvalue()
    assert "put [b]x: failed" in terminal.getvalue()
