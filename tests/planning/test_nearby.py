"""Placements that nearly fit: what is tried, and in which order."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import CPU, DISK, Device
from devmap_cli.planning.nearby import nearby, nearby_offloading
from devmap_cli.planning.nouns import Block
from devmap_cli.planning.task import Run, Task

BLOCKS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4), st.integers(0, 20)), min_size=1, max_size=8)


def task_of(sizes: list[tuple[int, int, int]], budgets: dict[Device, int]) -> Task:
    blocks = [
        Block((f"b{index}",), weights, kv_cache, transient, streamed_bytes=weights)
        for index, (weights, kv_cache, transient) in enumerate(sizes)
    ]
    return Task.of(blocks, Budgets.of(budgets), {}, {})


def placed(runs: list[Run]) -> list[int]:
    return sorted(index for run in runs for index in range(run.start, run.stop))


def test_the_closest_come_first_and_equal_devices_are_not_swapped() -> None:
    # of five cuts of 12 in all, 6 and 6 is the evenest; the other order of the same cut is as good
    task = task_of([(3, 0, 0)] * 4, {Device("cuda", index): 75 for index in range(2)})
    tried = list(nearby(task, 9))
    assert [(run.device.index, run.start, run.stop) for run in tried[0]] == [(0, 0, 2), (1, 2, 4)]
    assert len(tried) == 5
    assert len(list(nearby(task, 2))) == 2


@given(BLOCKS, st.lists(st.integers(5, 40), min_size=1, max_size=3), st.integers(1, 30), st.integers(1, 20))
def test_one_run_of_blocks_is_offloaded_as_far_as_weights_fit(
    sizes: list[tuple[int, int, int]], gpus: list[int], ram: int, limit: int
) -> None:
    budgets = {Device("cuda", index): size for index, size in enumerate(gpus)} | {CPU: ram, DISK: 6}
    task = task_of(sizes, budgets)
    tried = list(nearby_offloading(task, limit))
    assert len(tried) <= limit
    for runs in tried:
        assert placed(runs) == list(range(len(sizes)))
        away = [index for run in runs if not run.device.is_accelerator for index in range(run.start, run.stop)]
        assert away == list(range(away[0], away[-1] + 1))
        held: Counter[Device] = Counter()
        for run in runs:
            held[run.device] += sum(weights for weights, _, _ in sizes[run.start : run.stop])
        assert held[CPU] <= ram
        assert held[DISK] <= 6


def test_what_passes_through_counts_with_the_block_that_it_belongs_to() -> None:
    # the first block is large, the second needs most: 20 pass through before 30 are needed, not at the same time, so
    # that with the first one on cpu GPU 0 takes 31 and not 51
    task = task_of([(20, 0, 0), (1, 0, 30), (1, 0, 0)], {Device("cuda", 0): 32, CPU: 20})
    assert [(run.device, run.start, run.stop) for run in next(nearby_offloading(task, 1))] == [
        (Device("cuda", 0), 1, 3),
        (CPU, 0, 1),
    ]


def test_what_is_offloaded_may_compute_on_the_largest_device_alone() -> None:
    # the first block passes through with 25, for which device 0 has room; with the other one on device 1 that is the
    # only one that is used, and it passes through there
    task = task_of([(5, 0, 20), (1, 0, 0)], {Device("cuda", 0): 40, Device("cuda", 1): 12, CPU: 5})
    tried = [[(run.device, run.start, run.stop) for run in runs] for runs in nearby_offloading(task, 9)]
    assert [(Device("cuda", 0), 1, 2), (CPU, 0, 1)] in tried


def test_without_cpu_or_disk_nothing_is_offloaded() -> None:
    assert not list(nearby_offloading(task_of([(1, 0, 0)], {Device("cuda", 0): 5}), 9))
