from __future__ import annotations

import pytest

from devmap_cli.checking.misnamed import caught_by, loaded_by, meant_by
from devmap_cli.devices.device import Device
from tests.checking.toy import GPU_0, GPU_1, SPEC, WHOLE

TENSORS = [name for name, _ in SPEC.tensors()]


def without(*keys: str) -> dict[str, Device]:
    return {key: device for key, device in WHOLE.items() if key not in keys}


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("model.nrom", "model.norm"),
        ("model.Norm", "model.norm"),
        (" model.norm ", "model.norm"),
        ("model.norm.", "model.norm"),
        ("norm", "model.norm"),
        ("module.model.norm", "model.norm"),
    ],
)
def test_a_key_that_is_nearly_a_part(key: str, part: str) -> None:
    assert meant_by({**without("model.norm"), key: GPU_1}, SPEC) == {key: (part,)}


@pytest.mark.parametrize("key", ["model.layers.11", "model.layer.4", "model.other", "zzz", "layers"])
def test_a_key_that_means_nothing_that_is_free(key: str) -> None:
    assert meant_by({**without("model.layers.3"), key: GPU_1}, SPEC) == {}


def test_each_part_is_meant_by_one_key() -> None:
    keys = {"model.layer.3": GPU_0, "layers.3": GPU_1}
    assert meant_by({**without("model.layers.3"), **keys}, SPEC) == {"model.layer.3": ("model.layers.3",)}


def test_a_glob_means_all_that_it_matches_and_no_other_key_places() -> None:
    layers = [f"model.layers.{index}" for index in range(11)]
    left = {key: device for key, device in WHOLE.items() if key not in layers[1:]}
    assert meant_by({**left, "model.layers.*": GPU_1}, SPEC) == {"model.layers.*": tuple(layers[1:])}


@pytest.mark.parametrize(
    "device_map",
    [
        {"model.layers.1": GPU_0, "lm_head": GPU_1},
        {"model": GPU_0, "model.layers.1": GPU_1},
        {"model.lay": GPU_0},
        {"model.": GPU_0},
        {"": GPU_1, "model.norm": GPU_0},
        WHOLE,
    ],
)
def test_keys_are_matched_as_transformers_does(device_map: dict[str, Device]) -> None:
    from transformers.integrations.accelerate import expand_device_map

    expanded = expand_device_map(device_map, TENSORS)
    for name in TENSORS:
        key = loaded_by(name, device_map)
        assert expanded[name] == ("cpu" if key is None else device_map[key])


@pytest.mark.parametrize(("key", "error"), [("model.layers.*", KeyError), ("model.layers.[0-9]", KeyError)])
def test_a_key_that_is_a_pattern_ends_loading(key: str, error: type[Exception]) -> None:
    from transformers.integrations.accelerate import expand_device_map

    with pytest.raises(error):
        expand_device_map({key: GPU_0}, TENSORS)
    with pytest.raises(LookupError):
        loaded_by("model.layers.0.attn.weight", {key: GPU_0})
    with pytest.raises(LookupError):
        caught_by(key, TENSORS)


def test_a_key_that_is_no_pattern_at_all_ends_loading() -> None:
    with pytest.raises(LookupError):
        caught_by("model.layers.(0", TENSORS)
