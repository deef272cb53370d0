"""`sequential`: devices filled in order, each up to its budget."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from devmap_cli.planning.balanced import could_hold, filled, scattered
from devmap_cli.planning.orders import Orders
from devmap_cli.planning.partition import fill
from devmap_cli.planning.task import Run, Task, runs_of


def place_sequential(task: Task) -> list[Run] | None:
    """Fill devices in the given order; accelerators in another one only where that needs no cpu or disk."""
    costs, rooms = task.costs, task.accelerators
    if task.keeps_spare and (runs := _with_spare(task)) is not None:
        return runs
    if fill(costs, rooms).segments.stop < len(costs) and could_hold(costs, rooms):
        segments = Orders(costs, rooms).furthest().segments
        if segments.stop == len(costs):
            return runs_of(segments, "filled in the order of devices that holds all")
        if (runs := scattered(task)) is not None:
            return runs
    return filled(task, rooms)


def _with_spare(task: Task) -> list[Run] | None:
    """The same with room on the first accelerator for the largest block that it does not hold.

    So accelerate's infer_auto_device_map does it, for what may pass through there. None where not all fits so, or where
    the fullest device is no less full for it.
    """
    costs, rooms = task.costs, task.accelerators
    if not rooms:
        return None
    first, others = rooms[0], rooms[1:]
    largest_from = [*reversed([*accumulate(reversed(costs.resident_bytes), max)]), 0]
    stop = 0
    while stop < len(costs) and costs.on(first, 0, stop + 1) + largest_from[stop + 1] <= first.budget_bytes:
        stop += 1
    capped = replace(first, budget_bytes=costs.on(first, 0, stop))
    segments = fill(costs, (capped, *others)).segments
    full = fill(costs, rooms).segments
    if segments.stop < len(costs) or segments.highest_use(costs) >= full.highest_use(costs):
        return None
    return runs_of(segments, f"next in order, with room for one more block on {first.device.label}")
