"""The table and the bar of a plan."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.cards import Card, cards_named
from devmap_cli.devices.device import CPU, DISK, Device
from devmap_cli.devices.measuring import Measured
from devmap_cli.mapfile import MapDevice, MapFile, MapWorkload
from devmap_cli.model.spec import KvCacheSpec, ModelSpec, ModuleSpec
from devmap_cli.planning.nouns import Block, Placement
from devmap_cli.planning.pace import Pace
from devmap_cli.planning.profile import Profile
from devmap_cli.planning.speed import DeviceSpeed, Speed
from devmap_cli.render.plan import DeviceTable, holdings, layer_bar, plan_notes, speed_basis, speed_note
from devmap_cli.simulation.trace import Trace

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


LAYERS = 6
GIB = 1 << 30


def spec_of(**changes: Any) -> ModelSpec:
    """Six layers that may not be split and keep a cache."""
    layers = tuple(ModuleSpec(str(index), "Layer", no_split=True) for index in range(LAYERS))
    root = ModuleSpec("", "Model", children=(ModuleSpec("layers", "ModuleList", children=layers),))
    cache = tuple(KvCacheSpec(f"layers.{index}", 64) for index in range(LAYERS))
    return replace(ModelSpec("m", None, "Model", "toy", "float16", root, kv_cache=cache), **changes)


def map_of(*places: Device, kv_cache_bytes: int = GIB, activation_bytes: int = GIB) -> MapFile:
    """A layer of 1 GiB on each of `places`."""
    gpus = {device: place for device, place in ((GPU0, 0), (GPU1, 1)) if device in places}
    devices = tuple(
        MapDevice(
            device,
            9 * GIB,
            places.count(device) * GIB,
            kv_cache_bytes if device in gpus else 0,
            activation_bytes if device in gpus else 0,
        )
        for device in (*gpus, CPU, DISK)
    )
    device_map = {f"layers.{index}": device for index, device in enumerate(places)}
    return MapFile(device_map, devices=devices, workload=MapWorkload(1, 8, 8))


def pace_of(cards: dict[Device, Card], measured: Measured | None = None) -> Pace:
    return Pace(Profile(Trace(0, (), (), (), (), (), {}), (), {}), "float16", cards, measured)


def notes_of(plan: MapFile, spec: ModelSpec | None = None) -> list[str]:
    return plan_notes(spec or spec_of(), plan, [], weights_only=False)[1:]


def test_nothing_is_said_of_offloading_where_there_is_none() -> None:
    assert notes_of(map_of(*[GPU0] * 3, *[GPU1] * 3)) == []
    assert notes_of(map_of(*[CPU] * 6)) == []


def test_few_offloaded_layers_are_a_figure() -> None:
    assert notes_of(map_of(*[GPU0] * 5, CPU)) == [
        "17 % of the weights are offloaded and cross to a GPU for every token"
    ]


def test_a_third_of_the_layers_offloaded_is_a_warning() -> None:
    _, warning = notes_of(map_of(*[GPU0] * 4, CPU, DISK))
    assert warning == (
        "warning: 2 of 6 layers are on cpu and disk, which decides the speed: a smaller dtype, --quantize or more GPUs "
        "would help"
    )
    _, warning = notes_of(map_of(*[GPU0] * 4, CPU, DISK), spec_of(quantization={"quant_method": "mxfp4"}))
    assert warning.endswith(": a smaller model or more GPUs would help")


def test_a_peak_without_a_cache_is_told_to_be_in_loading() -> None:
    (note,) = notes_of(map_of(*[GPU0] * 3, *[GPU1] * 3, kv_cache_bytes=0))
    assert note == "GPU 0, GPU 1 take the most while loading, before there is a KV cache"
    assert notes_of(map_of(*[GPU0] * 6, kv_cache_bytes=0), spec_of(kv_cache=())) == []


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ([GPU0] * 6, "8 s per token, the first after 9 s"),
        (
            [*[GPU0] * 4, CPU, DISK],
            "8 s per token, of it 2 s for the weights on cpu and 3 s for the weights on disk, the",
        ),
        ([CPU] * 6, "8 s per token, the first after 9 s"),
    ],
    ids=["gpu", "offloaded", "cpu"],
)
def test_what_offloaded_weights_cost_for_each_token(places: list[Device], text: str) -> None:
    shares = {GPU0: DeviceSpeed(3.0), CPU: DeviceSpeed(2.0), DISK: DeviceSpeed(3.0)}
    budgets = Budgets.of(dict.fromkeys((GPU0, CPU, DISK), 9 * GIB))
    blocks = tuple(Block((f"layers.{index}",), GIB) for index in range(LAYERS))
    placement = Placement("auto", blocks, tuple(places), budgets)
    assert text in speed_note(Speed(8.0, 9.0, 10.0, shares), pace_of({}), placement)


MEASURED_HERE = Measured(5e10, {"float32": 1e11}, 1e9, None)


@pytest.mark.parametrize(
    ("names", "measured", "devices", "text"),
    [
        ([], None, [GPU0, GPU1], "assuming A10"),
        ([], None, [GPU0, CPU, DISK], "assuming A10, a desktop's CPU and an NVMe drive"),
        ([], MEASURED_HERE, [GPU0, CPU, DISK], "this CPU and this disk as measured here; assuming A10"),
        (
            ["T4", "A10"],
            None,
            [GPU0, GPU1],
            "T4 and A10 by the maker's figures (80 % of bandwidth, 50 % of arithmetic)",
        ),
        (
            ["T4"],
            MEASURED_HERE,
            [GPU0, GPU1, DISK],
            "T4 by the maker's figures (80 % of bandwidth, 50 % of arithmetic); this disk as measured here; assuming "
            "A10",
        ),
        (
            ["RTX 4090 Laptop"],
            replace(MEASURED_HERE, copy_bytes_per_second=1e10, disk_bytes_per_second=None),
            [GPU0, DISK],
            "RTX 4090 Laptop by the maker's figures (80 % of bandwidth; arithmetic and PCIe assumed; copies from RAM "
            "measured here); assuming an NVMe drive",
        ),
    ],
    ids=["assumed", "nothing-measured", "measured", "stated", "each-its-own", "partly"],
)
def test_each_device_says_what_its_speed_stands_on(
    names: list[str], measured: Measured | None, devices: list[Device], text: str
) -> None:
    cards = {device: cards_named(name)[0] for device, name in zip((GPU0, GPU1), names, strict=False)}
    assert speed_basis(pace_of(cards, measured), devices) == text


def test_a_speed_says_that_its_loading_time_rests_on_a_disk() -> None:
    placement = Placement("auto", (Block(("layers.0",), GIB),), (GPU0,), Budgets.of({GPU0: 9 * GIB}))
    assert speed_note(Speed(1.0, 9.0, 10.0), pace_of({}), placement).endswith("; assuming A10 and an NVMe drive")


@pytest.mark.parametrize(
    ("budgets", "text"),
    [
        ((9 * GIB, 9 * GIB), "code, with 640.0 MiB per device for CUDA's context and kernels"),
        ((9 * GIB, 4 * GIB), "with 640.0 MiB per device or an eighth of a small budget for CUDA's context and kernels"),
        ((4 * GIB, 4 * GIB), "with an eighth of a small budget for CUDA's context and kernels"),
    ],
)
def test_what_no_rehearsal_sees_is_told(budgets: tuple[int, int], text: str) -> None:
    devices = tuple(MapDevice(gpu, size, GIB) for gpu, size in zip((GPU0, GPU1), budgets, strict=True))
    plan = replace(map_of(GPU0, GPU1), devices=devices)
    assert plan_notes(spec_of(), plan, [], weights_only=False)[0].endswith(text)


def test_without_an_accelerator_there_is_no_runtime() -> None:
    (note, *_) = plan_notes(spec_of(), map_of(*[CPU] * 6), [], weights_only=False)
    assert note.endswith("by a rehearsal of the model's code")


def test_an_answer_of_one_token_has_no_speed_per_token() -> None:
    placement = Placement("auto", (Block(("layers.0",), GIB),), (GPU0,), Budgets.of({GPU0: 9 * GIB}))
    assert speed_note(Speed(0.0, 9.0, 10.0), pace_of({}), placement).startswith(
        "predicted speed: the first after 9 s, 10 s to"
    )


def test_what_loading_takes_is_lowered_by_no_shorter_prompt() -> None:
    plan = map_of(*[GPU0] * 6, kv_cache_bytes=0, activation_bytes=9 * GIB)
    assert notes_of(plan) == ["GPU 0 takes the most while loading, before there is a KV cache"]


def test_a_video_that_takes_more_than_the_weights_is_named() -> None:
    plan = replace(
        map_of(*[GPU0] * 2, *[GPU1] * 4, activation_bytes=3 * GIB), workload=MapWorkload(1, 8, 8, videos=((9, 9, 4),))
    )
    (note,) = notes_of(plan)
    # 2 GiB of weights, 1 of cache, 3 of activations; on the other GPU weights are more
    assert note == (
        "activations take the most of GPU 0 (3.00 GiB of 6.00 GiB): fewer frames or a shorter prompt lowers them"
    )
