"""The import contracts refuse what they are written to refuse.

Rule: each planted import breaks the contract that it is meant for; a contract that keeps
silent here is decoration.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.kit.source import PACKAGE, ROOT

pytest.importorskip("importlinter", reason="the linters are in the group dev")

#: Contract -> file to plant in, and the import planted there.
PLANTS = {
    "floors": ("dataplane/planted.py", "import tensorcast_dask.store"),
    "shell-over-core": (
        "worker_plugin/state/planted.py",
        "import tensorcast_dask.worker_plugin.plugin",
    ),
    "store-shell-over-core": (
        "store/state/planted.py",
        "import tensorcast_dask.store.main",
    ),
    "instance-shell-over-core": (
        "instance/state/planted.py",
        "import tensorcast_dask.instance.attachment",
    ),
    "sans-io": ("tensors/planted.py", "import time"),
    "array-libraries": ("api/planted.py", "import torch"),
    "no-dask-in-store-or-instance": ("store/planted.py", "import distributed"),
    "acyclic": (
        "dataplane/planted.py",
        "import tensorcast_dask.dataplane.planted_too",
    ),
}


def contracts() -> list[dict[str, str]]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        found = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    assert isinstance(found, list)
    return found


def plant(tree: Path, name: str) -> None:
    file, line = PLANTS[name]
    for needed in ("worker_plugin/plugin.py", "store/main.py"):
        (tree / needed).touch()
    (tree / file).write_text(line + "\n")
    if name == "acyclic":
        (tree / "dataplane/planted_too.py").write_text(
            "import tensorcast_dask.dataplane.planted\n"
        )


def test_every_contract_has_a_planted_breach() -> None:
    assert {contract["id"] for contract in contracts()} == set(PLANTS)


@pytest.mark.parametrize("contract", PLANTS)
def test_a_planted_breach_breaks_its_contract(contract: str, tmp_path: Path) -> None:
    tree = tmp_path / "tensorcast_dask"
    shutil.copytree(PACKAGE, tree, ignore=shutil.ignore_patterns("__pycache__"))
    plant(tree, contract)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    tool = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [str(tool), "--no-cache", "--contract", contract],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"Contracts: 0 kept, 1 broken", done.stdout), done.stdout
