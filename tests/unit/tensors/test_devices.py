"""Names of devices and the setting of their kind."""

from __future__ import annotations

import pytest

from tensorcast_dask.tensors.devices import (
    DeviceId,
    DeviceSpec,
    parse_device_name,
    parse_devices,
)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        (None, DeviceSpec()),
        ("", DeviceSpec()),
        ("cupy", DeviceSpec("cupy")),
        (" torch ", DeviceSpec("torch")),
        ("emulated:2x1GiB", DeviceSpec("emulated", 2, 1 << 30)),
        ("emulated:1x64MiB:pool", DeviceSpec("emulated", 1, 64 << 20, pool=True)),
        ("emulated:1x 64 MiB", DeviceSpec("emulated", 1, 64 << 20)),
    ],
)
def test_the_setting_names_a_kind(text: object, spec: DeviceSpec) -> None:
    assert parse_devices(text) == spec
    assert parse_devices(str(spec)) == spec


@pytest.mark.parametrize(
    "text",
    ["cuda", "emulated", "emulated:0x1", "emulated:1x0", "emulated:2x", 3, "rocm"],
)
def test_another_setting_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="takes"):
        parse_devices(text)


def test_a_device_is_its_uuid() -> None:
    one = DeviceId("GPU-1", "cuda", 0)
    assert one == DeviceId("GPU-1", "cuda", 3)
    assert hash(one) == hash(DeviceId("GPU-1", "cuda", 3))
    assert one != DeviceId("GPU-2", "cuda", 0)
    assert str(one) == "cuda:0"


def test_people_name_devices_by_ordinal() -> None:
    assert parse_device_name("cuda:3") == ("cuda", 3)
    assert parse_device_name("emulated") == ("emulated", 0)
    for name in ("", "gpu:0", "cuda:-1", "cuda:x"):
        with pytest.raises(ValueError, match="takes a device"):
            parse_device_name(name)
