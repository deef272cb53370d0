"""`auto`: balanced while the accelerators hold all, else the smallest window of blocks is offloaded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from devmap_cli.planning.balanced import on_accelerators
from devmap_cli.planning.costs import Room, SegmentCosts
from devmap_cli.planning.partition import balanced, fill
from devmap_cli.planning.task import Run, Task, runs_around
from devmap_cli.units import format_bytes


def place_auto(task: Task) -> list[Run] | None:
    """Balanced on the accelerators; else without the window of fewest bytes, which goes to cpu, then disk."""
    return on_accelerators(task) or around_window(task)


def around_window(task: Task, stream_limit: int | None = None) -> list[Run] | None:
    """Offload the window with the fewest bytes whose absence lets the rest fit, the latest of equal ones.

    No block is in it that holds a module of more than `stream_limit` bytes.
    """
    if not task.tiers:
        return None
    large = [stream_limit is not None and task.blocks[index].streamed_bytes > stream_limit for index in task.free]
    num_large = [0, *accumulate(large)]
    windows = _Windows(task.costs, task.accelerators)
    best: tuple[int, int, list[Run]] | None = None
    for start in range(windows.last_start, -1, -1):
        stop = windows.first_stop(start)
        if num_large[stop] > num_large[start]:
            continue
        num_bytes = task.costs.weights(start, stop)
        if best is None or num_bytes < task.costs.weights(best[0], best[1]):
            runs = offloaded(task, start, stop)
            best = best if runs is None else (start, stop, runs)
    if best is None:
        return None
    start, stop, runs = best
    return _before_and_after(task, start, stop) + runs


def offloaded(task: Task, start: int, stop: int) -> list[Run] | None:
    """A window's blocks on cpu as far as they go, then disk."""
    size = format_bytes(task.costs.weights(start, stop))
    reason = f"the accelerators can't hold all: the fewest bytes to offload in one piece are {size}"
    runs = []
    for tier in task.tiers:
        reached = min(stop, task.costs.reach(tier, start, tier.budget_bytes))
        if reached > start:
            runs.append(Run(tier.device, start, reached, reason))
            start = reached
    return runs if start == stop else None


def _before_and_after(task: Task, start: int, stop: int) -> list[Run]:
    """What is around a window, balanced over the accelerators."""
    segments = balanced(task.costs.without(start, stop), task.accelerators)
    assert segments is not None, "a window was chosen that doesn't make the rest fit"
    return runs_around(segments, start, stop, "balanced over the accelerators without what is offloaded")


class _Windows:
    """For each start of a window its smallest stop, so that what is around it fits in `rooms` in order.

    Rooms are filled from the front up to the window and from the back down to it, which is exact: no other
    placement gets the front into fewer rooms or the back into later ones. They fit together where they don't
    share a room, or where the one they share has space for both parts.
    """

    def __init__(self, costs: SegmentCosts, rooms: Sequence[Room]) -> None:
        self.costs = costs
        self.rooms = rooms
        self.from_front = fill(costs, rooms).segments.cuts
        reversed_cuts = fill(costs.backwards(), rooms[::-1]).segments.cuts
        self.from_back = tuple(len(costs) - cut for cut in reversed(reversed_cuts))
        self.last_start = self.from_front[-1]

    def first_stop(self, start: int) -> int:
        """The smallest stop for a window that begins at `start`."""
        stops = range(max(start, self.from_back[0]), len(self.costs) + 1)
        return stops[bisect_left(stops, 1, key=lambda stop: self._fits(start, stop))]

    def _fits(self, start: int, stop: int) -> bool:
        front = bisect_left(self.from_front, start) - 1
        # from_back[k] is where room k begins when filled from the back; the last such room holds block `stop`
        back = self._room_from_back(stop)
        if back != front:
            return back > front
        front_start, back_stop = self.from_front[front], self.from_back[back + 1]
        room = self.rooms[front]
        return self.costs.on_around(room, (front_start, start), (stop, back_stop)) <= room.budget_bytes

    def _room_from_back(self, stop: int) -> int:
        """The room that holds block `stop` when filled from the back; the number of rooms for none."""
        if stop == len(self.costs):
            return len(self.rooms)
        low, high = 0, len(self.rooms) - 1
        while low < high:
            middle = (low + high) // 2
            if self.from_back[middle + 1] > stop:
                high = middle
            else:
                low = middle + 1
        return low
