"""`sequential`: devices filled in order, each up to its budget."""

from __future__ import annotations

from devmap_cli.planning.balanced import could_hold, filled, scattered
from devmap_cli.planning.orders import Orders
from devmap_cli.planning.partition import fill
from devmap_cli.planning.task import Run, Task, runs_of


def place_sequential(task: Task) -> list[Run] | None:
    """Fill devices in the given order; accelerators in another one only where that needs no cpu or disk."""
    costs, rooms = task.costs, task.accelerators
    if fill(costs, rooms).segments.stop < len(costs) and could_hold(costs, rooms):
        segments = Orders(costs, rooms).furthest().segments
        if segments.stop == len(costs):
            return runs_of(segments, "filled in the order of devices that holds all")
        if (runs := scattered(task)) is not None:
            return runs
    return filled(task, rooms)
