"""Orders of unequal devices: which order takes the blocks furthest, found by dynamic programming.

Rooms of one kind can stand in for each other, so what matters is how many of each kind are used up. For each
such count, the furthest that any order goes is known from the counts with one room less: further is never
worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import prod

from devmap_cli.planning.costs import Room, SegmentCosts
from devmap_cli.planning.partition import Attempt, Segments, fill

MAX_STATES = 1 << 14
MAX_SEARCHED_STATES = 1 << 10


class Orders:
    """All orders of some rooms, for one sequence of blocks.

    Where there are too many kinds of rooms to try all orders (more than `MAX_STATES` counts), only the given,
    the falling and the rising order are tried, and `is_exact` is False.
    """

    def __init__(self, costs: SegmentCosts, rooms: Sequence[Room]) -> None:
        self.costs = costs
        self.rooms = tuple(rooms)
        self.kinds: dict[tuple[object, ...], list[Room]] = {}
        for room in rooms:
            self.kinds.setdefault(room.kind, []).append(room)
        self.num_states = prod(len(members) + 1 for members in self.kinds.values())
        self.is_exact = self.num_states <= MAX_STATES

    def furthest(self, use: Fraction | None = None) -> Attempt:
        """The furthest that blocks go in any order at `use`; the given order where none goes further."""
        given = fill(self.costs, self.rooms, use)
        if len(self.kinds) <= 1 or given.segments.stop == len(self.costs):
            return given
        other = _Table(self, use).attempt() if self.is_exact else self._sorted(use)
        return other if other.segments.stop > given.segments.stop else Attempt(given.segments, other.next_use)

    def fewest(self) -> Segments | None:
        """Segments on as few rooms as can hold all blocks, pinned rooms not counted; None where none can.

        The other rooms come last, with empty segments.
        """
        return _Table(self, None).fewest() if self.is_exact else None

    def _sorted(self, use: Fraction | None) -> Attempt:
        tries = []
        for falling in (True, False):
            rooms = sorted(self.rooms, key=lambda room: room.budget_bytes, reverse=falling)
            tries.append(fill(self.costs, rooms, use))
        return max(tries, key=lambda attempt: attempt.segments.stop)


class _Table:
    """The furthest stop for each count of used rooms by kind; a count is a number in mixed radix."""

    def __init__(self, orders: Orders, use: Fraction | None) -> None:
        self.orders = orders
        self.members = list(orders.kinds.values())
        self.strides = [prod(len(kind) + 1 for kind in self.members[:index]) for index in range(len(self.members))]
        self.stops = [0] * orders.num_states
        self.last = [0] * orders.num_states
        self.next_use: Fraction | None = None
        self._fill_in(use)

    def _fill_in(self, use: Fraction | None) -> None:
        costs = self.orders.costs
        firsts = [(kind[0], kind[0].cap(use)) for kind in self.members]
        uses = []
        for state in range(1, self.orders.num_states):
            best = -1
            for index, (room, cap) in enumerate(firsts):
                if not self._count(state, index):
                    continue
                start = self.stops[state - self.strides[index]]
                stop = costs.reach(room, start, cap)
                if use is not None and stop < len(costs):
                    num_bytes = costs.on(room, start, stop + 1)
                    if room.scale and num_bytes <= room.budget_bytes:
                        uses.append(Fraction(num_bytes, room.scale))
                if stop > best:
                    best, self.last[state] = stop, index
            self.stops[state] = best
        self.next_use = min(uses, default=None)

    def _count(self, state: int, index: int) -> int:
        """How many rooms of a kind are used up in a state."""
        return state // self.strides[index] % (len(self.members[index]) + 1)

    def attempt(self) -> Attempt:
        """The furthest with all rooms used."""
        return Attempt(self._segments(self.orders.num_states - 1), self.next_use)

    def fewest(self) -> Segments | None:
        """Segments of the state with the fewest rooms that places all blocks."""
        num_blocks = len(self.orders.costs)
        full = [state for state, stop in enumerate(self.stops) if stop == num_blocks and self._has_all_held(state)]
        return self._segments(min(full, key=self._num_rooms)) if full else None

    def _num_rooms(self, state: int) -> int:
        return sum(self._count(state, index) for index in range(len(self.members)))

    def _has_all_held(self, state: int) -> bool:
        return all(self._count(state, index) == len(kind) for index, kind in enumerate(self.members) if kind[0].is_held)

    def _segments(self, state: int) -> Segments:
        """The way to a state, with the given order inside each kind; rooms not in it come last and stay empty."""
        steps: list[int] = []
        stops = [self.stops[state]]
        while state:
            index = self.last[state]
            steps.append(index)
            state -= self.strides[index]
            stops.append(self.stops[state])
        waiting = [iter(kind) for kind in self.members]
        rooms = [next(waiting[index]) for index in reversed(steps)]
        rest = [room for room in self.orders.rooms if room not in set(rooms)]
        cuts = [*reversed(stops), *[stops[0]] * len(rest)]
        return Segments((*rooms, *rest), tuple(cuts))


def num_used(segments: Segments) -> int:
    """How many rooms hold a block."""
    return sum(
        1
        for room, (start, stop) in zip(segments.rooms, pairwise(segments.cuts), strict=True)
        if stop > start or room.is_held
    )
