"""Names of devices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devmap_cli.devices.device import CPU, DISK, Device, DeviceError, main_device


@pytest.mark.parametrize(
    ("text", "device", "map_value", "label"),
    [
        ("0", Device("cuda", 0), 0, "GPU 0"),
        (3, Device("cuda", 3), 3, "GPU 3"),
        ("cuda:1", Device("cuda", 1), 1, "GPU 1"),
        ("CUDA:1", Device("cuda", 1), 1, "GPU 1"),
        ("npu:0", Device("npu", 0), "npu:0", "npu:0"),
        ("xpu:12", Device("xpu", 12), "xpu:12", "xpu:12"),
        ("mps", Device("mps"), "mps", "mps"),
        ("mps:0", Device("mps"), "mps", "mps"),
        (" Cpu ", CPU, "cpu", "cpu"),
        ("DISK", DISK, "disk", "disk"),
    ],
)
def test_reads_devices(text: str | int, device: Device, map_value: int | str, label: str) -> None:
    assert Device.parse(text) == device
    assert device.map_value == map_value
    assert device.label == label


@pytest.mark.parametrize("text", ["", "gpu", "gpu:0", "cuda", "cuda:", "cuda:x", "-1", "0.5", "cpu:0", "tpu:0", True])
def test_refuses_what_is_no_device(text: str) -> None:
    with pytest.raises(DeviceError, match="is no device"):
        Device.parse(text)


def test_only_cpu_and_disk_do_not_compute() -> None:
    assert [device.is_accelerator for device in (Device("cuda", 0), Device("mps"), CPU, DISK)] == [
        True,
        True,
        False,
        False,
    ]


@given(st.sampled_from(["cuda", "npu", "xpu", "sim"]), st.integers(0, 99))
def test_what_a_map_holds_names_the_same_device(kind: str, index: int) -> None:
    device = Device(kind, index)
    assert Device.parse(device.map_value) == device
    assert Device.parse(str(device)) == device


@pytest.mark.parametrize("text", ["1024", "cuda:9999", "9" * 5000])
def test_a_number_above_any_machine_is_a_typo(text: str) -> None:
    with pytest.raises(DeviceError, match="no machine has a number above 1023"):
        Device.parse(text)


@pytest.mark.parametrize(
    ("values", "main"),
    [
        ([1, 0, "cpu"], 0),
        (["cpu", 3, 2, "disk"], 2),
        (["npu:1", "cpu", "npu:0"], "npu:0"),
        (["disk", "cpu"], "cpu"),
        (["mps", "cpu"], "mps"),
    ],
)
def test_the_main_device_is_the_one_that_accelerate_picks(values: list[int | str], main: int | str) -> None:
    assert main_device(map(Device.parse, values)).map_value == main
    if all(isinstance(value, int) or value in ("cpu", "disk") for value in values):
        accelerates = [*(set(values) - {"cpu", "disk"}), "cpu"][0]
        assert main == accelerates
