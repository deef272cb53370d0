"""Contiguous placements that nearly fit by what blocks add up to: a run may take less than that."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest
from itertools import combinations_with_replacement, pairwise, permutations
from math import comb, factorial

from devmap_cli.planning.costs import Room
from devmap_cli.planning.task import Run, Task

_MAX_SCORED = 20_000
_MAX_TRIED = 16
_MOST_OVER = 1.25
"""Placements are near where no device takes more than so many times its budget, and weights and KV cache do fit."""
_REASON = "nearly full: a run takes less than its blocks add up to"

Spans = list[tuple[Room, tuple[int, int]]]


def nearby(task: Task) -> Iterator[list[Run]]:
    """Placements on the accelerators that are over budget by little, the closest first; none where there are too many.

    All orders and cuts are looked at, which for more than a few devices are too many.
    """
    rooms, num_blocks = task.accelerators, len(task.costs)
    if not rooms or factorial(len(rooms)) * comb(num_blocks + len(rooms) - 1, len(rooms) - 1) > _MAX_SCORED:
        return
    near = ((use, spans) for spans in _all_spans(rooms, num_blocks) if (use := _use(task, spans)) <= _MOST_OVER)
    for _, spans in nsmallest(_MAX_TRIED, near, key=lambda item: item[0]):
        yield [Run(room.device, start, stop, _REASON) for room, (start, stop) in spans if stop > start]


def _all_spans(rooms: tuple[Room, ...], num_blocks: int) -> Iterator[Spans]:
    for order in permutations(rooms):
        for cuts in combinations_with_replacement(range(num_blocks + 1), len(rooms) - 1):
            yield list(zip(order, pairwise((0, *cuts, num_blocks)), strict=True))


def _use(task: Task, spans: Spans) -> float:
    """The highest use of a device, without end where weights and KV cache alone are too much."""
    highest = 0.0
    for room, (start, stop) in spans:
        resident = task.costs.resident(start, stop) + room.held_resident_bytes + room.overhead_bytes
        if stop > start and resident > room.budget_bytes:
            return float("inf")
        highest = max(highest, task.costs.on(room, start, stop) / max(1, room.budget_bytes))
    return highest
