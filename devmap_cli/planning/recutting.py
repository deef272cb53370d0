"""Cuts moved to where each device's part of a run takes less, as replays tell; from cuts that are nearly right."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from devmap_cli.planning.costs import Room
from devmap_cli.planning.nouns import Placement
from devmap_cli.planning.parts import SMALL_BYTES, Cuts, Parts, Peaks
from devmap_cli.planning.task import Run, Task, percent

_GAIN = Fraction(1, 2048)
"""Cuts are moved for a highest use that is lower by this part at least."""
_MAX_ROUNDS = 16
_MAX_CLIMB = 3
"""Cuts so many blocks away are tried where devices take little."""


def recut(task: Task, placement: Placement, peaks: Peaks) -> list[Run] | None:
    """The runs of a placement with the best cuts by the measure of its strategy; None where its own stay.

    Only placements are looked at that have all blocks on accelerators. Where they don't use these in the given order,
    one after the other, it is tried first whether that would do.
    """
    if not task.free or not all(place.is_accelerator for place in placement.devices):
        return None
    parts, first, strategy = Parts(task, peaks, placement.main_device), task.accelerators[0], placement.strategy
    parts.learn(placement, task.accelerators)
    own = _segments(task, placement)
    start = own if strategy == "balanced_low_0" else _in_given_order(parts, task, placement, own) or own
    if start is None:
        return None
    rooms, cuts = start
    if strategy == "sequential":
        filled = parts.filled(rooms)
        reason = "next in order, each device as far as its budget goes"
        return None if filled is None or (rooms, filled) == own else _runs(rooms, filled, reason)
    if strategy == "balanced_low_0" and first in rooms:
        return _low_first(parts, rooms, cuts) if first == rooms[0] and len(rooms) > 1 else None
    if strategy == "fewest":
        rooms, cuts = _on_fewer(parts, task, placement) or start
    cuts = _lowered(parts, rooms, cuts)
    reason = f"balanced: no device above {percent(parts.highest_use(rooms, cuts))} of its budget as replayed"
    if strategy == "fewest":
        reason = f"{len(rooms)} of {len(task.accelerators)} accelerators hold all, fewer don't; {reason}"
    return _runs(rooms, cuts, reason)


def _segments(task: Task, placement: Placement) -> tuple[list[Room], Cuts] | None:
    """The accelerators in the order in which the placement uses them, and its cuts; None where it comes back to one."""
    places = [placement.devices[index] for index in task.free]
    used = [place for place, before in zip(places, [None, *places], strict=False) if place != before]
    if len(set(used)) < len(used):
        return None
    rooms = {room.device: room for room in task.accelerators}
    may_use_all = used == [device for device in rooms if device in used] and placement.strategy != "fewest"
    order = list(rooms) if may_use_all else used
    ends = [0]
    for device in order:
        ends.append(ends[-1] + places.count(device))
    return [rooms[device] for device in order], ends


def _in_given_order(
    parts: Parts, task: Task, placement: Placement, own: tuple[list[Room], Cuts] | None
) -> tuple[list[Room], Cuts] | None:
    """The accelerators filled in the given order, if they hold all so and the placement has another one."""
    may_use = [room for room in task.accelerators if placement.strategy != "fewest" or room.device in placement.devices]
    if own is not None and own[0] == [room for room in may_use if room in own[0]]:
        return None
    cuts = parts.filled(may_use)
    return None if cuts is None else (may_use, cuts)


def _runs(rooms: Sequence[Room], cuts: Cuts, reason: str) -> list[Run]:
    return [
        Run(room.device, start, stop, reason)
        for room, (start, stop) in zip(rooms, pairwise(cuts), strict=True)
        if stop > start
    ]


def _on_fewer(parts: Parts, task: Task, placement: Placement) -> tuple[list[Room], Cuts] | None:
    """One accelerator less than the placement uses, the largest ones, if they hold all."""
    count = len(placement.used_devices) - 1
    largest = sorted(task.accelerators, key=lambda room: (not room.is_held, -room.budget_bytes))[:count]
    chosen = [room for room in task.accelerators if room in largest]
    cuts = parts.filled(chosen) if chosen else None
    return None if cuts is None else (chosen, cuts)


def _lowered(parts: Parts, rooms: Sequence[Room], cuts: Cuts) -> Cuts:
    """Cuts with the smallest highest use, each moved as little as that takes."""
    best = cuts
    highest = parts.highest_use(rooms, best)
    for _ in range(_MAX_ROUNDS):
        use = highest * (1 - _GAIN)
        filled = parts.filled(rooms, best[0], use)
        if filled is None:
            break
        near = _moved(parts, rooms, best, use)
        best = near if parts.highest_use(rooms, near) <= use else filled
        highest = parts.highest_use(rooms, best)
    spans = zip(rooms, pairwise(best), strict=True)
    is_small = all((parts.peak(room, *span) or 0) < SMALL_BYTES for room, span in spans)
    return _climbed(parts, rooms, best) if is_small else best


def _climbed(parts: Parts, rooms: Sequence[Room], cuts: Cuts) -> Cuts:
    """Cuts with a lower highest use that others lead to, each a little away, for where fewer blocks can take more."""
    best, highest = cuts, parts.highest_use(rooms, cuts)
    for _ in range(_MAX_ROUNDS):
        moved = [
            [*best[:index], best[index] + by, *best[index + 1 :]]
            for index in range(1, len(best) - 1)
            for by in range(-_MAX_CLIMB, _MAX_CLIMB + 1)
            if best[index - 1] <= best[index] + by <= best[index + 1]
        ]
        found = min(moved, key=lambda cuts: parts.highest_use(rooms, cuts), default=best)
        use = parts.highest_use(rooms, found)
        if use > highest * (1 - _GAIN):
            break
        best, highest = found, use
    return best


def _moved(parts: Parts, rooms: Sequence[Room], cuts: Cuts, use: Fraction) -> Cuts:
    """Cuts near these at which no room is above `use`, which all are known to fit in."""
    earliest = [cuts[-1]]
    for room in reversed(rooms):
        earliest.append(parts.earliest(room, earliest[-1], use, cuts[0]))
    earliest.reverse()
    moved = [cuts[0]]
    for room, least, wanted in zip(rooms, earliest[1:], cuts[1:], strict=True):
        start = moved[-1]
        stop = max(start, least, wanted)
        while stop > max(start, least) and not parts.fits(room, start, stop, use):
            stop -= 1
        moved.append(stop)
    return moved


def _low_first(parts: Parts, rooms: Sequence[Room], cuts: Cuts) -> list[Run] | None:
    """The same with as little as can be on the first room, and the smallest highest use of the others."""
    (first, *others), front, rest = rooms, cuts[1], cuts[1:]
    while front > cuts[0] and (filled := parts.filled(others, front - 1)) is not None:
        front, rest = front - 1, filled
    rest = _lowered(parts, others, rest)
    found = [cuts[0], *rest]
    if found == cuts:
        return None
    reason = f"balanced over the accelerators but {first.device.label}"
    return [
        *_runs([first], found[:2], "only what the other accelerators can't hold"),
        *_runs(others, found[1:], reason),
    ]
