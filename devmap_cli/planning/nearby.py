"""Placements that nearly fit by what blocks add up to, for a judge that knows better: a run may take less than that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import nsmallest
from itertools import combinations_with_replacement, count, pairwise, permutations
from math import comb

from devmap_cli.planning.auto import offloaded
from devmap_cli.planning.costs import Room
from devmap_cli.planning.orders import few_orders
from devmap_cli.planning.partition import balanced
from devmap_cli.planning.task import Run, Task, runs_around

_MAX_SCORED = 20_000
_MAX_PERMUTED, _MAX_WINDOWS = 6, 400
_MOST_OVER = 1.25
"""Placements are near where no device takes more than so many times its budget, and weights and KV cache do fit."""
_REASON = "nearly full: a run takes less than its blocks add up to"

Spans = list[tuple[Room, tuple[int, int]]]


def nearby(task: Task, limit: int) -> Iterator[list[Run]]:
    """At most `limit` contiguous placements on the accelerators alone, over budget by little, the closest first.

    All orders and cuts are looked at, and none where they are too many, as for more than a few devices.
    """
    rooms, num_blocks = task.accelerators, len(task.costs)
    num_cuts = comb(num_blocks + len(rooms) - 1, len(rooms) - 1) if rooms else 0
    orders: dict[tuple[object, ...], tuple[Room, ...]] = {}
    for order in permutations(rooms) if len(rooms) <= _MAX_PERMUTED else ():
        orders.setdefault(tuple(room.kind for room in order), order)
    if not rooms or len(orders) * num_cuts > _MAX_SCORED:
        return
    near = (
        (use, spans)
        for order in orders.values()
        for spans in _all_spans(order, num_blocks)
        if (use := _use(task, spans)) <= _MOST_OVER
    )
    for _, spans in nsmallest(limit, near, key=lambda item: item[0]):
        yield [Run(room.device, start, stop, _REASON) for room, (start, stop) in spans if stop > start]


def _all_spans(order: Sequence[Room], num_blocks: int) -> Iterator[Spans]:
    for cuts in combinations_with_replacement(range(num_blocks + 1), len(order) - 1):
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


def nearby_offloading(task: Task, limit: int) -> Iterator[list[Run]]:
    """At most `limit` placements with one run of blocks on cpu and disk, and the others balanced over the accelerators.

    Half of them are those that leave the accelerators the most room, the others go up from there to the fullest.
    """
    if not task.accelerators or not task.tiers:
        return
    found = sorted(_around_windows(task), key=lambda item: item[0])
    half = min(len(found), max(1, limit // 2))
    step = max(1, (len(found) - half) // max(1, limit - half))
    yield from (runs for _, runs in [*found[:half], *found[half::step]][:limit])


def _around_windows(task: Task) -> Iterator[tuple[float, list[Run]]]:
    """The highest use with each window of blocks offloaded, and the runs, in a few orders of the accelerators."""
    num_blocks = len(task.costs)
    orders = few_orders(task.accelerators)
    step = next(step for step in count(1) if (num_blocks // step) ** 2 <= 2 * _MAX_WINDOWS)
    for start in range(0, num_blocks, step):
        for stop in [*range(start + step, num_blocks, step), num_blocks]:
            away = offloaded(task, start, stop)
            if away is None or stop - start == num_blocks:
                break
            rest = task.costs.without(start, stop)
            for order in orders:
                rooms = task.computing(order, start, stop)
                segments = balanced(
                    rest, [replace(room, budget_bytes=int(_MOST_OVER * room.budget_bytes)) for room in rooms]
                )
                if segments is not None:
                    yield float(segments.highest_use(rest)), [*runs_around(segments, start, stop, _REASON), *away]


def _grown(room: Room) -> Room:
    return replace(room, budget_bytes=int(_MOST_OVER * room.budget_bytes))
