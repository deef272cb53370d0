from __future__ import annotations

from dataclasses import replace

import pytest

from devmap_cli.checking.layers import check_layers
from devmap_cli.devices.device import Device
from devmap_cli.model.spec import ModelSpec
from tests.checking.toy import CPU, DISK, GPU_0, GPU_1, SPEC, WHOLE

GPU_2 = Device.parse("2")


def layers(*devices: Device) -> dict[str, Device]:
    """The toy's eleven layers, the last device taking all that are left."""
    places = [*devices, *[devices[-1]] * (11 - len(devices))]
    return {**WHOLE, **{f"model.layers.{index}": device for index, device in enumerate(places)}}


def quantized(**quantization: object) -> ModelSpec:
    return replace(SPEC, quantization=quantization)


def test_layers_in_a_row_are_fine() -> None:
    assert check_layers(WHOLE, SPEC) == ()
    assert check_layers({"": CPU}, SPEC) == ()


def test_layers_that_come_back_to_a_device() -> None:
    (finding,) = check_layers(layers(GPU_0, GPU_1, GPU_0), SPEC)
    assert (finding.code, finding.severity, finding.module) == ("back-and-forth", "warning", "model.layers")
    assert finding.message == "the layers of model.layers go GPU 0 → GPU 1 → GPU 0"
    assert finding.consequence == "2 crossings in each pass through them where 1 would do"


def test_offloaded_layers_compute_on_the_first_gpu() -> None:
    assert check_layers(layers(GPU_0, CPU, GPU_0, GPU_1), SPEC) == ()
    (finding,) = check_layers(layers(GPU_0, GPU_1, CPU, GPU_1), SPEC)
    assert finding.message == "the layers of model.layers go GPU 0 → GPU 1 → GPU 0 → GPU 1"


def test_the_execution_order_counts_not_the_names() -> None:
    order = tuple(f"model.layers.{index}" for index in (0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9))
    device_map = layers(*(GPU_0 if index % 2 == 0 else GPU_1 for index in range(11)))
    assert check_layers(device_map, replace(SPEC, execution_order=order)) == ()
    assert [finding.code for finding in check_layers(device_map, SPEC)] == ["back-and-forth"]


def test_layers_that_the_execution_order_leaves_out_are_where_they_are_defined() -> None:
    order = tuple(f"model.layers.{index}" for index in range(11) if index not in (3, 8))
    device_map = layers(*[GPU_0] * 5, *[GPU_1] * 6)
    assert check_layers(device_map, replace(SPEC, execution_order=order)) == ()


@pytest.mark.parametrize(("num_off", "is_found"), [(3, False), (4, True)])  # a third of 11 is 3.7
def test_a_third_of_the_layers_off_the_gpus(num_off: int, is_found: bool) -> None:
    device_map = layers(*[CPU] * num_off, GPU_0)
    findings = check_layers(device_map, SPEC)
    assert [finding.code for finding in findings] == (["mostly-on-cpu"] if is_found else [])
    assert not is_found or findings[0].message == "4 of 11 layers are on cpu"


def test_a_model_all_on_cpu_was_meant_so() -> None:
    assert check_layers(dict.fromkeys(WHOLE, CPU), SPEC) == ()


def test_quantized_layers_off_the_gpus() -> None:
    device_map = {**layers(CPU, DISK, GPU_0), "lm_head": CPU}
    findings = check_layers(device_map, quantized(quant_method="awq", bits=4))
    assert [(finding.code, finding.severity, finding.module) for finding in findings] == [
        ("quantized-on-cpu", "error", "model.layers.0"),
        ("quantized-on-cpu", "error", "model.layers.1"),
    ]
    assert check_layers(device_map, quantized(quant_method="fp8")) == ()


def test_bitsandbytes_refuses_anything_off_the_gpus() -> None:
    findings = check_layers({**WHOLE, "lm_head": CPU}, quantized(scheme="nf4"))
    assert [finding.module for finding in findings] == ["lm_head"]
    assert "llm_int8_enable_fp32_cpu_offload" in findings[0].consequence
    assert check_layers({"": CPU}, quantized(scheme="nf4")) == ()
    assert [finding.code for finding in check_layers({"": DISK}, quantized(scheme="nf4"))] == ["quantized-on-cpu"]
