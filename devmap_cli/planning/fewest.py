"""`fewest`: the fewest accelerators that hold it, then balanced over those."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby

from devmap_cli.planning.balanced import arranged, could_hold, on_accelerators, overflowing
from devmap_cli.planning.costs import Room, SegmentCosts
from devmap_cli.planning.orders import Orders, num_used
from devmap_cli.planning.partition import Attempt, Segments, balanced, evened, fill, least_use
from devmap_cli.planning.task import Run, Task, runs_of

_MAX_SEARCHED_CHOICES = 512
_MAX_ROOMS = 128


def place_fewest(task: Task) -> list[Run] | None:
    """Balanced over the smallest number of accelerators that can hold all, of these over the best ones."""
    costs, rooms = task.costs, task.accelerators
    segments = _fewest(costs, rooms)
    if segments is None:
        return on_accelerators(task) or overflowing(task)
    return runs_of(segments, f"{num_used(segments)} of {len(rooms)} accelerators hold all, fewer don't; balanced")


def _fewest(costs: SegmentCosts, rooms: Sequence[Room]) -> Segments | None:
    if not could_hold(costs, rooms):
        return None
    in_order = _fewest_in_order(costs, rooms)
    reordered = Orders(costs, rooms).fewest()
    if reordered is None or (in_order is not None and num_used(in_order) <= num_used(reordered)):
        return in_order
    used = set(_used(reordered))
    return arranged(costs, [room for room in rooms if room in used])


def _used(segments: Segments) -> list[Room]:
    spans = zip(segments.rooms, segments.cuts, segments.cuts[1:], strict=False)
    return [room for room, start, stop in spans if stop > start or room.is_held]


def _fewest_in_order(costs: SegmentCosts, rooms: Sequence[Room]) -> Segments | None:
    """The fewest rooms that hold all in the given order, and of these the choice with the smallest highest use."""
    if len({room.kind for room in rooms}) == 1:
        used = len(_used(fill(costs, rooms).segments))
        return balanced(costs, rooms[:used])
    if len(rooms) > _MAX_ROOMS:
        return _largest_that_hold(costs, rooms)
    most = sum(1 for room in rooms if not room.is_held)
    stops = _furthest_by_count(costs, rooms, most, None)[0]
    count = next((number for number, stop in enumerate(stops) if stop == len(costs)), None)
    if count is None:
        return None
    candidates = _thinned(rooms, count)

    def attempt(use: Fraction | None) -> Attempt:
        return _choice(costs, candidates, count, use)

    chosen = attempt(None).segments
    if len(candidates) * count > _MAX_SEARCHED_CHOICES or len({room.kind for room in candidates}) == 1:
        return balanced(costs, chosen.rooms)
    found = least_use(costs, candidates, attempt)
    assert found is not None, "the count was found to hold all"
    return evened(costs, found[1].rooms, found[0])


def _largest_that_hold(costs: SegmentCosts, rooms: Sequence[Room]) -> Segments | None:
    """As few of the largest rooms as hold all in the given order; for too many rooms to try all choices."""

    def choice(count: int) -> list[Room]:
        largest = sorted(rooms, key=lambda room: (not room.is_held, -room.budget_bytes))[:count]
        chosen = {room.device for room in largest}
        return [room for room in rooms if room.device in chosen]

    def holds(count: int) -> bool:
        return fill(costs, choice(count)).segments.stop == len(costs)

    least = sum(1 for room in rooms if room.is_held)
    counts = range(least, len(rooms) + 1)
    count = least + bisect_left(counts, True, key=holds)
    return balanced(costs, choice(count)) if count <= len(rooms) else None


def _thinned(rooms: Sequence[Room], count: int) -> list[Room]:
    """Without the rooms of a run of equal ones that a choice of `count` can do without."""
    runs = [list(run) for _, run in groupby(rooms, key=lambda room: room.kind)]
    return [room for run in runs for room in (run if run[0].is_held else run[:count])]


def _furthest_by_count(
    costs: SegmentCosts, rooms: Sequence[Room], most: int, use: Fraction | None
) -> tuple[list[int], list[list[int]], Fraction | None]:
    """The furthest stop with each number of rooms not held, the same after each room, and the next larger use."""
    stops = [0] * (most + 1)
    history = [list(stops)]
    uses: list[Fraction] = []

    def reach(room: Room, start: int) -> int:
        stop = costs.reach(room, start, room.cap(use))
        if use is not None and stop < len(costs):
            num_bytes = costs.on(room, start, stop + 1)
            if room.scale and num_bytes <= room.budget_bytes:
                uses.append(Fraction(num_bytes, room.scale))
        return stop

    for room in rooms:
        if room.is_held:
            stops = [reach(room, stop) for stop in stops]
        else:
            taken = [0, *(reach(room, stop) for stop in stops[:-1])]
            stops = [max(pair) for pair in zip(stops, taken, strict=True)]
        history.append(stops)
    return stops, history, min(uses, default=None)


def _choice(costs: SegmentCosts, rooms: Sequence[Room], count: int, use: Fraction | None) -> Attempt:
    """The `count` rooms that get furthest at a use, and their segments."""
    stops, history, next_use = _furthest_by_count(costs, rooms, count, use)
    chosen: list[Room] = []
    cuts = [stops[count]]
    for index in range(len(rooms) - 1, -1, -1):
        before = history[index]
        if not rooms[index].is_held and before[count] == cuts[-1]:
            continue
        count -= 0 if rooms[index].is_held else 1
        chosen.append(rooms[index])
        cuts.append(before[count])
    return Attempt(Segments(tuple(reversed(chosen)), tuple(reversed(cuts))), next_use)
