"""Each file of a pure room has its own file of unit tests.

`tensorcast_dask/store/state/pins.py` is tested by `tests/unit/store/state/test_pins.py`,
or by `tests/unit/store/test_pins.py` while no other room has that name. A file that only
declares (events, instructions) computes nothing: those who use it test it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.kit.source import PACKAGE, ROOT, package_files, parse

#: Not yet tested in a file of their own. This list only ever shrinks.
NOT_YET: frozenset[str] = frozenset()


def computes(path: Path) -> bool:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return any(isinstance(node, kinds) for node in ast.walk(parse(path)))


PURE = [
    path.relative_to(PACKAGE).as_posix()
    for path in package_files()
    if path.stem != "__init__"
    and (path.is_relative_to(PACKAGE / "tensors") or "state" in path.parts)
    and computes(path)
]


def mirrors(file: str) -> list[Path]:
    path = Path(file)
    name = f"test_{path.stem.strip('_')}.py"
    unit = ROOT / "tests" / "unit"
    return [unit / path.parent / name, unit / path.parts[0] / name]


@pytest.mark.parametrize("file", PURE)
def test_a_file_of_a_pure_room_has_its_file_of_unit_tests(file: str) -> None:
    if file in NOT_YET:
        pytest.skip("not yet")
    assert any(path.is_file() for path in mirrors(file)), mirrors(file)[0]


def test_the_list_of_untested_files_has_only_untested_files() -> None:
    tested = {file for file in PURE if any(p.is_file() for p in mirrors(file))}
    assert NOT_YET.isdisjoint(tested), "take these off the list"
    assert set(PURE) >= NOT_YET, "these files are no more"
