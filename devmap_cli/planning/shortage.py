"""The answer "no": which device binds, and the least that would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from devmap_cli.devices.budgets import Budgets
from devmap_cli.planning.costs import Room
from devmap_cli.planning.nouns import Block, Infeasible, Placement
from devmap_cli.planning.partition import fill
from devmap_cli.planning.task import Task
from devmap_cli.units import format_bytes

_MAX_EXACT_SIZE = 20_000


def overfull_by_pins(strategy: str, task: Task) -> Infeasible | None:
    """The first device that its own pinned blocks overfill."""
    for room in task.rooms:
        if room.held_bytes > room.budget_bytes:
            reason = f"the blocks pinned to {room.device.label} are too large for it"
            return Infeasible(strategy, reason, room.held_bytes, room.budget_bytes, room.device)
    return None


def shortage(strategy: str, task: Task, is_feasible: Callable[[Task], bool] | None) -> Infeasible:
    """Why nothing fits, with the smallest amount that makes it fit when added to a single device.

    The amount is exact for tasks of usual size; for very large ones, and without `is_feasible`, it is enough, but may
    not be the smallest.
    """
    room, missing = _best_to_grow(task)
    if is_feasible is not None and len(task.costs) * len(task.rooms) <= _MAX_EXACT_SIZE:
        room, missing = _smallest(task, is_feasible, room, missing)
    bound = room.budget_bytes
    return Infeasible(strategy, reason_of(task.blocks, task.budgets), bound + missing, bound, room.device)


def disk_alone(placement: Placement) -> Infeasible:
    """The answer where no device could compute: disk holds weights and nothing else.

    What computes has to hold a block of its own beside what all others take of it while they run.
    """
    budgets = placement.budgets
    device = max(budgets.accelerators, key=budgets.get, default=placement.main_device)
    smallest_block = min((block.weights_bytes for block in placement.blocks if block.weights_bytes), default=1)
    needed = placement.memory(placement.main_device).peak_bytes + smallest_block
    budget = budgets.get(device)
    reason = "no device that computes has room for the KV cache, the weights passing through and a block of its own"
    return Infeasible(placement.strategy, reason, max(needed, budget + 1), budget, device)


def reason_of(blocks: Sequence[Block], budgets: Budgets) -> str:
    """Why blocks that don't fit don't, as far as sums tell."""
    sizes = [size for _, size in budgets]
    if len(sizes) == 1:
        return "it is too small"
    held = sum(block.resident_bytes for block in blocks)
    if held > sum(sizes):
        what = "weights and KV cache" if any(block.kv_cache_bytes for block in blocks) else "the weights"
        return f"{what} take {format_bytes(held)}, and all budgets together are {format_bytes(sum(sizes))}"
    largest = max(blocks, key=lambda block: block.resident_bytes + block.largest_transient_bytes)
    alone = largest.resident_bytes + largest.largest_transient_bytes
    if alone > max(sizes):
        return f"{largest.fqns[0]} alone takes {format_bytes(alone)}"
    return "the blocks don't divide so that each device stays within its budget"


def _best_to_grow(task: Task) -> tuple[Room, int]:
    """The room that needs least to hold, in the given order, what those before and after it leave."""
    costs, rooms = task.costs, task.rooms
    fronts = fill(costs, rooms).segments.cuts
    backs = fill(costs.backwards(), rooms[::-1]).segments.cuts[::-1]
    growths = [
        (costs.on(room, fronts[index], len(costs) - backs[index + 1]) - room.budget_bytes, index)
        for index, room in enumerate(rooms)
    ]
    missing, index = min(growths)
    return rooms[index], missing


def _smallest(task: Task, is_feasible: Callable[[Task], bool], room: Room, enough: int) -> tuple[Room, int]:
    """The room and the smallest amount over all rooms, given one amount that is enough."""
    for other in task.rooms:
        # a room that can't do with less than the best so far is out after one try
        if not is_feasible(_grown(task, other, enough - 1)):
            continue
        low, high = 0, enough - 1
        while low + 1 < high:
            middle = (low + high) // 2
            if is_feasible(_grown(task, other, middle)):
                high = middle
            else:
                low = middle
        room, enough = other, high
    return room, enough


def _grown(task: Task, room: Room, num_bytes: int) -> Task:
    """The same task with more memory on one device."""

    def grow(other: Room) -> Room:
        if other.device != room.device:
            return other
        budget_bytes = other.budget_bytes + num_bytes
        return replace(other, budget_bytes=budget_bytes, scale=budget_bytes)

    return replace(
        task,
        accelerators=tuple(grow(other) for other in task.accelerators),
        tiers=tuple(grow(other) for other in task.tiers),
    )
