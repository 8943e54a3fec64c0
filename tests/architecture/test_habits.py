"""The tests wait for conditions, not for time.

Rule: a sleep outside `tests/kit` that is no waiting but part of the scene (a user task that
takes its time, a peer that stalls) says so on its line: `# scene: reason`.
"""

from __future__ import annotations

import ast

import pytest

from tests.kit.source import ROOT, parse

SLEEPS = {"time.sleep", "asyncio.sleep", "sleep", "gen.sleep"}

FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "tests").rglob("*.py")
    if not path.is_relative_to(ROOT / "tests" / "kit")
)


@pytest.mark.parametrize("file", FILES)
def test_no_test_sleeps_and_hopes(file: str) -> None:
    lines = (ROOT / file).read_text().splitlines()
    found = [
        f"{file}:{node.lineno}: {lines[node.lineno - 1].strip()}"
        for node in ast.walk(parse(ROOT / file))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in SLEEPS
        and ast.unparse(node.args[0] if node.args else node) != "0"
        and "# scene: " not in lines[node.lineno - 1]
    ]
    assert found == [], "poll with tests.kit.eventually, or say `# scene: reason`"
