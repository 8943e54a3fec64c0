"""P38 and P13 on a disk that is really full: a small file system in a mount namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOUNT = 'mount -t tmpfs -o size=4m tmpfs "$1"'


def on_small_disk(
    folder: Path, command: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    script = f'{MOUNT} && {command} "$@"'
    return subprocess.run(
        [
            "unshare",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            script,
            "sh",
            str(folder),
            *arguments,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_a_full_disk_is_a_capacity_error_and_loses_nothing(tmp_path: Path) -> None:
    try:
        possible = on_small_disk(tmp_path, "true").returncode == 0
    except FileNotFoundError:
        possible = False
    if not possible:
        pytest.skip("no mount namespaces for this user")
    child = on_small_disk(tmp_path, f"'{sys.executable}' -m tests.kit.small_disk")
    assert child.returncode == 0, child.stderr
