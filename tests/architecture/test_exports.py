"""What a module offers is what it lists."""

from __future__ import annotations

import ast
import importlib
import inspect

import pytest

import tensorcast_dask
from tests.kit.source import ROOT, package_files, parse


def listed(tree: ast.Module) -> list[str] | None:
    """The module's `__all__`, when it is a literal."""
    for node in tree.body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and target.id == "__all__":
                value = getattr(node, "value", None)
                return list(ast.literal_eval(value)) if value is not None else None
    return None


def defined(tree: ast.Module) -> set[str]:
    """Public classes and functions that a module defines at its top level."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        node.name
        for node in tree.body
        if isinstance(node, kinds) and not node.name.startswith("_")
    }


FILES = [str(path.relative_to(ROOT)) for path in package_files()]


@pytest.mark.parametrize("file", FILES)
def test_a_module_lists_every_class_and_function_that_it_defines_for_others(
    file: str,
) -> None:
    tree = parse(ROOT / file)
    names = listed(tree)
    if names is None:
        return
    assert len(names) == len(set(names)), "a name is listed twice"
    assert defined(tree) <= set(names), "underscore it or list it"


def test_every_name_of_the_facade_is_there() -> None:
    for name in getattr(tensorcast_dask, "__all__", ()):
        assert getattr(tensorcast_dask, name) is not None, name
        assert name in dir(tensorcast_dask), name


def test_every_public_error_is_exported_and_documented() -> None:
    errors = importlib.import_module("tensorcast_dask.exceptions")
    classes = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value)
        and issubclass(value, Exception)
        and value.__module__ == errors.__name__
    }
    assert classes <= set(errors.__all__)
    assert all(name in (errors.__doc__ or "") for name in classes)
    assert all(inspect.getdoc(getattr(errors, name)) for name in classes)
