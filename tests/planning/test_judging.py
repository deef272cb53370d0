"""Verdicts on small traces, with the segments of PyTorch's allocator counted by hand."""

from __future__ import annotations

from collections.abc import Sequence

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import Device
from devmap_cli.planning.judging import Replaying, Verdict
from devmap_cli.planning.nouns import Block, Placement
from devmap_cli.planning.profile import Profile
from devmap_cli.simulation.trace import Event, Trace

MIB = 1 << 20
GPU = Device("sim", 0)  # it has no driver that would take a share


def verdict(budget_bytes: int, weights: list[int], events: Sequence[tuple[int, int, int]]) -> Verdict:
    trace = Trace(
        num_blocks=1,
        weights=tuple((0, size) for size in weights),
        buffers=(),
        conversion_bytes=(0,),
        read_bytes=(0,),
        holders=(),
        phases={"prefill": tuple(events)},
    )
    profile = Profile(trace, ((0,),), work={})
    budgets = Budgets.of({GPU: budget_bytes})
    placement = Placement("balanced", (Block(("a",), sum(weights)),), (GPU,), budgets)
    return Replaying(profile).verdict(placement, budgets)


def test_where_only_segments_are_in_the_way_little_more_is_kept_free() -> None:
    # 20 MiB for the larger weight, 2 MiB for the smaller one: 22 MiB for 2.1 MiB, and neither can be given back
    budget = 22 * MIB - 1
    assert verdict(budget, [3 * MIB // 2, 600 << 10], []).missing == {GPU: budget >> 8}


def test_what_fits_but_for_the_margin_is_close() -> None:
    answer = verdict(22 * MIB, [3 * MIB // 2, 600 << 10], [])
    assert answer.missing == {GPU: 22 * MIB >> 8}
    assert answer.is_close
    assert answer.memory[GPU].peak_bytes == 22 * MIB
    assert not verdict(22 * MIB - 1, [3 * MIB // 2, 600 << 10], []).is_close


def test_the_table_tells_what_the_whole_budget_lets_be_reserved() -> None:
    # 20 MiB for the weight, 20 and 24 MiB for tensors one after the other: 64 MiB, just what there is; with a margin
    # kept free the allocator would give 20 MiB back
    events = [
        (Event.ALLOCATE, 0, 20 * MIB),
        (Event.FREE, 0, 0),
        (Event.ALLOCATE, 0, 24 * MIB),
        (Event.FREE, 1, 0),
    ]
    answer = verdict(64 * MIB, [3 * MIB // 2], events)
    assert not answer.missing
    assert answer.memory[GPU].peak_bytes == 64 * MIB
    assert verdict(80 * MIB, [3 * MIB // 2], events).memory[GPU].peak_bytes == 64 * MIB
