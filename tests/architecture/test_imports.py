"""What may import what, and what an import may cost.

Rules:

1. Modules are tried in few processes: one loads the third-party libraries and forks a
   child per module, so each module of ours is imported first and alone.
2. torch, cupy and ucxx are made unimportable there: they are optional everywhere.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest

from tests.kit.source import PACKAGE, ROOT, module_name, package_files, parse

HEAVY = ("numpy", "dask", "distributed", "duckdb", "tornado", "torch", "asyncio")

#: The pure rooms may import these and what is below them in the package, nothing else.
PURE_STDLIB = frozenset(
    {
        "__future__",
        "abc",
        "bisect",
        "collections",
        "contextlib",
        "copy",
        "dataclasses",
        "enum",
        "fractions",
        "functools",
        "hashlib",
        "heapq",
        "hmac",
        "itertools",
        "json",
        "math",
        "operator",
        "re",
        "string",
        "struct",
        "types",
        "typing",
        "unicodedata",
        "urllib",
    }
)
#: Third-party libraries that are values and arithmetic only.
PURE_LIBRARIES = frozenset({"msgspec", "typing_extensions", "xxhash"})

#: The one file that drives an optional library; only a caller who has it imports it.
ADAPTERS = {"tensorcast_dask.dataplane.arrays.torch_backend": "torch"}

#: Runs in a fresh interpreter: reads module names, prints {module: error}.
ALONE = r"""
import gc, importlib, importlib.abc, json, os, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "cupy", "ucxx"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, Absent())
request = json.load(sys.stdin)
for library in request["libraries"]:
    importlib.import_module(library)
# Between fork and exit of a child nothing else runs here: no thread was started by us.
gc.disable()  # nor does a child copy pages only to look at them
failures = {}

def begin(module):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        error = ""
        try:
            importlib.import_module(module)
        except BaseException as failure:
            error = f"{type(failure).__name__}: {failure}"
        os.write(writer, error.encode()[:4000])
        os._exit(0)
    os.close(writer)
    return module, child, reader

def end(module, child, reader):
    with os.fdopen(reader) as stream:
        error = stream.read()
    _, status = os.waitpid(child, 0)
    if error or status:
        failures[module] = error or f"ended with status {status}"

running = []
for module in request["modules"]:
    running.append(begin(module))
    if len(running) == os.cpu_count():
        end(*running.pop(0))
for one in running:
    end(*one)
json.dump(failures, sys.stdout)
"""


#: Only ever reached on a machine that is busy with other things.
PATIENCE_S = 200


def run_python(code: str, *arguments: str, stdin: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_after_importing(*modules: str) -> set[str]:
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    return set(run_python(code, *modules).split())


def modules_below(room: str) -> list[str]:
    return [
        module_name(path)
        for path in package_files()
        if path.is_relative_to(PACKAGE / room) and path.stem != "__main__"
    ]


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_after_importing("tensorcast_dask").isdisjoint(HEAVY)


def test_the_store_process_needs_no_dask_no_numpy_and_no_torch() -> None:
    loaded = loaded_after_importing(*modules_below("store"))
    assert loaded.isdisjoint({"dask", "distributed", "numpy", "torch", "duckdb"})


def test_an_engine_can_use_the_instance_room_without_dask() -> None:
    loaded = loaded_after_importing(*modules_below("instance"))
    assert loaded.isdisjoint({"dask", "distributed", "tornado", "duckdb", "torch"})


def test_the_nouns_need_no_third_party_library_but_msgspec_and_xxhash() -> None:
    loaded = loaded_after_importing(*modules_below("tensors"))
    assert loaded.isdisjoint({*HEAVY, "threading", "socket", "psutil"} - {"asyncio"})


@pytest.mark.timeout(PATIENCE_S + 10)
def test_every_module_imports_alone_and_without_torch_cupy_or_ucxx() -> None:
    modules = [module_name(p) for p in package_files() if p.stem != "__main__"]
    libraries = ["bokeh.plotting", "click", "distributed", "duckdb", "numpy", "psutil"]
    libraries += ["tornado.web"]
    request = json.dumps({"modules": modules, "libraries": libraries})
    failures = json.loads(run_python(ALONE, stdin=request))
    for module, library in ADAPTERS.items():
        assert f"No module named '{library}'" in failures.pop(module)
    assert failures == {}


#: What every pure room may import; the floors say which of them lies below which.
PURE_ROOMS = ("policies", "tensors", "exceptions")


def pure_files() -> list[str]:
    return [
        str(path.relative_to(ROOT))
        for path in package_files()
        if path.is_relative_to(PACKAGE / "tensors")
        or path.is_relative_to(PACKAGE / "policies")
        or "state" in path.parts
    ]


def imported_names(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("file", pure_files())
def test_a_pure_room_imports_only_values_and_arithmetic(file: str) -> None:
    path = ROOT / file
    room = module_name(path.parent / "__init__.py")
    state = room[: room.index(".state") + len(".state")] if ".state" in room else room
    ours = (state, *(f"tensorcast_dask.{one}" for one in PURE_ROOMS))
    strangers = {
        name
        for name in imported_names(parse(path))
        if name.partition(".")[0] not in PURE_STDLIB | PURE_LIBRARIES
        and not name.startswith(ours)
    }
    assert strangers == set()
