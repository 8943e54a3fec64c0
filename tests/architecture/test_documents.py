"""What the documents say of the code is so: tests, files, settings, errors, commands."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from typing import Any

import pytest
import yaml

from tensorcast_dask import exceptions
from tensorcast_dask.cli import main
from tests.kit.source import PACKAGE, ROOT, tracked_files

#: "tests/...py::name", as documents name a test.
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
NAMED_FILE = re.compile(
    r"`((?:tests|examples|benchmarks|tensorcast_dask|docs)/[\w./-]+\.(?:py|md|yaml))(?:::\w+)?`"
)
ROW = re.compile(r"^\| `([^`]+)` \| (.*) \|$", re.MULTILINE)
SHOWN = [f"P{number:02}" for number in (*range(1, 15), 17, 18, *range(21, 39), 40)]
BRANCHES = {cls.__name__ for cls in exceptions.TensorCastError.__subclasses__()}


def text(name: str) -> str:
    return (ROOT / name).read_text()


def documents() -> list[str]:
    return [
        path.relative_to(ROOT).as_posix()
        for path in tracked_files()
        if path.suffix == ".md"
    ]


@cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse(text(path))
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


@pytest.mark.parametrize("document", documents())
def test_tests_and_files_that_a_document_names_exist(document: str) -> None:
    said = text(document)
    missing = {path for path in NAMED_FILE.findall(said) if not (ROOT / path).exists()}
    assert not missing
    unknown = {
        f"{path}::{name}"
        for path, name in NAMED_TEST.findall(said)
        if name not in functions_of(path)
    }
    assert not unknown


def test_every_requirement_has_its_tests() -> None:
    rows = re.findall(r"^\| (P\d\d) \|.*\|$", text("docs/reliability.md"), re.MULTILINE)
    assert rows == SHOWN
    for line in text("docs/reliability.md").splitlines():
        if re.match(r"\| P\d\d \|", line):
            assert NAMED_TEST.search(line), line


def test_the_defaults_that_the_page_of_settings_gives_are_the_defaults() -> None:
    tree = yaml.safe_load((PACKAGE / "tensorcast.yaml").read_text())["tensorcast"]
    said = {
        name: rest.split(" | ")[0]
        for name, rest in ROW.findall(text("docs/settings.md"))
    }
    assert said == {name: shown(value) for name, value in flat(tree)}


def test_errors_name_settings_that_there_are() -> None:
    tree = yaml.safe_load((PACKAGE / "tensorcast.yaml").read_text())["tensorcast"]
    known = {name for name, _ in flat(tree)}
    rooms = "|".join({name.split(".")[0] for name in known if "." in name})
    named = {
        name.replace("_", "-")
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(
            rf"\btensorcast\.((?:{rooms})\.[a-z_-]+)", path.read_text()
        )
    }
    assert named
    assert named <= known


def flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        inner = isinstance(value, dict) and bool(value)
        found += flat(value, f"{prefix}{key}.") if inner else [(prefix + key, value)]
    return found


def shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return ", ".join(value) or "none"
    return value if isinstance(value, str) else json.dumps(value)


def test_every_kind_of_error_is_explained_as_it_is() -> None:
    said = {
        name: tuple(rest.split(" | ")[:2])
        for name, rest in ROW.findall(text("docs/errors.md"))
    }
    kinds = {
        name: getattr(exceptions, name)
        for name in exceptions.__all__
        if name[0].isupper() and name not in BRANCHES | {"TensorCastError"}
    }
    assert said == {
        name: (cls.__mro__[1].__name__, "yes" if cls.retryable else "no")
        for name, cls in kinds.items()
    }


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    """Else `make docs` fails: add the page to a toctree of docs/index.md."""
    listed = set(re.findall(r"^[a-z/]+$", text("docs/index.md"), re.MULTILINE))
    pages = {
        name.removeprefix("docs/").removesuffix(".md")
        for name in documents()
        if name.startswith("docs/")
    }
    assert listed == pages - {"index"}


def test_every_kind_of_error_has_a_place_to_look() -> None:
    said = set(re.findall(r"`(\w+)`", text("docs/troubleshooting.md")))
    kinds = {name for name in exceptions.__all__ if name[0].isupper()}
    assert kinds - BRANCHES - {"TensorCastError"} <= said


def test_commands_that_a_document_gives_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    for document in documents():
        said = text(document)
        assert set(re.findall(r"`make ([a-z-]+)", said)) <= targets, document
        assert set(re.findall(r"^\$ make ([a-z-]+)", said, re.MULTILINE)) <= targets
        named = set(re.findall(r"(?:`|^\$ )tensorcast ([a-z]+)", said, re.MULTILINE))
        assert named <= set(main.commands), document
