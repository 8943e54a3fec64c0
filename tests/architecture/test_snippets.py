"""The Python in README and docs runs.

The blocks of one file run in order in one process of its own, as a reader would type
them. A block after the line `<!-- not run: reason -->` is only compiled.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.kit.source import ROOT, tracked_files

FENCE = re.compile(
    r"(?P<mark><!-- not run: (?P<reason>[^>]+?) -->\s*\n)?"
    r"^(?P<indent>[ ]*)```python[^\n]*\n(?P<code>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)


#: A document may start clusters, on a machine that is busy with other things.
PATIENCE_S = 200


def documents() -> list[str]:
    return [
        path.relative_to(ROOT).as_posix()
        for path in tracked_files()
        if path.suffix == ".md" and "```python" in path.read_text()
    ]


def blocks(text: str) -> list[tuple[int, str, str]]:
    """Line number, code and reason not to run it, of each block."""
    return [
        (
            text.count("\n", 0, match.start("code")) + 1,
            textwrap.dedent(match["code"]),
            match["reason"] or "",
        )
        for match in FENCE.finditer(text)
    ]


@pytest.mark.timeout(PATIENCE_S + 10)
@pytest.mark.parametrize("document", documents())
def test_the_python_of_a_document_runs_as_written(
    document: str, tmp_path: Path
) -> None:
    # Each block keeps its line number, so that a traceback points into the document.
    program: list[str] = []
    for line, code, reason in blocks((ROOT / document).read_text()):
        compile(code, f"{document}:{line}", "exec")
        if not reason:
            program += [""] * (line - 1 - len(program)) + code.splitlines()
    if "import torch" in program:
        pytest.importorskip("torch", reason="the document's programs train a model")
    script = tmp_path / "snippets.py"
    body = textwrap.indent("\n".join(program), "    ") or "    pass"
    # Spawned children import the script again: its body is for the first one only.
    script.write_text(f"if __name__ == '__main__':{body[4:] and chr(10)}{body}\n")
    # A run directory of its own, short enough for sockets: emulated devices of other
    # programs of this user may have another budget.
    with TemporaryDirectory(prefix="tc-", dir="/tmp") as run_dir:
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TENSORCAST_RUN_DIR": run_dir},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
