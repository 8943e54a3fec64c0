"""`curl`, as a caller that knows no Python uses it.

Rule: every call has a bound, and the token goes by a header file, never by an argument.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Curl", "Reply"]

_WITHIN_S = "40"


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, read."""
        return json.loads(self.body)


class Curl:
    """Asks one gateway.

    Parameters
    ----------
    base : str
        Its address.
    token : str
        What to show where a call asks for it.
    folder : Path
        For the header file.
    """

    def __init__(self, base: str, token: str, folder: Path) -> None:
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        self.base = base
        self._header = folder / "header"
        self._header.write_text(f"Authorization: Bearer {token}\n")

    def words(self, path: str, *more: str, token: bool = False) -> list[str]:
        """Give the command."""
        shown = ["-H", f"@{self._header}"] if token else []
        return [
            "curl",
            "-sS",
            "-i",
            "--max-time",
            _WITHIN_S,
            *shown,
            *more,
            self.base + path,
        ]

    def __call__(self, path: str, *more: str, token: bool = False) -> Reply:
        """Ask and wait for the end."""
        done = subprocess.run(
            self.words(path, *more, token=token), capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        head, _, body = done.stdout.partition(b"\r\n\r\n")
        first, *lines = head.decode().splitlines()
        pairs = (line.partition(": ") for line in lines)
        headers = {name.lower(): value for name, _, value in pairs}
        return Reply(int(first.split()[1]), headers, body)
