"""Cuts moved to where each device's part of a run takes less, as a replay of that part alone tells.

Blocks add up to less than their run takes, as an allocator keeps aside what was freed, and in places to more. What a
device takes depends on its own blocks alone, and more blocks take more, so that filling devices in order is exact here
too; only that each look costs a replay. So those are left out that weights and KV cache alone rule out, and the search
starts from cuts that are nearly right.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Protocol

from devmap_cli.devices.device import Device
from devmap_cli.planning.costs import Room
from devmap_cli.planning.nouns import Block, Placement
from devmap_cli.planning.task import Run, Task, percent


class Peaks(Protocol):
    """Tells what accelerators with budgets take, in bytes."""

    def beside_bytes(self, device: Device, budget_bytes: int) -> int:
        """What a device takes whatever it holds."""

    def peak_bytes(self, device: Device, budget_bytes: int, blocks: Sequence[int], *, is_main: bool) -> int | None:
        """The peak of a device, the main one or another, that holds these blocks; None where they are too much."""


_GAIN = Fraction(1, 2048)
"""Cuts are moved for a highest use that is lower by this part at least."""
_MOST = Fraction(1 << 62)
_MAX_ROUNDS = 16

Cuts = list[int]


def recut(task: Task, placement: Placement, peaks: Peaks) -> list[Run] | None:
    """The runs of a placement with the best cuts by the measure of its strategy; None where its own stay.

    Only placements are looked at that have all blocks on accelerators. Where they don't use these in the given order,
    one after the other, it is tried first whether that would do.
    """
    if not task.free or not all(place.is_accelerator for place in placement.devices):
        return None
    parts, first, strategy = _Parts(task, placement, peaks), task.accelerators[0], placement.strategy
    own = _segments(task, placement)
    start = own if strategy == "balanced_low_0" else _in_given_order(parts, task, placement, own) or own
    if start is None:
        return None
    rooms, cuts = start
    if strategy == "sequential":
        filled = _filled(parts, rooms)
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
    parts: _Parts, task: Task, placement: Placement, own: tuple[list[Room], Cuts] | None
) -> tuple[list[Room], Cuts] | None:
    """The accelerators filled in the given order, if they hold all so and the placement has another one."""
    may_use = [room for room in task.accelerators if placement.strategy != "fewest" or room.device in placement.devices]
    if own is not None and own[0] == [room for room in may_use if room in own[0]]:
        return None
    cuts = _filled(parts, may_use)
    return None if cuts is None else (may_use, cuts)


def _runs(rooms: Sequence[Room], cuts: Cuts, reason: str) -> list[Run]:
    return [
        Run(room.device, start, stop, reason)
        for room, (start, stop) in zip(rooms, pairwise(cuts), strict=True)
        if stop > start
    ]


class _Parts:
    """What segments of the free blocks take of rooms, beside the blocks pinned there."""

    def __init__(self, task: Task, placement: Placement, peaks: Peaks) -> None:
        self.num_blocks = len(task.free)
        self._task = task
        self._peaks = peaks
        self._main = placement.main_device
        self._pinned: dict[Device, list[int]] = {}
        for index, block in enumerate(task.blocks):
            if block.fixed is not None:
                self._pinned.setdefault(block.fixed, []).append(index)
        kinds: dict[Block, int] = {}
        self._kinds = [kinds.setdefault(replace(block, fqns=()), len(kinds)) for block in task.blocks]
        self._known: dict[tuple[object, ...], int | None] = {}
        self._unseen: dict[Device, int] = {}
        for room in task.accelerators:
            if room.device in placement.measured:
                held = [index for index, place in enumerate(placement.devices) if place == room.device]
                self._known[self._key(room, held)] = placement.memory(room.device).peak_bytes

    def _key(self, room: Room, held: Iterable[int]) -> tuple[object, ...]:
        """What the peak depends on: equal blocks can stand in for each other, and equal rooms."""
        kinds = tuple(self._kinds[index] for index in held)
        return room.device == self._main, room.device.kind, room.budget_bytes, room.overhead_bytes, kinds

    def peak(self, room: Room, start: int, stop: int) -> int | None:
        """The peak of a room with a segment, in bytes; None where that is above its budget."""
        held = sorted([*self._pinned.get(room.device, ()), *self._task.free[start:stop]])
        if not held:
            return 0
        key = self._key(room, held)
        if key not in self._known:
            self._known[key] = self._peaks.peak_bytes(
                room.device, room.budget_bytes, held, is_main=room.device == self._main
            )
        peak = self._known[key]
        if peak is not None:
            self._unseen[room.device] = peak - self._task.costs.on(room, start, stop)
        return peak

    def use(self, room: Room, start: int, stop: int) -> Fraction:
        """The use that a segment makes of a room."""
        peak = self.peak(room, start, stop)
        return _MOST if peak is None else room.use_of(peak)

    def highest_use(self, rooms: Sequence[Room], cuts: Cuts) -> Fraction:
        """The largest use of any room."""
        return max(self.use(room, *span) for room, span in zip(rooms, pairwise(cuts), strict=True))

    def fits(self, room: Room, start: int, stop: int, use: Fraction | None) -> bool:
        """Whether a room takes a segment at a use of at most `use` (None: within its budget)."""
        if start == stop and not room.is_held:
            return True
        cap = room.cap(use)
        least = room.held_resident_bytes + self._task.costs.resident(start, stop)
        if least + self._peaks.beside_bytes(room.device, room.budget_bytes) > cap:
            return False
        peak = self.peak(room, start, stop)
        return peak is not None and peak <= cap

    def furthest(self, room: Room, start: int, use: Fraction | None) -> int:
        """The furthest stop at which a room takes a segment at a use of at most `use`."""
        cap = room.cap(use) - self._unseen.get(room.device, 0)
        stops = range(start + 1, self.num_blocks + 1)
        stop = start + bisect_right(stops, cap, key=lambda stop: self._task.costs.on(room, start, stop))
        while stop > start and not self.fits(room, start, stop, use):
            stop -= 1
        while stop < self.num_blocks and self.fits(room, start, stop + 1, use):
            stop += 1
        return stop

    def earliest(self, room: Room, stop: int, use: Fraction | None, lowest: int) -> int:
        """The earliest start from `lowest` on, likewise."""
        cap = room.cap(use) - self._unseen.get(room.device, 0)
        starts = range(lowest, stop)
        start = lowest + bisect_left(starts, -cap, key=lambda start: -self._task.costs.on(room, start, stop))
        while start < stop and not self.fits(room, start, stop, use):
            start += 1
        while start > lowest and self.fits(room, start - 1, stop, use):
            start -= 1
        return start


def _filled(parts: _Parts, rooms: Sequence[Room], start: int = 0, use: Fraction | None = None) -> Cuts | None:
    """Cuts that fill rooms in order, each as far as it goes; None where they don't hold all from `start` on."""
    *before, last = rooms
    cuts = [start]
    for room in before:
        cuts.append(parts.furthest(room, cuts[-1], use))
    return [*cuts, parts.num_blocks] if parts.fits(last, cuts[-1], parts.num_blocks, use) else None


def _on_fewer(parts: _Parts, task: Task, placement: Placement) -> tuple[list[Room], Cuts] | None:
    """One accelerator less than the placement uses, the largest ones, if they hold all."""
    count = len(placement.used_devices) - 1
    largest = sorted(task.accelerators, key=lambda room: (not room.is_held, -room.budget_bytes))[:count]
    chosen = [room for room in task.accelerators if room in largest]
    cuts = _filled(parts, chosen) if chosen else None
    return None if cuts is None else (chosen, cuts)


def _lowered(parts: _Parts, rooms: Sequence[Room], cuts: Cuts) -> Cuts:
    """Cuts with the smallest highest use, each moved as little as that takes."""
    best = cuts
    highest = parts.highest_use(rooms, best)
    for _ in range(_MAX_ROUNDS):
        use = highest * (1 - _GAIN)
        filled = _filled(parts, rooms, best[0], use)
        if filled is None:
            break
        near = _moved(parts, rooms, best, use)
        best = near if parts.highest_use(rooms, near) <= use else filled
        highest = parts.highest_use(rooms, best)
    return best


def _moved(parts: _Parts, rooms: Sequence[Room], cuts: Cuts, use: Fraction) -> Cuts:
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


def _low_first(parts: _Parts, rooms: Sequence[Room], cuts: Cuts) -> list[Run] | None:
    """The same with as little as can be on the first room, and the smallest highest use of the others."""
    (first, *others), front, rest = rooms, cuts[1], cuts[1:]
    while front > cuts[0] and (filled := _filled(parts, others, front - 1)) is not None:
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
