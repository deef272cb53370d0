"""`balanced`: the smallest highest use over the accelerators."""

from __future__ import annotations

from collections.abc import Sequence

from devmap_cli.planning.costs import Room, SegmentCosts
from devmap_cli.planning.orders import MAX_SEARCHED_STATES, Orders
from devmap_cli.planning.packing import packed
from devmap_cli.planning.partition import Segments, balanced, evened, fill, least_use
from devmap_cli.planning.task import Run, Task, percent, runs_of


def place_balanced(task: Task) -> list[Run] | None:
    """Balanced over the accelerators; where they don't hold all, filled ones, the rest on cpu, then disk."""
    return on_accelerators(task) or overflowing(task)


def on_accelerators(task: Task) -> list[Run] | None:
    """All blocks on the accelerators, balanced: in the given order, else another, else in any places."""
    segments = arranged(task.costs, task.accelerators)
    if segments is not None:
        highest = percent(segments.highest_use(task.costs))
        return runs_of(segments, f"balanced: no device above {highest} of its budget, what its allocator keeps aside")
    return scattered(task)


def arranged(costs: SegmentCosts, rooms: Sequence[Room]) -> Segments | None:
    """Balanced segments in the given order of `rooms`, else the best other; None where none holds all."""
    given = balanced(costs, rooms)
    if given is not None or not could_hold(costs, rooms):
        return given
    orders = Orders(costs, rooms)
    if orders.num_states > MAX_SEARCHED_STATES:
        found = orders.furthest().segments
        return balanced(costs, found.rooms) if found.stop == len(costs) else None
    best = least_use(costs, rooms, orders.furthest)
    return None if best is None else evened(costs, best[1].rooms, best[0])


def could_hold(costs: SegmentCosts, rooms: Sequence[Room]) -> bool:
    """Whether the blocks' resident bytes, or weights if some may lie elsewhere, are no more than `rooms` have left."""
    left = sum(room.budget_bytes - room.held_resident_bytes for room in rooms)
    total = costs.weights if any(room.is_store for room in rooms) else costs.resident
    return total(0, len(costs)) <= left


def scattered(task: Task) -> list[Run] | None:
    """All blocks on the accelerators, a device's blocks not all next to each other."""
    if not could_hold(task.costs, task.accelerators):
        return None
    return packed(task.costs, task.accelerators, "fits on the accelerators only out of order")


def overflowing(task: Task) -> list[Run] | None:
    """Accelerators filled in the order that holds most, the rest on cpu, then disk."""
    if not could_hold(task.costs, task.rooms):
        return None
    order = Orders(task.costs, task.accelerators).furthest().segments.rooms
    return filled(task, order)


def filled(task: Task, order: Sequence[Room]) -> list[Run] | None:
    """Accelerators filled in this order, the rest on cpu, then disk."""
    segments = fill(task.costs, (*order, *task.tiers)).segments
    if segments.stop < len(task.costs):
        return None
    return runs_of(segments, "next in order, each device as far as its budget goes")
