from __future__ import annotations

import subprocess
import sys

import pytest

from devmap_cli.checking import Finding, check_map, weights_by_device
from devmap_cli.devices.device import Device
from devmap_cli.model.spec import ModelSpec, ModuleSpec
from tests.checking.toy import CPU, GPU_0, GPU_1, SPEC, WHOLE, tensor


def without(*keys: str) -> dict[str, Device]:
    return {key: device for key, device in WHOLE.items() if key not in keys}


def only(findings: tuple[Finding, ...]) -> Finding:
    (finding,) = findings
    assert "\n" not in finding.message + finding.fix
    return finding


def test_a_right_map_has_no_findings() -> None:
    assert check_map(WHOLE, SPEC) == ()
    assert check_map({"": GPU_0}, SPEC) == ()
    assert check_map({"model": GPU_0, "lm_head": GPU_0}, SPEC) == ()


def test_uncovered_parameters_are_named_by_the_largest_module() -> None:
    finding = only(check_map(without("model.layers.10"), SPEC))
    assert (finding.code, finding.severity, finding.module) == ("uncovered-parameter", "error", "model.layers.10")
    assert finding.message == "model.layers.10 has no device (2 parameters, 100 B)"


def test_layers_1_does_not_cover_layers_10() -> None:
    assert only(check_map(without("model.layers.10"), SPEC)).module == "model.layers.10"


def test_the_fix_is_a_line_of_the_map_that_mends_it() -> None:
    finding = only(check_map(without("model.norm"), SPEC))
    assert finding.fix == 'add "model.norm": 0'
    assert check_map({**without("model.norm"), "model.norm": GPU_0}, SPEC) == ()


def test_a_forgotten_rotary_embedding_is_an_uncovered_buffer() -> None:
    finding = only(check_map(without("model.rotary_emb"), SPEC))
    assert (finding.code, finding.severity, finding.module) == ("uncovered-buffer", "error", "model.rotary_emb")
    assert "1 buffer, 16 B" in finding.message


def test_a_tied_weight_needs_a_device_under_each_of_its_names() -> None:
    assert only(check_map(without("lm_head"), SPEC)).module == "lm_head"


def test_a_tensor_of_a_module_named_in_part() -> None:
    spec = ModelSpec(
        "toy",
        None,
        "Toy",
        "toy",
        "float32",
        ModuleSpec("", "Toy", (tensor("cls_token", 4),), (ModuleSpec("norm", "Norm", (tensor("weight", 8),)),)),
    )
    assert only(check_map({"norm": GPU_0}, spec)).module == "cls_token"
    assert check_map({"norm": GPU_0, "cls_token": GPU_0}, spec) == ()


def test_a_map_of_another_model_leaves_the_whole_uncovered() -> None:
    findings = check_map({"transformer.wte": GPU_0}, SPEC)
    assert [finding.code for finding in findings] == ["uncovered-parameter", "unmatched-key"]
    assert findings[0].message.startswith("the whole model has no device")


def test_a_key_that_matches_nothing_is_a_warning_with_the_nearest_name() -> None:
    uncovered, finding = check_map({**without("model.layers.10"), "model.layer.10": GPU_1}, SPEC)
    assert (uncovered.code, uncovered.module) == ("uncovered-parameter", "model.layers.10")
    assert (finding.code, finding.severity, finding.module) == ("unmatched-key", "warning", "model.layer.10")
    assert finding.fix == "rename it to model.layers.10"
    assert only(check_map({**WHOLE, "model.layer.10": GPU_1}, SPEC)).fix == "remove it"
    assert only(check_map({**WHOLE, "zzz": GPU_1}, SPEC)).fix == "remove it"


@pytest.mark.parametrize(("device", "severity"), [(GPU_0, "warning"), (GPU_1, "error")])
def test_overlapping_keys(device: Device, severity: str) -> None:
    finding = only(check_map({"": GPU_0, "model.layers.3": device}, SPEC))
    assert (finding.code, finding.severity, finding.module) == ("overlapping-keys", severity, "model.layers.3")


def test_keys_that_name_nothing_do_not_overlap() -> None:
    finding = only(check_map({"": GPU_0, "model.layer.3": GPU_1}, SPEC))
    assert (finding.code, finding.severity) == ("unmatched-key", "warning")


def test_a_misspelt_key_is_renamed_not_added_to() -> None:
    layers = {key: device for key, device in WHOLE.items() if ".layers." in key}
    misspelt = {key.replace("layers", "layer"): device for key, device in layers.items()}
    uncovered, *unmatched = check_map({**without(*layers), **misspelt}, SPEC)
    assert uncovered.module == "model.layers"
    assert uncovered.fix == "rename model.layer.0 to model.layers.0, and likewise 10 more"
    assert {finding.fix for finding in unmatched} == {f"rename it to {name}" for name in layers}


def test_a_glob_is_no_key() -> None:
    layers = [key for key in WHOLE if ".layers." in key]
    uncovered, unmatched = check_map({**without(*layers), "model.layers.*": GPU_1}, SPEC)
    assert uncovered.consequence == "loading ends there"
    assert (unmatched.code, unmatched.severity) == ("unmatched-key", "error")
    assert unmatched.fix == "name the 11 parts that model.layers.* means: model.layers.0 to model.layers.10"


def test_a_key_that_begins_the_name_of_what_is_left_out_takes_it() -> None:
    finding = only(check_map(without("model.layers.10"), SPEC))  # model.layers.1 is on GPU 0
    assert finding.consequence == (
        "transformers loads it to GPU 0, as its name begins with model.layers.1, and accelerate then refuses the map"
    )
    assert "transformers leaves it on the cpu" in only(check_map(without("model.norm"), SPEC)).consequence


def test_keys_in_any_script_are_told_as_they_are() -> None:
    assert "модель" in only(check_map({**WHOLE, "модель": GPU_0}, SPEC)).message


@pytest.mark.parametrize("odd", ["npu:0", "xpu:1", "mps"])
def test_accelerators_of_several_kinds(odd: str) -> None:
    finding = only(check_map({**WHOLE, "model.norm": Device.parse(odd)}, SPEC))
    assert (finding.code, finding.severity) == ("mixed-accelerators", "error")
    assert odd in finding.message


def test_a_block_that_may_not_be_split() -> None:
    parts = {"model.layers.3.attn": GPU_0, "model.layers.3.mlp": GPU_1}
    finding = only(check_map({**without("model.layers.3"), **parts}, SPEC))
    assert (finding.code, finding.severity, finding.module) == ("split-block", "error", "model.layers.3")
    assert "GPU 0 and GPU 1" in finding.message


def test_a_module_that_computes_with_its_own_tensors_is_not_split_either() -> None:
    root = ModuleSpec("", "Toy", children=(ModuleSpec("head", "Linear", (tensor("weight", 8), tensor("bias", 4))),))
    spec = ModelSpec("toy", None, "Toy", "toy", "float32", root)
    finding = only(check_map({"head.weight": GPU_0, "head.bias": GPU_1}, spec))
    assert (finding.code, finding.module) == ("split-block", "head")
    assert finding.fix == 'put it on one device: "head": 0'


def test_a_block_named_by_its_parts_on_one_device_is_whole() -> None:
    parts = {"model.layers.3.attn": GPU_1, "model.layers.3.mlp": GPU_1}
    assert check_map({**without("model.layers.3"), **parts}, SPEC) == ()


def test_tied_weights_apart() -> None:
    finding = only(check_map({**WHOLE, "lm_head": GPU_1}, SPEC))
    assert (finding.code, finding.severity, finding.module) == ("split-tie", "error", "model.embed.weight")
    assert finding.fix == 'put them on one device: "lm_head": 0'
    assert finding.consequence.startswith("accelerate ties them again on one device")
    with_cpu = only(check_map({**WHOLE, "lm_head": CPU}, SPEC))
    assert with_cpu.consequence == "each of them holds a copy"


def test_weights_count_once_per_storage() -> None:
    # GPU 0: 200 embedding, 5 × 100 layers, 16 rotary; GPU 1: 6 × 100 layers, 8 norm
    assert weights_by_device(WHOLE, SPEC) == {GPU_0: 716, GPU_1: 608}


@pytest.mark.parametrize(("budget_bytes", "is_over"), [(716, False), (715, True)])
def test_weights_over_budget(budget_bytes: int, is_over: bool) -> None:
    findings = check_map(WHOLE, SPEC, {GPU_0: budget_bytes, GPU_1: 1000})
    assert [(finding.code, finding.module) for finding in findings] == ([("over-budget", "0")] if is_over else [])
    assert not is_over or "716 B of weights: 1 B over its budget of 715 B" in findings[0].message


def test_several_things_wrong_are_all_told() -> None:
    findings = check_map({**without("model.norm", "model.rotary_emb"), "lm_head": CPU}, SPEC, {CPU: 10})
    assert [finding.code for finding in findings] == ["uncovered-parameter", "uncovered-buffer", "split-tie"]


def test_the_judge_needs_neither_torch_nor_the_planner() -> None:
    code = (
        "import sys, devmap_cli.checking, devmap_cli.mapfile;"
        "print([name for name in sys.modules if name == 'torch' or name.startswith('devmap_cli.planning')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
