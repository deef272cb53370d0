"""The exact partitioner: a sequence of blocks cut into one segment per room.

The smallest highest use comes from a parametric search. For a given use, filling each room as far as it goes
is exact, because a segment costs more the longer it is. A failed try tells the next larger use at which
anything changes, so that the search ends on the exact optimum, without a tolerance.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from devmap_cli.planning.costs import Room, SegmentCosts

_FINENESS = 1 << 64
_MAX_SWEEPS = 8


@dataclass(frozen=True, slots=True)
class Segments:
    """A segment for each room: room k takes blocks [cuts[k], cuts[k + 1])."""

    rooms: tuple[Room, ...]
    cuts: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The number of blocks placed."""
        return self.cuts[-1]

    def highest_use(self, costs: SegmentCosts) -> Fraction:
        """The largest use of any room."""
        spans = zip(self.rooms, pairwise(self.cuts), strict=True)
        return max((room.use_of(costs.on(room, *span)) for room, span in spans), default=Fraction(0))


@dataclass(frozen=True, slots=True)
class Attempt:
    """The furthest that blocks go at one use, and the next larger use at which they may go further (None: never)."""

    segments: Segments
    next_use: Fraction | None


class _NextUse:
    """The smallest use seen at which a room could take one more block."""

    def __init__(self) -> None:
        self.use: Fraction | None = None

    def see(self, costs: SegmentCosts, room: Room, start: int, stop: int) -> None:
        """Take note that `room` stopped before block `stop`."""
        num_bytes = costs.on(room, start, stop + 1)
        if not room.scale or num_bytes > room.budget_bytes:
            return
        # num_bytes / room.scale < self.use, without making a Fraction for each
        if self.use is None or num_bytes * self.use.denominator < self.use.numerator * room.scale:
            self.use = Fraction(num_bytes, room.scale)


def fill(costs: SegmentCosts, rooms: Sequence[Room], use: Fraction | None = None) -> Attempt:
    """Fill rooms in order, each as far as it goes at a use of at most `use` (None: up to its budget)."""
    cuts = [0]
    next_use = _NextUse()
    for room in rooms:
        start = cuts[-1]
        stop = costs.reach(room, start, room.cap(use))
        cuts.append(stop)
        if use is not None and stop < len(costs):
            next_use.see(costs, room, start, stop)
    return Attempt(Segments(tuple(rooms), tuple(cuts)), next_use.use)


def least_use(
    costs: SegmentCosts, rooms: Sequence[Room], attempt: Callable[[Fraction | None], Attempt]
) -> tuple[Fraction, Segments] | None:
    """The smallest highest use at which `attempt` places all blocks, and its segments; None where none does.

    `attempt` must be exact at each use: whatever it can't place at `use`, it can't place below its `next_use`
    either.
    """
    best = attempt(None).segments
    if best.stop < len(costs):
        return None
    low, high = lower_bound(costs, rooms), best.highest_use(costs)
    while low < high:
        for use in (low, _between(low, high)):
            tried = attempt(use)
            if tried.segments.stop == len(costs):
                best, high = tried.segments, tried.segments.highest_use(costs)
                break
            low = high if tried.next_use is None else max(low, tried.next_use)
            if low >= high:
                break
    return high, best


def lower_bound(costs: SegmentCosts, rooms: Sequence[Room]) -> Fraction:
    """A use that no placement in `rooms` stays below: from pinned blocks, and from the total."""
    pinned = max((room.use_of(room.held_bytes) for room in rooms), default=Fraction(0))
    total = sum(room.held_resident_bytes for room in rooms) + costs.resident(0, len(costs))
    if not rooms or any(room.scale is None for room in rooms):
        return pinned
    scale = sum(room.scale or 0 for room in rooms)
    return max(pinned, Fraction(total, scale)) if scale else pinned


def _between(low: Fraction, high: Fraction) -> Fraction:
    """A use about halfway, with a small denominator where there is one."""
    middle = (low + high) / 2
    rounded = Fraction(int(middle * _FINENESS), _FINENESS)
    return rounded if low < rounded < high else middle


def balanced(costs: SegmentCosts, rooms: Sequence[Room]) -> Segments | None:
    """Segments in the order of `rooms` with the smallest highest use, evened out; None where they don't fit."""
    found = least_use(costs, rooms, lambda use: fill(costs, rooms, use))
    return None if found is None else evened(costs, rooms, found[0])


def evened(costs: SegmentCosts, rooms: Sequence[Room], use: Fraction) -> Segments:
    """Segments in the order of `rooms`, none above `use`, each as near as can be to an even share of what is left.

    `use` must be feasible. No room stays empty that could take a block; of more rooms than blocks, the last ones do.
    """
    first = rooms[: len(costs)]
    if len(first) < len(rooms) and fill(costs, first, use).segments.stop == len(costs):
        used = evened(costs, first, use)
        return Segments(tuple(rooms), (*used.cuts, *[used.stop] * (len(rooms) - len(first))))
    num_blocks, earliest = len(costs), _earliest_cuts(costs, rooms, use)
    cuts = [0]
    for index, room in enumerate(rooms):
        start = cuts[-1]
        lowest = max(start, earliest[index + 1])
        highest = costs.reach(room, start, room.cap(use))
        after = sum(1 for other in rooms[index + 1 :] if not other.is_held)
        most = max(lowest, min(highest, num_blocks - after))
        least = min(most, max(lowest, start if room.is_held else start + 1))
        cut = _nearest_cut(costs, room, start, _even_share(costs, rooms[index:], start))
        cuts.append(min(most, max(least, cut)))
    return Segments(tuple(rooms), tuple(_smoothed(costs, rooms, cuts)))


def _smoothed(costs: SegmentCosts, rooms: Sequence[Room], cuts: Sequence[int]) -> list[int]:
    """Cuts moved, one at a time, to where the fuller one of its two rooms is as empty as can be."""
    smoothed = list(cuts)
    for _ in range(_MAX_SWEEPS):
        before = list(smoothed)
        for index in range(1, len(rooms)):
            start, cut, stop = smoothed[index - 1 : index + 2]
            smoothed[index] = _fairest_cut(costs, rooms[index - 1], rooms[index], (start, cut, stop))
        if smoothed == before:
            break
    return smoothed


def _fairest_cut(costs: SegmentCosts, left: Room, right: Room, cuts: tuple[int, int, int]) -> int:
    """Where to cut [start, stop) between two rooms so that the higher use is least; the old cut if none is better."""
    start, cut, stop = cuts
    if not left.scale or not right.scale:
        return cut
    left_scale, right_scale = left.scale, right.scale

    def uses(at: int) -> tuple[int, int]:
        return costs.on(left, start, at) * right_scale, costs.on(right, at, stop) * left_scale

    def is_left_fuller(at: int) -> bool:
        on_left, on_right = uses(at)
        return on_left >= on_right

    crossing = bisect_left(range(start, stop), True, key=is_left_fuller) + start
    nearby = [at for at in (crossing - 1, crossing) if start < at < stop]
    fitting = [
        at
        for at in nearby
        if costs.on(left, start, at) <= left.budget_bytes and costs.on(right, at, stop) <= right.budget_bytes
    ]
    return min([cut, *fitting], key=lambda at: max(uses(at)))


def _earliest_cuts(costs: SegmentCosts, rooms: Sequence[Room], use: Fraction) -> list[int]:
    """For each room the first block after which the later rooms can take all the rest; the last is the end."""
    backwards = costs.backwards()
    cuts = fill(backwards, rooms[::-1], use).segments.cuts
    return [len(costs) - cut for cut in reversed(cuts)]


def _even_share(costs: SegmentCosts, rooms: Sequence[Room], start: int) -> int:
    """Bytes for the first of `rooms` if blocks from `start` on could be spread evenly over all of them."""
    first = rooms[0]
    if not first.scale:
        return first.budget_bytes
    transient = costs.transient(start, len(costs))
    fixed = sum(
        room.held_resident_bytes + room.overhead_bytes + max(transient, room.held_transient_bytes)
        for room in rooms
        if room.scale
    )
    total = costs.resident(start, len(costs)) + fixed
    return total * first.scale // sum(room.scale or 0 for room in rooms)


def _nearest_cut(costs: SegmentCosts, room: Room, start: int, share: int) -> int:
    """The cut at which `room` takes nearly `share` bytes."""
    below = costs.reach(room, start, share)
    if below == len(costs):
        return below
    is_nearer = costs.on(room, start, below + 1) - share < share - costs.on(room, start, below)
    return below + 1 if is_nearer else below
