"""Stores of one test, ended with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.kit.stores import Stores


@pytest.fixture
def stores() -> Iterator[Stores]:
    """A run directory with a short path; every store in it ends with the test."""
    run_dir = Path(mkdtemp(prefix="tc-", dir="/tmp"))
    made = Stores(run_dir)
    try:
        yield made
    finally:
        made.close()
    left = [path for path in run_dir.rglob("*") if path.is_file() or path.is_socket()]
    assert not left, f"stores left files behind: {left}"
    for path in sorted(run_dir.rglob("*"), reverse=True):
        path.rmdir()
    run_dir.rmdir()
