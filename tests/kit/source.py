"""The source tree as the architecture tests see it."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "PACKAGE",
    "ROOT",
    "code_lines",
    "module_name",
    "package_files",
    "parse",
    "tracked_files",
]

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tensorcast_dask"

_SKIPPED_FOLDERS = {"__pycache__", "build", "dist", "bench-results", "node_modules"}


def package_files() -> list[Path]:
    """Every Python file of the package, in a stable order."""
    return sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    """Name under which a file of the package is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def parse(path: Path) -> ast.Module:
    """Syntax tree of a file; shared, so nobody changes it."""
    return ast.parse(path.read_text(), filename=str(path))


def tracked_files() -> list[Path]:
    """Files that belong to the repository, and new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive
        return sorted(_walk(ROOT))
    names = listing.stdout.decode().split("\0")
    return sorted(ROOT / name for name in names if name and (ROOT / name).is_file())


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name.startswith(".") and path.name != ".ci":
            continue
        if path.is_dir() and path.name not in _SKIPPED_FOLDERS:
            yield from _walk(path)
        elif path.is_file():
            yield path


def code_lines(path: Path) -> int:
    """Lines of a file less blank lines, comments and docstrings."""
    lines = path.read_text().splitlines()
    counted = {
        number
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.lstrip().startswith("#")
    }
    for node in ast.walk(parse(path)):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                end = first.end_lineno or first.lineno
                counted -= set(range(first.lineno, end + 1))
    return len(counted)
