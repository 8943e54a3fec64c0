"""With cupy and UCX installed and no driver: what is missing is said, and all else works.

CI installs cupy for these (`.ci/run`); elsewhere they skip.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from distributed import Client

import tensorcast_dask as tc
from tensorcast_dask.dataplane.devices import open_device
from tensorcast_dask.exceptions import UnsupportedPlatform
from tensorcast_dask.tensors.devices import parse_devices
from tests.kit.ucx_holders import NO_UCX

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        importlib.util.find_spec("cupy") is None, reason="cupy is not installed"
    ),
    pytest.mark.skipif(
        Path("/proc/driver/nvidia/version").exists(), reason="there is a driver"
    ),
]
DRIVER = "install the NVIDIA driver"


def test_doctor_names_what_is_missing() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "tensorcast_dask.cli", "doctor", "--json"],
        env=os.environ | {"TENSORCAST_DEVICE": "cupy"},
        capture_output=True,
        check=True,
        timeout=60,
    ).stdout
    found = {each["what"]: each for each in json.loads(said)}
    assert found["devices"]["verdict"] == "limited"
    assert DRIVER in found["devices"]["fix"]
    assert NO_UCX or found["UCX"]["found"].startswith("ucxx ")


@pytest.mark.parametrize("kind", [None, "cupy"])
def test_a_device_cannot_be_opened(kind: str | None) -> None:
    with pytest.raises(UnsupportedPlatform, match=DRIVER):
        open_device("cuda:0", parse_devices(kind))


def touched() -> list[str]:
    """Libraries of devices that a process has loaded."""
    return sorted({"cupy", "rmm", "ucxx", "torch"} & {*sys.modules})


def test_a_cluster_works_and_says_why_it_has_no_device() -> None:
    with (
        TemporaryDirectory(
            prefix="tc-", dir="/tmp"
        ) as folder,  # a short one, for sockets
        tc.LocalCluster(
            1,
            host_memory="64 MiB",
            device_memory="64 MiB",
            settings={"run-dir": folder, "transfer": {"ucx": "auto"}},
        ) as cluster,
        tc.connect(cluster) as cast,
    ):
        held = cast.put({"x": np.arange(1 << 18)}, "a/x")
        with pytest.raises(UnsupportedPlatform, match=DRIVER):
            cast.prefetch(held, device="cuda:0").result()
        with pytest.raises(UnsupportedPlatform, match=DRIVER):
            held.tensor_dict(device="cuda:0")
        # Allocators, contexts and serializers of a dask-cuda worker are left to it.
        with Client(cluster) as client:
            assert list(client.run(touched).values()) == [[]]
        found = held.tensor_dict(framework="numpy")["x"]
        assert (found == np.arange(1 << 18)).all()
