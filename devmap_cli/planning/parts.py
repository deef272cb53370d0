"""What parts of the blocks take of single devices, as a replay of each part alone tells.

Blocks add up to less than their run takes, as an allocator keeps aside what was freed, and in places to more. What a
device takes depends on its own blocks alone, and more blocks take more, so that filling devices in order is exact here
too; only that each look costs a replay. So those are left out that weights and KV cache alone rule out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Protocol

from devmap_cli.devices.device import Device
from devmap_cli.planning.costs import Room
from devmap_cli.planning.nouns import Block, Placement
from devmap_cli.planning.task import Task

ABOVE_ALL = Fraction(1 << 62)
"""The use of a room that is too small."""
SMALL_BYTES = 1 << 30
"""On devices of less, the segments that an allocator reserves matter so much that fewer blocks may take more."""
_MAX_STEP = 4

Cuts = list[int]


class Peaks(Protocol):
    """Tells what accelerators with budgets take, in bytes."""

    def beside_bytes(self, device: Device, budget_bytes: int) -> int:
        """What a device takes whatever it holds."""

    def peak_bytes(
        self, device: Device, budget_bytes: int, blocks: Sequence[int], *, is_main: bool, away: Sequence[int] = ()
    ) -> int | None:
        """The peak of a device, the main one or another, that holds these blocks; None where they are too much.

        The main device computes for those `away` on cpu or disk too.
        """


class Seen:
    """What is known of the peaks of parts of some blocks.

    Attributes:
        kinds: for each block a number, which equal ones share.
        peaks: bytes by what they depend on, None for too much.
        unseen: how much more than sums a device's last one was, in bytes.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        numbers: dict[Block, int] = {}
        self.kinds = [numbers.setdefault(replace(block, fqns=()), len(numbers)) for block in blocks]
        self.peaks: dict[tuple[object, ...], int | None] = {}
        self.unseen: dict[Device, int] = {}


class Parts:
    """What segments of the free blocks take of rooms, beside the blocks pinned there.

    Args:
        task: whose blocks and rooms.
        peaks: tells what devices take.
        main: the device that computes for what is offloaded; its room has that held, by `Task.computing`.
        window: the free blocks [start, stop) are offloaded, and segments are of the others.
        seen: what is known of peaks before, and becomes known.
    """

    def __init__(
        self,
        task: Task,
        peaks: Peaks,
        main: Device,
        *,
        window: tuple[int, int] = (0, 0),
        seen: Seen | None = None,
    ) -> None:
        start, stop = window
        self.free = (*task.free[:start], *task.free[stop:])
        self.costs = task.costs.without(start, stop) if stop > start else task.costs
        self._main = main
        self._peaks = peaks
        self._pinned: dict[Device, list[int]] = {}
        for index, block in enumerate(task.blocks):
            if block.fixed is not None:
                self._pinned.setdefault(block.fixed, []).append(index)
        stored = (index for device, held in self._pinned.items() if not device.is_accelerator for index in held)
        self.away = tuple(sorted([*task.free[start:stop], *stored]))
        self._seen = Seen(task.blocks) if seen is None else seen

    @property
    def num_blocks(self) -> int:
        """The number of blocks that are cut into segments."""
        return len(self.free)

    def learn(self, placement: Placement, rooms: Iterable[Room]) -> None:
        """Take what a judge has measured of a placement for known."""
        for room in rooms:
            if room.device in placement.measured:
                held = [index for index, place in enumerate(placement.devices) if place == room.device]
                self._seen.peaks[self._key(room, held)] = placement.memory(room.device).peak_bytes

    def _key(self, room: Room, held: Iterable[int]) -> tuple[object, ...]:
        """What the peak depends on: equal blocks can stand in for each other, and equal rooms."""
        kinds = tuple(self._seen.kinds[index] for index in held)
        is_main = room.device == self._main
        away = tuple(self._seen.kinds[index] for index in self.away) if is_main else ()
        return is_main, room.device.kind, room.budget_bytes, room.overhead_bytes, kinds, away

    def peak(self, room: Room, start: int, stop: int) -> int | None:
        """The peak of a room with a segment, in bytes; None where that is above its budget."""
        held = sorted([*self._pinned.get(room.device, ()), *self.free[start:stop]])
        is_main = room.device == self._main
        if not held:
            return None if is_main and self.away else 0  # without a block it is not the main one
        key = self._key(room, held)
        if key not in self._seen.peaks:
            away = self.away if is_main else ()
            self._seen.peaks[key] = self._peaks.peak_bytes(
                room.device, room.budget_bytes, held, is_main=is_main, away=away
            )
        peak = self._seen.peaks[key]
        if peak is not None:
            self._seen.unseen[room.device] = peak - self.costs.on(room, start, stop)
        return peak

    def use(self, room: Room, start: int, stop: int) -> Fraction:
        """The use that a segment makes of a room."""
        peak = self.peak(room, start, stop)
        return ABOVE_ALL if peak is None else room.use_of(peak)

    def highest_use(self, rooms: Sequence[Room], cuts: Cuts) -> Fraction:
        """The largest use of any room."""
        return max(self.use(room, *span) for room, span in zip(rooms, pairwise(cuts), strict=True))

    def fits(self, room: Room, start: int, stop: int, use: Fraction | None = None) -> bool:
        """Whether a room takes a segment at a use of at most `use` (None: within its budget)."""
        if start == stop and not room.is_held:
            return True
        cap = room.cap(use)
        if self._least(room, start, stop) > cap:
            return False
        peak = self.peak(room, start, stop)
        return peak is not None and peak <= cap

    def _least(self, room: Room, start: int, stop: int) -> int:
        """What weights and KV cache alone take of a room with a segment."""
        beside = self._peaks.beside_bytes(room.device, room.budget_bytes)
        return room.held_resident_bytes + self.costs.resident(start, stop) + beside

    def may_hold(self, rooms: Sequence[Room]) -> bool:
        """Whether the rooms could hold all in their order if a run took weights and KV cache alone."""
        start = 0
        for room in rooms:
            least = partial(self._least, room, start)
            start += bisect_right(range(start + 1, self.num_blocks + 1), room.budget_bytes, key=least)
        return start == self.num_blocks

    def furthest(self, room: Room, start: int, use: Fraction | None = None) -> int:
        """The furthest stop at which a room takes a segment at a use of at most `use`."""
        most = self.num_blocks - start
        cap = room.cap(use) - self._seen.unseen.get(room.device, 0)
        guess = bisect_right(range(1, most + 1), cap, key=lambda size: self.costs.on(room, start, start + size))
        return start + largest_size(lambda size: self.fits(room, start, start + size, use), guess, most)

    def earliest(self, room: Room, stop: int, use: Fraction | None, lowest: int) -> int:
        """The earliest start from `lowest` on, likewise."""
        most = stop - lowest
        cap = room.cap(use) - self._seen.unseen.get(room.device, 0)
        guess = bisect_right(range(1, most + 1), cap, key=lambda size: self.costs.on(room, stop - size, stop))
        return stop - largest_size(lambda size: self.fits(room, stop - size, stop, use), guess, most)

    def filled(self, rooms: Sequence[Room], start: int = 0, use: Fraction | None = None) -> Cuts | None:
        """Cuts that fill rooms in order, each as far as it goes; None where they don't hold all from `start` on.

        Where blocks are offloaded, one is left for the main device, as without any it would not be that.
        """
        cuts = [start]
        waits = bool(self.away)
        for room in rooms[:-1]:
            waits &= room.device != self._main
            stop = min(self.furthest(room, cuts[-1], use), max(cuts[-1], self.num_blocks - waits))
            if not self.fits(room, cuts[-1], stop, use):
                return None
            cuts.append(stop)
        return [*cuts, self.num_blocks] if self.fits(rooms[-1], cuts[-1], self.num_blocks, use) else None

    def reached(self, rooms: Sequence[Room]) -> Cuts | None:
        """Cuts at which all fits, whatever fewer blocks may take: all segments are looked at, which is for few."""
        came: list[dict[int, int]] = [{0: 0}]
        for room in rooms:
            stops = [(start, stop) for start in came[-1] for stop in range(start, self.num_blocks + 1)]
            came.append({stop: start for start, stop in stops if self.fits(room, start, stop)})
        cuts = [self.num_blocks]
        while len(cuts) <= len(rooms) and cuts[0] in came[-len(cuts)]:
            cuts.insert(0, came[-len(cuts)][cuts[0]])
        return cuts if len(cuts) > len(rooms) else None


def largest_size(does: Callable[[int], bool], guess: int, most: int) -> int:
    """The largest size up to `most` that does, if all smaller ones do too, with few looks where `guess` is near it."""
    low, high, step = 0, most + 1, 1
    if guess and not does(guess):
        high = guess
        while high > 1:
            tried = max(1, high - step)
            if does(tried):
                low = tried
                break
            high, step = tried, min(2 * step, _MAX_STEP)
    else:
        low = guess
        while low < most:
            tried = min(most, low + step)
            if not does(tried):
                high = tried
                break
            low, step = tried, min(2 * step, _MAX_STEP)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if does(middle) else (low, middle)
    return low
