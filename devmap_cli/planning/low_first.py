"""`balanced_low_0`: as little as possible on the first accelerator, the rest balanced."""

from __future__ import annotations

from dataclasses import replace

from devmap_cli.planning.balanced import arranged, could_hold, on_accelerators, overflowing
from devmap_cli.planning.costs import Room
from devmap_cli.planning.orders import MAX_SEARCHED_STATES, Orders
from devmap_cli.planning.partition import Segments, evened, least_use
from devmap_cli.planning.task import Run, Task, runs_of


def place_low_first(task: Task) -> list[Run] | None:
    """The first accelerator takes only the front that the others can't, else a part elsewhere in the order."""
    if not task.accelerators or not could_hold(task.costs, task.accelerators):
        return overflowing(task)
    return _front_on_first(task) or _part_on_first(task) or on_accelerators(task) or overflowing(task)


def _front_on_first(task: Task) -> list[Run] | None:
    """The shortest front that leaves a rest which fits on the others, in whatever order of theirs."""
    first, *others = task.accelerators
    front = len(task.costs) - Orders(task.costs.backwards(), others).furthest().segments.stop
    if task.costs.on(first, 0, front) > first.budget_bytes:
        return None
    rest = arranged(task.costs.without(0, front), others)
    assert rest is not None, "the others were found to hold the rest"
    runs = [Run(first.device, 0, front, "only what the other accelerators can't hold")] if front else []
    for run in runs_of(rest, f"balanced over the accelerators but {first.device.label}"):
        runs.append(replace(run, start=run.start + front, stop=run.stop + front))
    return runs


def _part_on_first(task: Task) -> list[Run] | None:
    """All on the accelerators in any order, with the smallest load on the first that allows one."""
    found = _smallest_first(task)
    if found is None:
        return None
    room, segments = found
    orders = Orders(task.costs, (room, *task.accelerators[1:]))
    if orders.num_states <= MAX_SEARCHED_STATES:
        best = least_use(task.costs, orders.rooms, orders.furthest)
        assert best is not None, "an order was found before"
        segments = evened(task.costs, best[1].rooms, best[0])
    return runs_of(segments, f"balanced, with as little as possible on {room.device.label}")


def _smallest_first(task: Task) -> tuple[Room, Segments] | None:
    """The first room with the smallest cap at which some order holds all, and that order's segments."""
    first, *others = task.accelerators

    def held(cap: int) -> Segments | None:
        room = replace(first, budget_bytes=cap, scale=None)
        segments = Orders(task.costs, (room, *others)).furthest().segments
        return segments if segments.stop == len(task.costs) else None

    low, high = first.held_bytes, first.budget_bytes
    best = held(high)
    while best is not None and low < high:
        middle = (low + high) // 2
        tried = held(middle)
        if tried is None:
            low = middle + 1
        else:
            best, high = tried, middle
    return None if best is None else (replace(first, budget_bytes=high, scale=None), best)
