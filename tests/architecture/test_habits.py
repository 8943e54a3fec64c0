"""The tests wait for conditions, not for time; the package knows devices by their protocol.

Rules:

1. A sleep outside `tests/kit` that is no waiting but part of the scene (a user task that
   takes its time, a peer that stalls) says so on its line: `# scene: reason`.
2. Which backend drives a device is known to `dataplane/devices`, to the setting, and to who
   tells people what is installed. Array libraries, which are callers' own, are not meant.
"""

from __future__ import annotations

import ast

import pytest

from tests.kit.source import ROOT, package_files, parse

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


#: Who may know (rule 2).
KNOW_BACKENDS = ("dataplane/devices/", "tensors/devices.py", "cli/doctor.py")


def test_no_line_above_the_device_protocol_knows_the_backend() -> None:
    files = [path.relative_to(ROOT).as_posix() for path in package_files()]
    found = [
        line
        for file in files
        if not file.removeprefix("tensorcast_dask/").startswith(KNOW_BACKENDS)
        for line in _knows(file)
    ]
    assert found == [], "ask the device for what it can do"


def _knows(file: str) -> list[str]:
    if "emulated" not in (text := (ROOT / file).read_text()) and ".family" not in text:
        return []
    nodes = list(ast.walk(parse(ROOT / file)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [
        f"{file}:{node.lineno}: {ast.unparse(node)}"
        for node in nodes
        if (
            isinstance(node, ast.Constant)
            and id(node) not in docstrings
            and "emulated" in str(node.value)
        )
        or (isinstance(node, ast.Attribute) and ast.unparse(node).endswith("id.family"))
        or (isinstance(node, ast.ImportFrom) and "emulated" in str(node.module))
    ]
