"""Predicted speeds: sums by hand, and what must never be slower than what."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devmap_cli.devices.cards import Card, cards, cards_named
from devmap_cli.devices.device import CPU, DISK, Device, main_device
from devmap_cli.devices.measuring import Measured
from devmap_cli.planning.rates import (
    ASSUMED_CARDS,
    FLOPS_EFFICIENCY,
    HOP_SECONDS,
    KERNEL_SECONDS,
    MEMORY_EFFICIENCY,
    Basis,
    Rates,
    accelerator_rates,
    disk_rates,
    host_rates,
)
from devmap_cli.planning.speed import (
    BlockWork,
    Handover,
    bring_seconds,
    compute_seconds,
    hop_seconds,
    predict,
)
from devmap_cli.simulation.work import Work

GPU, OTHER = Device("cuda", 0), Device("cuda", 1)
# round numbers: 100 bytes and 1,000 operations per second, 10 ms per kernel, 10 bytes per second from the host
ROUND = Rates(
    bytes_per_second=100, flops_per_second=1000, kernel_seconds=0.01, host_bytes_per_second=10, hop_bytes_per_second=5
)
RATES = {
    GPU: ROUND,
    OTHER: ROUND,
    CPU: Rates(bytes_per_second=20, flops_per_second=50, kernel_seconds=0.01),
    DISK: Rates(bytes_per_second=4),
}
# a step moves 200 bytes (2 s) and computes 500 (0.5 s); a prompt moves 300 bytes (3 s) and computes 8,000 (8 s)
BLOCK = BlockWork(200, Work(8000, 300, 10), Work(500, 200, 10), read_bytes=200)
IDLE = replace(BLOCK, prefill=Work(), decode=Work())


def per_token(*devices: Device, blocks: list[BlockWork]) -> float:
    return predict(blocks, devices, RATES).seconds_per_token


# ---------------------------------------------------------------- sums by hand


def test_the_slowest_of_memory_arithmetic_and_kernels_counts() -> None:
    assert compute_seconds(Work(500, 200, 10), ROUND) == 2  # 200 bytes at 100
    assert compute_seconds(Work(8000, 300, 10), ROUND) == 8  # 8,000 operations at 1,000
    assert compute_seconds(Work(500, 200, 1000), ROUND) == 10  # 1,000 kernels at 10 ms
    assert compute_seconds(Work(), ROUND) == 0


def test_what_only_moves_bytes_takes_its_turn() -> None:
    # 200 of 300 bytes at 100 hide behind 8,000 operations at 1,000; of those that move alone, none can
    assert compute_seconds(Work(8000, 300, 10, moving_bytes=100), ROUND) == 1 + 8
    assert compute_seconds(Work(500, 300, 10, moving_bytes=100), ROUND) == 1 + 2
    assert compute_seconds(Work(0, 300, 1000, moving_bytes=300), ROUND) == 10


def test_blocks_on_one_device_add_up() -> None:
    speed = predict([BLOCK, BLOCK], [GPU, GPU], RATES)
    assert speed.seconds_per_token == 4
    assert speed.seconds_to_first_token == 16
    # 400 bytes, read at 4 and copied at 10 at the same time
    assert speed.load_seconds == 100


def test_what_is_converted_while_it_is_loaded_is_read_and_copied_as_it_is_stored() -> None:
    quantized = replace(BLOCK, read_bytes=800)
    assert predict([quantized], [GPU], RATES).load_seconds == 800 / 4
    assert predict([quantized], [CPU], RATES).load_seconds == 800 / 4
    slow_copy = {**RATES, GPU: replace(ROUND, host_bytes_per_second=2)}
    assert predict([quantized], [GPU], slow_copy).load_seconds == 800 / 2


def test_weights_on_cpu_cross_the_link_in_every_step() -> None:
    speed = predict([BLOCK, BLOCK], [GPU, CPU], RATES)
    # both compute on the GPU, and 200 bytes come at 10
    assert speed.seconds_per_token == 4 + 20
    assert speed.seconds_to_first_token == 16 + 20
    assert speed.devices[GPU].seconds_per_token == 4
    assert speed.devices[CPU].seconds_per_token == 20


def test_weights_on_disk_are_read_first() -> None:
    speed = predict([BLOCK, BLOCK], [GPU, DISK], RATES)
    assert speed.seconds_per_token == 4 + 20 + 200 / 4
    assert speed.devices[DISK].load_seconds == 0
    assert speed.load_seconds == 50


def test_the_cpu_computes_where_there_is_no_accelerator() -> None:
    speed = predict([BLOCK, BLOCK], [CPU, DISK], RATES)
    # each step: 200 bytes at 20, or 500 operations at 50; from disk 200 bytes at 4
    assert speed.seconds_per_token == 10 + (10 + 50)
    assert speed.devices[CPU].seconds_per_token == 20


def test_a_block_that_does_not_run_costs_nothing_but_its_loading() -> None:
    speed = predict([BLOCK, IDLE], [GPU, DISK], RATES)
    assert speed.seconds_per_token == 2
    assert predict([BLOCK, IDLE], [GPU, CPU], RATES).load_seconds == 100


def test_shared_weights_come_as_often_as_their_modules_run() -> None:
    tied = replace(BLOCK, num_forwards=2)
    assert per_token(GPU, CPU, blocks=[BLOCK, tied]) == 4 + 2 * 20
    assert per_token(GPU, GPU, blocks=[BLOCK, tied]) == 4


def test_hops_take_their_bytes_and_their_start() -> None:
    # 100 bytes there and 20 back, by way of the host at 5, in each step; all of a prompt in one copy
    handovers = [
        Handover(0, 1, "decode", 100),
        Handover(1, 0, "decode", 20),
        Handover(0, 1, "prefill", 300),
    ]
    speed = predict([BLOCK, BLOCK], [GPU, OTHER], RATES, handovers)
    assert speed.seconds_per_token == pytest.approx(4 + 120 / 5 + 2 * HOP_SECONDS)
    assert speed.seconds_to_first_token == pytest.approx(16 + 300 / 5 + HOP_SECONDS)
    assert speed.devices[OTHER].seconds_per_token == pytest.approx(2 + 100 / 5 + HOP_SECONDS)


def test_only_what_crosses_between_devices_takes_time() -> None:
    handovers = [Handover(0, 1, "decode", 10, 3), Handover(0, 2, "decode", 10), Handover(1, 2, "prefill", 20)]
    # blocks 1 and 2 are together, so only what comes from block 0 crosses
    speed = predict([BLOCK] * 3, [GPU, OTHER, OTHER], RATES, handovers)
    assert speed.seconds_per_token == pytest.approx(6 + 20 / 5 + 4 * HOP_SECONDS)
    assert speed.seconds_to_first_token == 24


def test_a_link_connects_cards_of_one_name() -> None:
    linked = replace(ROUND, link_bytes_per_second=50, name="A")
    assert hop_seconds(100, linked, linked) == pytest.approx(2 + HOP_SECONDS)
    assert hop_seconds(100, linked, replace(linked, name="B")) == pytest.approx(20 + HOP_SECONDS)
    assert hop_seconds(100, ROUND, linked) == pytest.approx(20 + HOP_SECONDS)


def paid(block: BlockWork, place: Device, computing: Device, rates: Mapping[Device, Rates]) -> float:
    """Seconds per token of one block: what it computes, and what has to be brought for it."""
    return compute_seconds(block.decode, rates[computing]) + bring_seconds(block, block.decode, place, computing, rates)


def test_costs_of_keeping_and_of_bringing() -> None:
    assert [paid(BLOCK, place, GPU, RATES) for place in (GPU, CPU, DISK)] == [2, 22, 72]
    assert paid(BLOCK, DISK, CPU, RATES) == 10 + 50


def test_the_main_device_is_the_accelerator_with_the_smallest_number() -> None:
    assert main_device([CPU, OTHER, GPU]) == min(OTHER, GPU)
    assert main_device([DISK, CPU]) == CPU


# ---------------------------------------------------------------- what is never slower

SIZES = st.integers(0, 10**11)
WORKS = st.builds(
    lambda flops, moving, computing, num_kernels: Work(flops, moving + computing, num_kernels, moving),
    st.integers(0, 10**14),
    SIZES,
    SIZES,
    st.integers(0, 5000),
)
BLOCKS = st.builds(BlockWork, SIZES, WORKS, WORKS, SIZES)
REAL = {
    GPU: accelerator_rates(cards_named("T4")[0]),
    OTHER: accelerator_rates(cards_named("A10")[0]),
    CPU: host_rates(),
    DISK: disk_rates(),
}


@given(st.lists(BLOCKS, min_size=1, max_size=6), st.data())
def test_offloading_more_is_never_faster(blocks: list[BlockWork], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.sampled_from([GPU, CPU, DISK]), min_size=len(blocks), max_size=len(blocks)))
    index = data.draw(st.integers(0, len(blocks) - 1))

    def with_it_on(place: Device) -> float:
        # a first block on the GPU, so that there is a device to compute on
        devices = [GPU, *places[:index], place, *places[index + 1 :]]
        return predict([IDLE, *blocks], devices, REAL).seconds_per_token

    assert with_it_on(GPU) <= with_it_on(CPU) <= with_it_on(DISK)


@given(st.lists(BLOCKS, min_size=1, max_size=6), st.data())
def test_what_blocks_cost_is_what_a_placement_pays(blocks: list[BlockWork], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.sampled_from([GPU, CPU, DISK]), min_size=len(blocks), max_size=len(blocks)))
    costs = [paid(block, place, GPU, REAL) for block, place in zip(blocks, places, strict=True)]
    speed = predict([IDLE, *blocks], [GPU, *places], REAL)
    assert speed.seconds_per_token == pytest.approx(sum(costs))


@given(BLOCKS, st.sampled_from(cards()), st.sampled_from(cards()), st.sampled_from(["float16", "bfloat16", "float32"]))
def test_a_card_better_in_everything_is_never_slower(block: BlockWork, one: Card, other: Card, dtype: str) -> None:
    first, second = accelerator_rates(one, dtype), accelerator_rates(other, dtype)
    better = Rates(
        max(first.bytes_per_second, second.bytes_per_second),
        max(first.flops_per_second, second.flops_per_second),
        host_bytes_per_second=max(first.host_bytes_per_second, second.host_bytes_per_second),
    )
    for place in (GPU, CPU, DISK):
        times = [predict([block, block], [GPU, place], {**REAL, GPU: rates}) for rates in (first, second, better)]
        assert times[2].seconds_per_token <= min(times[0].seconds_per_token, times[1].seconds_per_token)
        assert times[2].seconds_to_first_token <= min(time.seconds_to_first_token for time in times[:2])
        assert times[2].load_seconds <= min(time.load_seconds for time in times[:2])


@given(st.lists(BLOCKS, min_size=1, max_size=6), st.data())
def test_devices_add_up_to_the_whole(blocks: list[BlockWork], data: st.DataObject) -> None:
    kinds = st.sampled_from([GPU, OTHER, CPU, DISK])
    places = data.draw(st.lists(kinds, min_size=len(blocks), max_size=len(blocks)))
    indices = st.integers(0, len(blocks) - 1)
    handover = st.builds(Handover, indices, indices, st.sampled_from(["prefill", "decode"]), st.integers(0, 10**6))
    speed = predict(blocks, places, REAL, data.draw(st.lists(handover, max_size=4)))
    for name in ("seconds_per_token", "seconds_to_first_token", "load_seconds"):
        parts = math.fsum(getattr(device, name) for device in speed.devices.values())
        assert getattr(speed, name) == pytest.approx(parts)
        assert parts >= 0


# ---------------------------------------------------------------- rates


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "uint8"])
def test_every_card_has_rates(dtype: str) -> None:
    for card in cards():
        rates = accelerator_rates(card, dtype)
        assert 0 < rates.host_bytes_per_second <= rates.bytes_per_second < card.bandwidth_bytes_per_second
        assert 0 < rates.flops_per_second < math.inf
        assert rates.name == card.name


def test_rates_of_a_card_by_hand() -> None:
    (card,) = cards_named("Titan RTX")  # 672 GB/s, 130.5 TFLOP/s in float16, PCIe 3.0 x16, NVLink of 100 GB/s
    rates = accelerator_rates(card, "float16")
    assert rates.bytes_per_second == pytest.approx(MEMORY_EFFICIENCY * 672e9)
    assert rates.flops_per_second == pytest.approx(FLOPS_EFFICIENCY * 130.5e12)
    # 8 GT/s on 16 lanes, 128 of 130 bits: 15.75 GB/s, three quarters of it from pinned memory, half of that from other
    assert rates.host_bytes_per_second == pytest.approx(15.754e9 * 0.75 * 0.5, rel=1e-4)
    assert rates.link_bytes_per_second == pytest.approx(0.75 * 100e9 / 2)
    assert (rates.basis, rates.assumed) == (Basis.STATED, ())


def test_only_a_budget_means_a_named_card_and_says_so() -> None:
    rates = accelerator_rates(None)
    assert rates.name == ASSUMED_CARDS["cuda"]
    assert rates.basis is Basis.ASSUMED
    for kind, name in ASSUMED_CARDS.items():
        assert accelerator_rates(None, kind=kind).name == name
    assert accelerator_rates(None, kind="sim").name == ASSUMED_CARDS["cuda"]


def test_figures_that_are_not_stated_are_assumed() -> None:
    (laptop,) = cards_named("RTX 4070 Laptop")
    assert accelerator_rates(laptop).assumed == ("arithmetic", "PCIe")


def test_measured_rates_replace_assumed_ones() -> None:
    measured = Measured(5e10, {"float32": 1e11, "bfloat16": 2e11}, 1e9, 9e9)
    assert host_rates("bfloat16", measured).flops_per_second == 2e11
    assert host_rates("float64", measured).flops_per_second == 1e11
    assert host_rates("bfloat16", measured).basis is Basis.MEASURED
    assert host_rates("bfloat16").basis is Basis.ASSUMED
    assert disk_rates(measured).bytes_per_second == 1e9
    (card,) = cards_named("Titan RTX")
    in_this_machine = accelerator_rates(card, measured=measured)
    assert in_this_machine.host_bytes_per_second == 9e9
    assert (in_this_machine.basis, in_this_machine.measured) == (Basis.STATED, ("copies from RAM",))
    assert disk_rates(replace(measured, disk_bytes_per_second=None)).basis is Basis.ASSUMED


def test_small_work_takes_the_time_of_its_kernels() -> None:
    assert compute_seconds(Work(1, 1, 100), accelerator_rates(None)) == pytest.approx(100 * KERNEL_SECONDS)


def test_no_torch_is_imported() -> None:
    check = "import sys, devmap_cli.planning.speed; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
