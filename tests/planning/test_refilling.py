"""Devices filled by what they are seen to take, against all orders, cuts and windows there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import CPU, Device, main_device
from devmap_cli.planning.nouns import Block, Placement
from devmap_cli.planning.refilling import Limited, offloading, on_accelerators
from devmap_cli.planning.task import Run, Task
from tests.support.peaks import Seen, Steps

Places = tuple[Device, ...]
GPU_0, GPU_1 = Device("cuda", 0), Device("cuda", 1)


@st.composite
def instances(draw: st.DrawFn) -> tuple[Task, Seen]:
    sizes = draw(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5)), min_size=2, max_size=6))
    blocks = [
        Block((f"b{index}",), size, kv_cache, streamed_bytes=size) for index, (size, kv_cache) in enumerate(sizes)
    ]
    kinds = {size: draw(st.tuples(st.integers(0, 12), st.integers(0, 20))) for size in sizes}
    gpus = draw(st.lists(st.integers(10, 120), min_size=1, max_size=3))
    budgets = {Device("cuda", index): size for index, size in enumerate(gpus)} | {CPU: 200}
    return Task.of(blocks, Budgets.of(budgets), {}, {}), Seen(blocks, [kinds[size] for size in sizes])


def placed(task: Task, runs: Sequence[Run]) -> Places:
    return task.placement("drawn", runs).devices


def fits(task: Task, seen: Seen, places: Places) -> bool:
    main = main_device(places)
    away = [index for index, place in enumerate(places) if place == CPU]
    for device in {place for place in places if place != CPU}:
        held = [index for index, place in enumerate(places) if place == device]
        is_main = device == main
        computed = away if is_main else []
        if seen.peak_bytes(device, task.budgets.get(device), held, is_main=is_main, away=computed) is None:
            return False
    return True


def arranged(order: Sequence[Device], num_blocks: int) -> Iterator[list[Device]]:
    for cuts in combinations_with_replacement(range(num_blocks + 1), len(order) - 1):
        spans = pairwise((0, *cuts, num_blocks))
        yield [device for device, (start, stop) in zip(order, spans, strict=True) for _ in range(start, stop)]


@given(instances())
def test_an_order_that_holds_all_is_found(instance: tuple[Task, Seen]) -> None:
    task, seen = instance
    devices = [room.device for room in task.accelerators]
    ways = [tuple(places) for order in permutations(devices) for places in arranged(order, len(task.blocks))]
    found = [placed(task, runs) for runs in on_accelerators(task, Limited(seen, 10_000))]
    assert all(fits(task, seen, places) for places in found)
    assert bool(found) == any(fits(task, seen, places) for places in ways)


@given(instances())
def test_the_fewest_last_blocks_are_offloaded(instance: tuple[Task, Seen]) -> None:
    task, seen = instance
    size, devices = len(task.blocks), [room.device for room in task.accelerators]
    found = [placed(task, runs) for runs in offloading(task, Limited(seen, 10_000), None, in_order=True)]
    assert len(found) <= 1
    assert all(fits(task, seen, places) for places in found)
    fewest = next(
        (
            num_away
            for num_away in range(1, size)
            for front in arranged(devices, size - num_away)
            # what is offloaded computes on the first device, which is the main one if it holds anything
            if front[0] == devices[0] and fits(task, seen, (*front, *[CPU] * num_away))
        ),
        None,
    )
    assert [places.count(CPU) for places in found] == ([] if fewest is None else [fewest])


@given(instances())
def test_what_is_offloaded_gets_less_and_less(instance: tuple[Task, Seen]) -> None:
    task, seen = instance
    answer: Placement | None = None
    for _ in range(2):
        runs = list(offloading(task, Limited(seen, 10_000), answer, in_order=False))
        found = [task.placement("drawn", each) for each in runs]
        sizes = [placement.offloaded_bytes for placement in found]
        assert all(more > less for more, less in pairwise(sizes))
        assert all(fits(task, seen, placement.devices) for placement in found)
        if answer is not None:
            assert all(size < answer.offloaded_bytes for size in sizes)
        answer = found[-1] if found else answer


def test_the_main_device_keeps_a_block_for_what_it_computes() -> None:
    # the third block can only pass through, on device 0 if that has a block: the last one, for which 1 has room too
    blocks = [Block((f"b{index}",), size, streamed_bytes=size) for index, size in enumerate((10, 10, 35, 1))]
    task = Task.of(blocks, Budgets.of({GPU_0: 40, GPU_1: 25, CPU: 40}), {}, {})
    seen = Seen(blocks, [(0, 0), (0, 0), (20, 0), (0, 0)])
    found = [placed(task, runs) for runs in offloading(task, Limited(seen, 1000), None, in_order=False)]
    assert (GPU_1, GPU_1, CPU, GPU_0) in found


def test_on_small_devices_all_cuts_are_looked_at() -> None:
    # a device with 2, 3 or 4 blocks reserves another segment, so that 5 and 1 is the only cut
    blocks = [Block((f"b{index}",), 10, transient_bytes=30) for index in range(6)]
    task = Task.of(blocks, Budgets.of({GPU_0: 55, GPU_1: 55}), {}, {})
    seen = Steps(blocks, [(0, 0)] * 6, another=range(2, 5))
    found = [placed(task, runs) for runs in on_accelerators(task, Limited(seen, 100))]
    assert found
    assert all(sorted(map(places.count, (GPU_0, GPU_1))) == [1, 5] for places in found)


@pytest.mark.parametrize("num_looks", [0, 1, 3])
def test_no_more_looks_are_taken_than_allowed(num_looks: int) -> None:
    blocks = [Block((f"b{index}",), 10, streamed_bytes=10) for index in range(12)]
    task = Task.of(blocks, Budgets.of({GPU_0: 50, GPU_1: 45, CPU: 200}), {}, {})
    seen = Seen(blocks, [(1, 2)] * 12)
    assert not list(on_accelerators(task, Limited(seen, num_looks)))
    assert not list(offloading(task, Limited(seen, num_looks), None, in_order=False))
    assert seen.looks <= 2 * num_looks


def test_without_cpu_or_disk_nothing_is_offloaded() -> None:
    blocks = [Block(("b0",), 10), Block(("b1",), 10)]
    task = Task.of(blocks, Budgets.of({GPU_0: 15}), {}, {})
    assert not list(offloading(task, Limited(Seen(blocks, [(0, 0)] * 2), 100), None, in_order=False))
