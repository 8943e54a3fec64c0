"""The repository speaks of itself only: of no machine, registry or tool around it."""

from __future__ import annotations

import re

from tests.kit.source import ROOT, tracked_files

# Written in pieces, so that this file does not hold what it looks for.
FORBIDDEN = {
    "a path of one machine": rf"(?<![\w.~}}])/{'work'}(?:/|\b)(?!er|load|space)",
    "a folder beside the repository": rf"\.\./{'shared'}\b",
    "a tool of the workplace": rf"\b{'farm'}-[a-z]+",
    "a registry's host": rf"\b(?:{'|'.join(['pypi' + '.org', 'python' + 'hosted', 'download.' + 'pytorch', 'npm' + 'js'])})",
}
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".cfg", ".json", ".sh", ""}


def test_no_file_names_the_workplace_around_it() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {what}: {line.strip()[:80]}"
        for path in tracked_files()
        if path.suffix in TEXT and path.stat().st_size < 2**20
        for number, line in enumerate(
            path.read_text(errors="replace").splitlines(), start=1
        )
        for what, pattern in FORBIDDEN.items()
        if re.search(pattern, line)
    ]
    assert found == []
