"""What a run of blocks costs on a device."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from devmap_cli.devices.device import Device


@dataclass(frozen=True, slots=True)
class Room:
    """One device as the partitioner sees it.

    Args:
        device: whose room it is.
        budget_bytes: the hard limit of what it may take.
        scale: what its peak is divided by to get its use: weight times budget, in a unit common to all rooms;
            None where its use doesn't count.
        overhead_bytes: what it takes beside blocks, once it holds any.
        held_resident_bytes: weights and KV cache of the blocks pinned to it.
        held_transient_bytes: the largest transient of the blocks pinned to it.
        is_held: whether any block is pinned to it.
    """

    device: Device
    budget_bytes: int
    scale: int | None
    overhead_bytes: int = 0
    held_resident_bytes: int = 0
    held_transient_bytes: int = 0
    is_held: bool = False

    @property
    def held_bytes(self) -> int:
        """What it takes for its pinned blocks alone."""
        if not self.is_held:
            return 0
        return self.held_resident_bytes + self.held_transient_bytes + self.overhead_bytes

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for rooms that can stand in for each other."""
        held = (self.held_resident_bytes, self.held_transient_bytes, self.is_held)
        return (self.budget_bytes, self.scale, self.overhead_bytes, *held)

    def cap(self, use: Fraction | None) -> int:
        """The most bytes at a use of at most `use`; None for no limit but the budget."""
        if use is None or self.scale is None:
            return self.budget_bytes
        return min(self.budget_bytes, use.numerator * self.scale // use.denominator)

    def use_of(self, num_bytes: int) -> Fraction:
        """The use that `num_bytes` make; 0 where it doesn't count."""
        return Fraction(num_bytes, self.scale) if self.scale and num_bytes else Fraction(0)


class SegmentCosts:
    """Costs of all segments of a sequence of blocks: resident bytes add up, of transients the largest counts.

    Segments are [start, stop). A cost takes O(1), the furthest affordable stop O(log n).
    """

    def __init__(self, resident_bytes: Sequence[int], transient_bytes: Sequence[int]) -> None:
        self.resident_bytes = tuple(resident_bytes)
        self.transient_bytes = tuple(transient_bytes)
        self._prefix = [0, *accumulate(self.resident_bytes)]
        self._is_uniform = len(set(self.transient_bytes)) <= 1
        self._maxima = [] if self._is_uniform else _sparse_table(self.transient_bytes)
        self._smallest_transient = min(self.transient_bytes, default=0)

    def __len__(self) -> int:
        return len(self.resident_bytes)

    def backwards(self) -> SegmentCosts:
        """The same blocks, last first."""
        return SegmentCosts(self.resident_bytes[::-1], self.transient_bytes[::-1])

    def without(self, start: int, stop: int) -> SegmentCosts:
        """The blocks before `start` and from `stop` on."""
        return SegmentCosts(
            self.resident_bytes[:start] + self.resident_bytes[stop:],
            self.transient_bytes[:start] + self.transient_bytes[stop:],
        )

    def resident(self, start: int, stop: int) -> int:
        """Resident bytes of a segment."""
        return self._prefix[stop] - self._prefix[start]

    def transient(self, start: int, stop: int) -> int:
        """The largest transient of a segment; 0 for an empty one."""
        if start >= stop:
            return 0
        if self._is_uniform:
            return self._smallest_transient
        level = (stop - start).bit_length() - 1
        row = self._maxima[level]
        return max(row[start], row[stop - (1 << level)])

    def on(self, room: Room, start: int, stop: int) -> int:
        """What `room` takes with a segment beside the blocks pinned to it."""
        if start >= stop:
            return room.held_bytes
        transient = max(room.held_transient_bytes, self.transient(start, stop))
        return room.overhead_bytes + room.held_resident_bytes + self.resident(start, stop) + transient

    def reach(self, room: Room, start: int, cap: int) -> int:
        """The furthest stop at which `room` takes at most `cap` bytes; `start` where no block fits."""
        left = cap - room.overhead_bytes - room.held_resident_bytes + self._prefix[start]
        high = self._furthest(start, left - max(room.held_transient_bytes, self._smallest_transient))
        if self._is_uniform or high == start:
            return high
        low = self._furthest(start, left - max(room.held_transient_bytes, self.transient(start, high)))
        while low < high:
            middle = (low + high + 1) // 2
            transient = max(room.held_transient_bytes, self.transient(start, middle))
            if self._prefix[middle] + transient <= left:
                low = middle
            else:
                high = middle - 1
        return low

    def _furthest(self, start: int, prefix: int) -> int:
        """The furthest stop whose prefix sum is at most `prefix`, not before `start`."""
        return max(start, bisect_right(self._prefix, prefix, start) - 1)


def _sparse_table(values: Sequence[int]) -> list[list[int]]:
    """Maxima of all windows whose length is a power of two; row k holds those of length 2**k."""
    rows = [list(values)]
    width = 1
    while 2 * width <= len(values):
        row = rows[-1]
        rows.append([max(pair) for pair in zip(row, row[width:], strict=False)])
        width *= 2
    return rows
