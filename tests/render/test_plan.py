"""The table and the bar of a plan."""

from __future__ import annotations

import pytest

from devmap_cli.devices.device import CPU, Device
from devmap_cli.mapfile import MapDevice, MapFile
from devmap_cli.render.plan import holdings, layer_bar

GPU0, GPU1 = Device("cuda", 0), Device("cuda", 1)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (["model.visual", "lm_head"], "model.visual, lm_head"),
        ([f"model.layers.{index}" for index in range(10)], "model.layers.0-9"),
        (["model.norm", "model.layers.0", "model.layers.1", "model.layers.3"], "model.norm, model.layers.0-1,3"),
        (["a.0", "b.0"], "a.0, b.0"),
        ([""], "the whole model"),
        ([], ""),
    ],
)
def test_holdings_in_few_words(keys: list[str], text: str) -> None:
    assert holdings(keys) == text


def plan_with(**weights: int) -> MapFile:
    devices = {"gpu0": GPU0, "gpu1": GPU1, "cpu": CPU}
    return MapFile({}, devices=tuple(MapDevice(devices[name], 100, size) for name, size in weights.items()))


def test_the_bar_shares_its_width_by_weight() -> None:
    bar, names = layer_bar(plan_with(gpu0=30, gpu1=10), width=40).plain.split("\n")
    assert bar == "█" * 30 + "▓" * 10
    assert names == "GPU 0".ljust(30) + "GPU 1".ljust(10)


def test_a_small_part_is_still_seen_and_an_empty_one_is_not() -> None:
    bar, _ = layer_bar(plan_with(gpu0=10**6, gpu1=1, cpu=0), width=40).plain.split("\n")
    assert bar.count("█") >= 39
    assert bar.count("▓") == 1
    assert "▒" not in bar


def test_a_model_without_weights_has_no_bar() -> None:
    assert layer_bar(plan_with(gpu0=0)).plain.strip() == ""
