"""Strategies on toy models whose placements can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import CPU, DISK, Device
from devmap_cli.errors import RequestError
from devmap_cli.planning.explaining import unused_reasons
from devmap_cli.planning.nouns import Block, Infeasible, Placement
from devmap_cli.planning.strategies import STRATEGIES, plan

GPUS = [Device("cuda", index) for index in range(4)]
# embed 20, four layers of 10, head 20: 80 bytes
MODEL = [Block((name,), size) for name, size in zip(["embed", *"0123", "head"], [20, *[10] * 4, 20], strict=True)]


def gpus(*sizes: int, **tiers: int) -> Budgets:
    by_device = dict(zip(GPUS, sizes, strict=False))
    return Budgets.of(by_device | {Device(name): size for name, size in tiers.items()})


def values(answer: Placement | Infeasible) -> list[int | str]:
    assert isinstance(answer, Placement), answer
    return [device.map_value for device in answer.devices]


def test_balanced_halves_the_model() -> None:
    assert values(plan("balanced", MODEL, gpus(60, 60))) == [0, 0, 0, 1, 1, 1]


def test_balanced_goes_by_the_share_of_the_budget() -> None:
    # 20 of 30 and 60 of 90 are two thirds each
    assert values(plan("balanced", MODEL, gpus(30, 90))) == [0, 1, 1, 1, 1, 1]


def test_balanced_counts_transients_and_overhead() -> None:
    # halves would take 40 + 20 + 5 = 65 on GPU 1; one layer less there: 30 + 20 + 5 = 55, and 50 + 0 + 5 on GPU 0
    model = [*MODEL[:-1], replace(MODEL[-1], transient_bytes=20)]
    answer = plan("balanced", model, gpus(80, 80), overhead_bytes=dict.fromkeys(GPUS, 5))
    assert values(answer) == [0, 0, 0, 0, 1, 1]
    assert isinstance(answer, Placement)
    assert [answer.memory(device).peak_bytes for device in GPUS[:2]] == [55, 55]


def test_a_weight_counts_a_gpu_as_half() -> None:
    # uses 30 / (0.5 x 100) and 50 / 100; [20 | 60] would be 0.4 and 0.6, [40 | 40] 0.8
    answer = plan("balanced", MODEL, gpus(100, 100), gpu_weights={GPUS[0]: 0.5})
    assert values(answer)[:2] in ([0, 0], [0, 1])
    assert values(answer)[2:] == [1, 1, 1, 1]


def test_no_device_is_left_empty_without_need() -> None:
    # the embedding decides the highest use; the others share the rest
    model = [Block(("embed",), 100), *(Block((str(index),), 10) for index in range(3))]
    assert values(plan("balanced", model, gpus(100, 100, 100, 100))) == [0, 1, 2, 3]


def test_another_order_is_found_before_offloading() -> None:
    # 20 bytes for the embedding don't fit on GPU 0, but the three last layers do not need GPU 1
    model = [Block(("embed",), 20), Block(("0",), 10)]
    assert values(plan("balanced", model, gpus(10, 20, cpu=100))) == [1, 0]
    assert values(plan("sequential", model, gpus(10, 20, cpu=100))) == [1, 0]


def test_pieces_anywhere_are_found_before_offloading() -> None:
    # 6 + 4 on the one, 5 + 5 on the other: no contiguous cut does it
    model = [Block((str(index),), size) for index, size in enumerate([6, 5, 5, 4])]
    assert values(plan("auto", model, gpus(10, 10, cpu=100))) in ([0, 1, 1, 0], [1, 0, 0, 1])


def test_auto_offloads_the_latest_smallest_window() -> None:
    # 80 bytes, 70 on GPUs: one layer is enough, and 20 + 30 + 20 fits in 50 + 20
    assert values(plan("auto", MODEL, gpus(50, 20, cpu=100))) == [0, 0, 0, 0, "cpu", 1]


def test_balanced_offloads_the_tail_to_cpu_then_disk() -> None:
    assert values(plan("balanced", MODEL, gpus(40, cpu=20, disk=100))) == [0, 0, 0, "cpu", "cpu", "disk"]


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_on_cpu_beside_gpus_only_weights_count(strategy: str) -> None:
    # the cache and what it computes are on the GPU, so that 20 hold two of four blocks
    blocks = [Block((f"b{index}",), 10, kv_cache_bytes=5, transient_bytes=30) for index in range(4)]
    answer = plan(strategy, blocks, gpus(60, cpu=20))
    assert isinstance(answer, Placement)
    assert values(answer).count("cpu") == 2
    assert isinstance(plan(strategy, blocks, gpus(60, cpu=19)), Infeasible)


def test_on_cpu_what_loading_takes_counts_too() -> None:
    # two experts of 5 become one weight of 10, while both are there
    blocks = [Block((f"b{index}",), 10, load_transient_bytes=10) for index in range(4)]
    answer = plan("auto", blocks, gpus(30, cpu=30))
    assert isinstance(answer, Placement)
    assert answer.memory(CPU).peak_bytes == 30
    assert isinstance(plan("auto", blocks, gpus(30, cpu=29)), Infeasible)


def test_balanced_low_0_spares_the_first_gpu() -> None:
    assert values(plan("balanced_low_0", MODEL, gpus(80, 40, 40))) == [1, 1, 1, 2, 2, 2]
    assert values(plan("balanced_low_0", MODEL, gpus(80, 30, 40))) == [0, 1, 1, 2, 2, 2]


def test_sequential_fills_in_order() -> None:
    assert values(plan("sequential", MODEL, gpus(65, 100))) == [0, 0, 0, 0, 0, 1]
    assert values(plan("sequential", MODEL, gpus(30, 10, cpu=10, disk=90))) == [0, 0, 1, "cpu", "disk", "disk"]


def test_fewest_uses_the_fewest() -> None:
    answer = plan("fewest", MODEL, gpus(40, 20, 50, 45))
    # 40 + 40 on GPUs 2 and 3 has the smallest highest use of all pairs
    assert values(answer) == [2, 2, 2, 3, 3, 3]
    assert isinstance(answer, Placement)
    assert unused_reasons(answer) == [
        (GPUS[0], "2 accelerators hold all"),
        (GPUS[1], "2 accelerators hold all"),
    ]


def test_without_accelerators_cpu_comes_before_disk() -> None:
    assert values(plan("auto", MODEL, gpus(cpu=45, disk=100))) == ["cpu"] * 3 + ["disk"] * 3
    answer = plan("auto", MODEL, gpus(cpu=80, disk=100))
    assert isinstance(answer, Placement)
    assert unused_reasons(answer) == [(DISK, "all fits on cpu")]


def test_too_small_devices_are_unused_with_the_reason() -> None:
    answer = plan("balanced", MODEL, gpus(80, 5))
    assert isinstance(answer, Placement)
    assert unused_reasons(answer) == [(GPUS[1], "too small: 5 B for blocks, the smallest takes 10 B")]


def test_pins_hold_and_the_rest_goes_around_them() -> None:
    # the head is on GPU 0: with the embedding 40 there, the layers 40 on GPU 1
    model = [*MODEL[:-1], replace(MODEL[-1], fixed=GPUS[0])]
    assert values(plan("balanced", model, gpus(60, 60))) == [0, 1, 1, 1, 1, 0]
    all_pinned = [replace(block, fixed=CPU) for block in MODEL]
    assert values(plan("auto", all_pinned, gpus(80, cpu=80))) == ["cpu"] * 6


def test_figures_of_a_refusal_are_of_the_device_that_needs_least_more() -> None:
    # 80 bytes for 40 + 30: ten more on GPU 0 make 50 + 30
    answer = plan("balanced", MODEL, gpus(40, 30))
    assert isinstance(answer, Infeasible)
    assert (answer.device, answer.needed_bytes, answer.budget_bytes, answer.missing_bytes) == (GPUS[0], 50, 40, 10)
    assert answer.reason == "the weights take 80 B, and all budgets together are 70 B"


def test_only_what_is_too_small_together_is_said_to_be() -> None:
    # 90 bytes for 85 of weights, and ten for the head alone
    model = [Block(("a",), 40), Block(("b",), 45, transient_bytes=10)]
    answer = plan("auto", model, gpus(45, 45))
    assert isinstance(answer, Infeasible)
    assert (answer.device, answer.needed_bytes, answer.budget_bytes) == (GPUS[1], 55, 45)
    assert answer.reason == "b alone takes 55 B"
    answer = plan("auto", [Block((name,), 30) for name in "abc"], gpus(50, 50))
    assert isinstance(answer, Infeasible)
    assert "don't divide" in answer.reason


def test_a_block_too_large_names_the_device_that_binds() -> None:
    model = [Block(("a",), 30), Block(("b",), 30)]
    answer = plan("auto", model, gpus(35, 28))
    assert isinstance(answer, Infeasible)
    assert (answer.device, answer.needed_bytes, answer.missing_bytes) == (GPUS[1], 30, 2)


def test_pins_that_overfill_a_device_name_it() -> None:
    model = [replace(block, fixed=GPUS[1]) for block in MODEL]
    answer = plan("auto", model, gpus(100, 70))
    assert isinstance(answer, Infeasible)
    assert (answer.device, answer.needed_bytes, answer.missing_bytes) == (GPUS[1], 80, 10)


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_decisions_tell_each_step(strategy: str) -> None:
    answer = plan(strategy, MODEL, gpus(60, 60), overhead_bytes={GPUS[0]: 3})
    assert isinstance(answer, Placement)
    assert [decision.block for decision in answer.decisions] == [block.fqns[0] for block in MODEL]
    assert tuple(decision.device for decision in answer.decisions) == answer.devices
    for device in answer.used_devices:
        last = [decision for decision in answer.decisions if decision.device == device][-1]
        assert last.bytes_after == answer.memory(device).peak_bytes


def test_wrong_requests() -> None:
    with pytest.raises(RequestError, match="unknown strategy") as caught:
        plan("balance", MODEL, gpus(80))
    assert caught.value.hint == "--strategy balanced"
    with pytest.raises(RequestError, match="pinned to GPU 3"):
        plan("auto", [replace(MODEL[0], fixed=GPUS[3])], gpus(80))
    with pytest.raises(RequestError, match="--weight names GPU 1"):
        plan("auto", MODEL, gpus(80), gpu_weights={GPUS[1]: 2})
    with pytest.raises(RequestError, match="above 0"):
        plan("auto", MODEL, gpus(80), gpu_weights={GPUS[0]: 0})
    with pytest.raises(RequestError, match="no device"):
        plan("auto", MODEL, gpus())


def test_no_blocks_need_no_device() -> None:
    assert values(plan("auto", [], gpus(0))) == []


def test_large_tasks_stay_exact() -> None:
    # 512 devices hold exactly 20 of 10,240 equal blocks each
    model = [Block((str(index),), 7, transient_bytes=index % 3) for index in range(10_240)]
    budgets = Budgets.of({Device("cuda", index): 142 for index in range(512)})
    answer = plan("balanced", model, budgets)
    assert isinstance(answer, Placement)
    assert [answer.devices.count(Device("cuda", index)) for index in (0, 255, 511)] == [20, 20, 20]
