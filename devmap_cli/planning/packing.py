"""Placements that are not contiguous: the last thing tried before anything is offloaded or refused.

Blocks of equal cost are interchangeable, so that the search only decides how many of each kind a room takes. It goes
room by room, remembers what led nowhere, and gives up a branch as soon as the later rooms can't hold what is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from devmap_cli.planning.costs import Room, SegmentCosts
from devmap_cli.planning.task import Run

MAX_STEPS = 4_000
_MAX_ROOMS = 128
_MAX_KINDS = 32

Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Blocks that cost the same."""

    resident_bytes: int
    transient_bytes: int
    weights_bytes: int
    conversion_bytes: int

    def beside(self, room: Room) -> int:
        """What one of them takes for a while."""
        return self.conversion_bytes if room.is_store else self.transient_bytes

    def on(self, room: Room) -> int:
        """What one of them takes of a room all the time."""
        return self.weights_bytes if room.is_store else self.resident_bytes


class _Search:
    """Depth-first search over how many blocks of each kind each room takes; large kinds and full rooms first."""

    def __init__(self, kinds: Sequence[_Kind], rooms: Sequence[Room], max_steps: int) -> None:
        self.kinds = kinds
        self.rooms = rooms
        by_weights = any(room.is_store for room in rooms)
        self.least_bytes = [kind.weights_bytes if by_weights else kind.resident_bytes for kind in kinds]
        spaces = [max(0, self._left(room, min(kind.beside(room) for kind in kinds))) for room in rooms]
        self.space_from = [*reversed([*accumulate(reversed(spaces))]), 0]
        self.failed: set[tuple[int, Counts]] = set()
        self.steps_left = max_steps

    @staticmethod
    def _left(room: Room, transient: int) -> int:
        """What a room can still hold beside a transient."""
        left = room.budget_bytes - room.held_resident_bytes - room.overhead_bytes
        return left - max(room.held_transient_bytes, transient)

    def place(self, room: int, waiting: Counts) -> list[Counts] | None:
        """What this and each later room take of the blocks waiting; None where some are left over."""
        if not any(waiting):
            return [waiting] * (len(self.rooms) - room)
        if room == len(self.rooms) or (room, waiting) in self.failed:
            return None
        for taken in self._fills(self.rooms[room], waiting):
            self.steps_left -= 1
            if self.steps_left < 0:
                return None
            rest = tuple(count - less for count, less in zip(waiting, taken, strict=True))
            if self._least(rest) <= self.space_from[room + 1]:
                later = self.place(room + 1, rest)
                if later is not None:
                    return [taken, *later]
        self.failed.add((room, waiting))
        return None

    def _least(self, counts: Counts) -> int:
        """What so many blocks of each kind take at least, wherever they go."""
        return sum(count * size for count, size in zip(counts, self.least_bytes, strict=True))

    def _fills(self, room: Room, waiting: Counts, transient: int = 0, taken_bytes: int = 0) -> Iterator[Counts]:
        """What a room can take of the kinds waiting: for each choice of the larger ones, the most of the last."""
        if not waiting:
            yield ()
            return
        kind = self.kinds[len(self.kinds) - len(waiting)]
        higher = max(transient, kind.beside(room))
        left = self._left(room, higher) - taken_bytes
        most, each = 0 if left < 0 else waiting[0], kind.on(room)
        if most and each:
            most = min(most, left // each)
        least = most if len(waiting) == 1 else 0
        for count in range(most, least - 1, -1):
            rest = taken_bytes + count * each
            for counts in self._fills(room, waiting[1:], higher if count else transient, rest):
                yield (count, *counts)


def packed(costs: SegmentCosts, rooms: Sequence[Room], reason: str, max_steps: int = MAX_STEPS) -> list[Run] | None:
    """Blocks in any rooms, with few hops; None where the search finds nothing within `max_steps` steps."""
    block_kinds = [_Kind(*cost) for cost in costs.lone()]
    totals = sorted(Counter(block_kinds).items(), key=lambda item: _size(item[0]), reverse=True)
    if not 0 < len(totals) <= _MAX_KINDS or len(rooms) > _MAX_ROOMS:
        return None
    kinds = [kind for kind, _ in totals]
    shares = _Search(kinds, rooms, max_steps).place(0, tuple(count for _, count in totals))
    if shares is None:
        return None
    left = {kind: [share[index] for share in shares] for index, kind in enumerate(kinds)}
    return list(_in_order(block_kinds, rooms, left, reason))


def _size(kind: _Kind) -> tuple[int, int]:
    return kind.resident_bytes, kind.transient_bytes


def _in_order(
    block_kinds: Sequence[_Kind], rooms: Sequence[Room], left: dict[_Kind, list[int]], reason: str
) -> Iterator[Run]:
    """Hand out blocks in order, staying with a room as long as it takes blocks of the kind."""
    start, current = 0, -1
    for index, kind in enumerate(block_kinds):
        if current >= 0 and not left[kind][current]:
            yield Run(rooms[current].device, start, index, reason)
            start, current = index, -1
        if current < 0:
            lengths = [_num_next(block_kinds, index, left, room) for room in range(len(rooms))]
            current = lengths.index(max(lengths))
        left[kind][current] -= 1
    yield Run(rooms[current].device, start, len(block_kinds), reason)


def _num_next(block_kinds: Sequence[_Kind], index: int, left: dict[_Kind, list[int]], room: int) -> int:
    """How many blocks from `index` on a room can take before it is another's turn."""
    taken: Counter[_Kind] = Counter()
    for position in range(index, len(block_kinds)):
        kind = block_kinds[position]
        taken[kind] += 1
        if taken[kind] > left[kind][room]:
            return position - index
    return len(block_kinds) - index
