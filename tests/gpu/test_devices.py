"""The contract of devices on a GPU: with cupy, and with torch alone."""

from __future__ import annotations

from tests.kit.contracts_device import DeviceContract

_OTHERS_USE_IT_TOO = 64 << 20


class TestCupy(DeviceContract):
    setting = "cupy"
    name = "cuda:0"
    slack_bytes = _OTHERS_USE_IT_TOO


class TestTorch(DeviceContract):
    setting = "torch"
    name = "cuda:0"
    exports = False
    slack_bytes = _OTHERS_USE_IT_TOO
