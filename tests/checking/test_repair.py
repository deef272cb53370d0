from __future__ import annotations

from pathlib import Path

import pytest

from devmap_cli.checking import check_map
from devmap_cli.checking.check import check_document, repair_document
from devmap_cli.checking.repair import Change, repair
from devmap_cli.devices.device import Device
from tests.checking.rehearsing import Subject, bare
from tests.checking.toy import CPU, GPU_0, GPU_1, SPEC, WHOLE
from tests.support.toys import TOYS


def without(*keys: str) -> dict[str, Device]:
    return {key: device for key, device in WHOLE.items() if key not in keys}


@pytest.mark.parametrize(
    "device_map",
    [
        WHOLE,
        {"": GPU_0},
        {"lm_head": GPU_0, "model": GPU_0},
        {**without("model.layers.3"), "model.layers.3.attn": GPU_1, "model.layers.3.mlp": GPU_1},
    ],
)
def test_a_right_map_stays_as_it_is(device_map: dict[str, Device]) -> None:
    repaired, changes = repair(device_map, SPEC)
    assert changes == ()
    assert list(repaired.items()) == list(device_map.items())


def test_what_is_left_out_is_added() -> None:
    repaired, changes = repair(without("model.rotary_emb"), SPEC)
    assert repaired == {**WHOLE, "model.rotary_emb": GPU_1}  # with model.norm, defined before it
    assert changes == (Change("model.rotary_emb", GPU_1, "no key named it"),)


def test_a_cut_block_goes_where_most_of_it_is() -> None:
    parts = {"model.layers.3.attn": GPU_1, "model.layers.3.mlp": GPU_0}
    repaired, changes = repair({**without("model.layers.3"), **parts}, SPEC)
    assert repaired == {**WHOLE, "model.layers.3": GPU_1}  # 60 of 100 bytes
    assert changes == (Change("model.layers.3", GPU_1, "a block stays on one device"),)


def test_a_block_of_which_a_part_is_named_is_named_whole() -> None:
    repaired, _ = repair({**without("model.layers.3"), "model.layers.3.mlp": GPU_1}, SPEC)
    assert repaired == {**WHOLE, "model.layers.3": GPU_1}


def test_tied_weights_go_where_the_first_is() -> None:
    repaired, changes = repair({**WHOLE, "lm_head": GPU_1}, SPEC)
    assert repaired == WHOLE
    assert changes == (Change("lm_head", GPU_0, "shares its weights with model.embed"),)


def test_a_left_out_tied_weight_goes_where_the_other_is() -> None:
    assert repair({**without("model.embed"), "lm_head": CPU}, SPEC)[0] == {**WHOLE, "model.embed": CPU, "lm_head": CPU}


def test_keys_for_nothing_go() -> None:
    repaired, changes = repair({**WHOLE, "model.layers.11": GPU_1}, SPEC)
    assert repaired == WHOLE
    assert changes == (Change("model.layers.11", None, "names no part of the model"),)


def test_a_misspelt_key_keeps_its_device() -> None:
    layers = {key: device for key, device in WHOLE.items() if ".layers." in key}
    misspelt = {key.replace("layers", "layer"): device for key, device in layers.items()}
    repaired, changes = repair({**without(*layers), **misspelt}, SPEC)
    assert repaired == WHOLE
    assert changes[0] == Change("model.layers.0", GPU_0, "was model.layer.0")
    assert len(changes) == len(layers)


def test_a_glob_is_spelt_out() -> None:
    layers = [key for key in WHOLE if ".layers." in key]
    repaired, changes = repair({**without(*layers), "model.layers.*": GPU_1}, SPEC)
    assert repaired == {**WHOLE, **dict.fromkeys(layers, GPU_1)}
    assert {change.reason for change in changes} == {"was model.layers.*"}


def test_an_outer_key_gives_way_to_its_parts() -> None:
    repaired, changes = repair({"": GPU_0, "model.layers.3": GPU_1}, SPEC)
    assert check_map(repaired, SPEC) == ()
    assert repaired["model.layers.3"] == GPU_1
    assert {device for key, device in repaired.items() if key != "model.layers.3"} == {GPU_0}
    assert changes[-1] == Change("", None, "15 parts of it are named instead")


def test_an_inner_key_of_the_same_device_goes() -> None:
    repaired, changes = repair({"": GPU_0, "model.layers.3": GPU_0}, SPEC)
    assert repaired == {"": GPU_0}
    assert [change.module for change in changes] == [""]


def test_keys_come_in_module_order() -> None:
    assert list(repair(dict(reversed(without("model.norm").items())), SPEC)[0]) == list(WHOLE)


def test_a_map_of_nothing_puts_all_on_the_cpu() -> None:
    assert repair({"other": GPU_0}, SPEC)[0] == {"": CPU}


def test_a_right_map_is_rehearsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(tmp_path, TOYS["qwen2"].config)
    rehearser, document = subject.rehearser(None), bare({"": 0})
    found = check_document(document, rehearser)
    monkeypatch.setattr("devmap_cli.checking.check.check_document", None)
    assert repair_document(document, rehearser, found).report is found
