"""The table and the bar of a plan."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from devmap_cli.devices.device import CPU, Device
from devmap_cli.mapfile import MapDevice, MapFile
from devmap_cli.render.plan import DeviceTable, holdings, layer_bar

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


def wide_plan(count: int) -> MapFile:
    gpus = [Device("cuda", index) for index in range(count)]
    device_map = {"model.language_model.embed_tokens": gpus[0], "model.language_model.layers.0": gpus[1]}
    return MapFile(device_map, devices=tuple(MapDevice(gpu, 10**9, 10**8, 10**7) for gpu in gpus))


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_a_table_keeps_device_peak_use_and_whole_names_at_any_width(width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(DeviceTable(wide_plan(2), {}))
    text = captured.get()
    for word in ("GPU 0", "GPU 1", "104.9 MiB", "11 %", "model.language_model.embed_tokens"):
        assert word in text
    assert max(map(len, text.splitlines())) <= width


def test_many_devices_that_hold_nothing_are_one_line() -> None:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(DeviceTable(wide_plan(100), {}))
    assert captured.get().splitlines()[3:] == ["GPU 2-99 hold nothing"]


def test_names_that_do_not_fit_are_left_out_of_the_bar() -> None:
    bar, names = layer_bar(wide_plan(20), width=40).plain.split("\n")
    assert (len(bar), names.strip()) == (40, "")
    assert layer_bar(wide_plan(41), width=40).plain == ""


def test_a_model_without_weights_has_no_bar() -> None:
    assert layer_bar(plan_with(gpu0=0)).plain.strip() == ""
