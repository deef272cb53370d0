"""Cuts moved by what devices are seen to take, against all cuts there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import CPU, Device
from devmap_cli.planning.nouns import Block, MemoryBreakdown, Placement
from devmap_cli.planning.recutting import recut
from devmap_cli.planning.strategies import plan
from devmap_cli.planning.task import Task
from tests.support.peaks import Seen, Steps

GAIN = Fraction(2049, 2048)
"""What a better placement must be better by."""
Cuts = tuple[int, ...]


@st.composite
def instances(draw: st.DrawFn, max_blocks: int = 7) -> tuple[list[Block], Seen, dict[Device, int]]:
    sizes = draw(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=max_blocks))
    blocks = [Block((f"b{index}",), size, transient_bytes=extra) for index, (size, extra) in enumerate(sizes)]
    kinds = {size: draw(st.tuples(st.integers(0, 12), st.integers(0, 20))) for size in sizes}
    more = [kinds[size] for size in sizes]
    gpus = draw(st.lists(st.integers(10, 250), min_size=1, max_size=3))
    return blocks, Seen(blocks, more), {Device("cuda", index): size for index, size in enumerate(gpus)}


def planned(strategy: str, blocks: Sequence[Block], budgets: dict[Device, int], seen: Seen) -> Placement | None:
    """What is planned by sums, with what devices take where that is within their budgets."""
    answer = plan(strategy, blocks, Budgets.of(budgets))
    if not isinstance(answer, Placement):
        return None
    peaks = {device: peak_of(answer.devices, device, seen, budgets) for device in answer.used_devices}
    if any(peak is None for peak in peaks.values()):
        return None
    return replace(answer, measured={device: MemoryBreakdown(peak or 0) for device, peak in peaks.items()})


def peak_of(places: Sequence[Device], device: Device, seen: Seen, budgets: dict[Device, int]) -> int | None:
    held = [index for index, place in enumerate(places) if place == device]
    return seen.peak_bytes(device, budgets[device], held) if held else 0


def cut_again(placement: Placement, seen: Seen) -> tuple[Device, ...]:
    task = Task.of(placement.blocks, placement.budgets, {}, {})
    runs = recut(task, placement, seen)
    return placement.devices if runs is None else task.placement(placement.strategy, runs).devices


def uses(places: Sequence[Device], seen: Seen, budgets: dict[Device, int]) -> list[Fraction] | None:
    peaks = [peak_of(places, device, seen, budgets) for device in budgets]
    if any(peak is None for peak in peaks):
        return None
    return [Fraction(peak or 0, size) for peak, size in zip(peaks, budgets.values(), strict=True)]


def all_uses(num_blocks: int, seen: Seen, budgets: dict[Device, int]) -> Iterator[tuple[Cuts, list[Fraction]]]:
    """All ways to cut the blocks for the devices in their order that fit."""
    for cuts in combinations_with_replacement(range(num_blocks + 1), len(budgets) - 1):
        spans = pairwise((0, *cuts, num_blocks))
        places = [device for device, (start, stop) in zip(budgets, spans, strict=True) for _ in range(start, stop)]
        found = uses(places, seen, budgets)
        if found is not None:
            yield cuts, found


@given(instances(), st.sampled_from(["balanced", "auto"]))
def test_no_cut_has_a_lower_highest_use(instance: tuple[list[Block], Seen, dict[Device, int]], strategy: str) -> None:
    blocks, seen, budgets = instance
    placement = planned(strategy, blocks, budgets, seen)
    if placement is None or list(dict.fromkeys(placement.devices)) != sorted(placement.used_devices):
        return
    found = uses(cut_again(placement, seen), seen, budgets)
    assert found is not None
    assert max(found) <= GAIN * min(max(each) for _, each in all_uses(len(blocks), seen, budgets))


@given(instances())
def test_the_first_gets_no_more_than_others_cannot_hold(
    instance: tuple[list[Block], Seen, dict[Device, int]],
) -> None:
    blocks, seen, budgets = instance
    placement = planned("balanced_low_0", blocks, budgets, seen)
    if placement is None or len(budgets) == 1 or placement.devices != tuple(sorted(placement.devices)):
        return
    first = next(iter(budgets))
    places = cut_again(placement, seen)
    found = uses(places, seen, budgets)
    assert found is not None
    ways = dict(all_uses(len(blocks), seen, budgets))
    fewest = min(cuts[0] for cuts in ways)
    assert places.count(first) == fewest
    assert max(found[1:]) <= GAIN * min(max(each[1:]) for cuts, each in ways.items() if cuts[0] == fewest)


@given(instances())
def test_devices_are_filled_as_far_as_they_go(instance: tuple[list[Block], Seen, dict[Device, int]]) -> None:
    blocks, seen, budgets = instance
    placement = planned("sequential", blocks, budgets, seen)
    if placement is None or placement.devices != tuple(sorted(placement.devices)):
        return
    places = cut_again(placement, seen)
    fullest = max(cuts for cuts, _ in all_uses(len(blocks), seen, budgets))
    assert [places.count(device) for device in budgets] == [
        stop - start for start, stop in pairwise((0, *fullest, len(blocks)))
    ]


@given(instances())
def test_no_fewer_of_equal_devices_hold_all(instance: tuple[list[Block], Seen, dict[Device, int]]) -> None:
    blocks, seen, budgets = instance
    budgets = dict.fromkeys(budgets, max(budgets.values()))
    placement = planned("fewest", blocks, budgets, seen)
    if placement is None:
        return
    found = uses(cut_again(placement, seen), seen, budgets)
    assert found is not None
    least = [sorted(each, reverse=True) for _, each in all_uses(len(blocks), seen, budgets)]
    count = min(sum(map(bool, each)) for each in least)
    assert sum(map(bool, found)) <= max(count, len(set(placement.devices)) - 1)
    assert max(found) <= GAIN * min(each[0] for each in least if sum(map(bool, each)) == sum(map(bool, found)))


def test_a_front_that_takes_more_than_it_adds_up_to_gets_less() -> None:
    # six blocks of 10 on two devices: 3 and 3 by sums; the first block really takes 25 more, so 2 and 4 it is
    blocks = [Block(("b0",), 10, streamed_bytes=1), *[Block((f"b{index}",), 10) for index in range(1, 6)]]
    seen = Seen(blocks, [(25, 0), *[(0, 0)] * 5])
    budgets = {Device("cuda", 0): 100, Device("cuda", 1): 100}
    placement = planned("balanced", blocks, budgets, seen)
    assert placement is not None
    assert placement.devices.count(Device("cuda", 0)) == 3
    task = Task.of(blocks, placement.budgets, {}, {})
    runs = recut(task, placement, seen)
    assert runs is not None
    assert [(run.device.index, run.start, run.stop) for run in runs] == [(0, 0, 2), (1, 2, 6)]
    assert "no device above 48.0 % of its budget as replayed" in runs[0].reason


def test_sums_that_are_right_cost_no_more_than_a_look_at_each_device() -> None:
    blocks = [Block((f"b{index}",), 1 << 30) for index in range(40)]
    seen = Seen(blocks, [(0, 0)] * 40)
    budgets = {Device("cuda", index): 20 << 30 for index in range(4)}
    placement = planned("balanced", blocks, budgets, seen)
    assert placement is not None
    seen.looks = 0
    assert cut_again(placement, seen) == placement.devices
    assert seen.looks <= len(budgets)


def test_fewer_blocks_may_take_more() -> None:
    # 4 and 4 would be the evenest by sums; but with 3 or 4 blocks a device reserves another segment, for some reason
    blocks = [Block((f"b{index}",), 10) for index in range(8)]
    budgets = {Device("cuda", 0): 110, Device("cuda", 1): 110}
    seen = Steps(blocks, [(0, 0)] * 8, another=(3, 4))
    placement = planned("balanced", blocks, budgets, seen)
    assert placement is not None
    assert [placement.devices.count(device) for device in budgets] == [4, 4]
    assert sorted(cut_again(placement, seen).count(device) for device in budgets) == [2, 6]


def test_what_is_offloaded_stays() -> None:
    blocks = [Block((f"b{index}",), 10) for index in range(3)]
    gpus = [Device("cuda", 0), Device("cuda", 1)]
    budgets = Budgets.of({gpus[0]: 100, gpus[1]: 100, CPU: 100})
    placement = Placement("balanced", tuple(blocks), (gpus[0], CPU, gpus[1]), budgets)
    assert recut(Task.of(blocks, budgets, {}, {}), placement, Seen(blocks, [(0, 0)] * 3)) is None


@pytest.mark.parametrize("strategy", ["auto", "balanced", "sequential", "fewest"])
@pytest.mark.parametrize("places", [(0, 1, 0), (1, 1, 0)])
def test_devices_are_used_in_the_given_order_where_that_turns_out_to_do(strategy: str, places: tuple[int, ...]) -> None:
    # by sums the device with 22 bytes may not hold two blocks, but in a run they take 3 less than they add up to
    blocks = [Block((f"b{index}",), 10, transient_bytes=3) for index in range(3)]
    gpus = [Device("cuda", 0), Device("cuda", 1)]
    budgets = {gpus[0]: 23, gpus[1]: 40}
    seen = Seen(blocks, [(0, 0)] * 3)
    placement = Placement(strategy, tuple(blocks), tuple(gpus[place] for place in places), Budgets.of(budgets))
    found = cut_again(placement, seen)
    assert list(dict.fromkeys(found)) == [gpu for gpu in gpus if gpu in found]
    if strategy == "sequential":
        assert found == (gpus[0], gpus[0], gpus[1])


def test_a_way_back_stays_where_no_order_does_without() -> None:
    blocks = [Block((f"b{index}",), size, transient_bytes=size) for index, size in enumerate((10, 30, 10))]
    gpus = [Device("cuda", 0), Device("cuda", 1)]
    budgets = {gpus[0]: 23, gpus[1]: 33}
    placement = Placement("balanced", tuple(blocks), (gpus[0], gpus[1], gpus[0]), Budgets.of(budgets))
    assert cut_again(placement, Seen(blocks, [(0, 0)] * 3)) == placement.devices


def test_pinned_blocks_count_where_they_are() -> None:
    gpus = [Device("cuda", 0), Device("cuda", 1)]
    for pinned in gpus:
        blocks = [Block(("b0",), 30, fixed=pinned), *[Block((f"b{index}",), 10) for index in range(1, 7)]]
        seen = Seen(blocks, [(20, 0), *[(0, 0)] * 6])
        budgets = dict.fromkeys(gpus, 200)
        placement = planned("balanced", blocks, budgets, seen)
        assert placement is not None
        places = cut_again(placement, seen)
        assert places[0] == pinned
        loads = {gpu: sum(10 for place in places[1:] if place == gpu) for gpu in gpus}
        assert loads[pinned] <= 10  # 50 with its own block, beside 50 on the other one
