"""Nothing grows past what one person can hold in mind.

Rule: an entry of `ALLOWED` carries its reason, and goes when it is no longer needed.
"""

from __future__ import annotations

import ast
import functools

import pytest

from tests.kit.source import ROOT, code_lines, package_files, parse

MODULE_LINES = 400
CLASS_METHODS = 12
FUNCTION_STATEMENTS = 40

#: "file" or "file:Class" or "file:function" -> why it may be larger.
ALLOWED: dict[str, str] = {
    "tensorcast_dask/store/state/instances.py:Attachments": "a method for each event of an attachment's life, over one table",
    "tensorcast_dask/api/plans/plan.py:Plan": "what is asked of a plan: built, written, priced, drawn, run",
    "tensorcast_dask/store/instances.py:InstanceDesk": "its own life, requests, calls, the clock and the catalog's words meet here",
    "tensorcast_dask/tensors/messages/__init__.py": "two lines a message, and nothing else",
    "tensorcast_dask/api/plans/builder.py:StepBuilder": "a method for each kind of step",
    "tensorcast_dask/store/state/table.py:Table": "a method for each event of a copy's life, over one table",
    "tensorcast_dask/scheduler_plugin/state/nodes.py:Nodes": "a method for each event of a node's life, over one table",
    "tensorcast_dask/scheduler_plugin/state/creations.py:Creations": "a method for each event of a creation's life, over one table",
}

FILES = [str(path.relative_to(ROOT)) for path in package_files()]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def statements(function: Function) -> int:
    """Statements in a function's body, those of nested blocks included."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1


def public_methods(cls: ast.ClassDef) -> set[str]:
    """Methods by name; properties and overloads are attributes and one method."""
    found: set[str] = set()
    for node in cls.body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            marks = {ast.unparse(mark) for mark in node.decorator_list}
            if not any(m.endswith(("property", ".setter")) for m in marks):
                found.add(node.name)
    return found


@functools.cache
def too_large(file: str) -> dict[str, int]:
    """What exceeds its budget in a file, and by which count."""
    tree = parse(ROOT / file)
    found: dict[str, int] = {}
    if (lines := code_lines(ROOT / file)) > MODULE_LINES:
        found[file] = lines
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            if (count := len(public_methods(node))) > CLASS_METHODS:
                found[f"{file}:{node.name}"] = count
        elif (
            isinstance(node, Function)
            and (count := statements(node)) > FUNCTION_STATEMENTS
        ):
            found[f"{file}:{node.name}"] = count
    return found


@pytest.mark.parametrize("file", FILES)
def test_modules_classes_and_functions_stay_within_their_budgets(file: str) -> None:
    over = {k: n for k, n in too_large(file).items() if k not in ALLOWED}
    assert over == {}


def test_every_exception_from_the_budgets_is_still_needed() -> None:
    needed = {key for file in FILES for key in too_large(file)}
    assert set(ALLOWED) <= needed
