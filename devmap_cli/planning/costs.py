"""What a run of blocks costs on a device."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from devmap_cli.devices.device import Device
from devmap_cli.planning.nouns import Block


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
        is_store: that its blocks compute elsewhere, so that they take no more here than loading them does.
    """

    device: Device
    budget_bytes: int
    scale: int | None
    overhead_bytes: int = 0
    held_resident_bytes: int = 0
    held_transient_bytes: int = 0
    is_held: bool = False
    is_store: bool = False

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


class _EarlyPhase:
    """A phase before the end of a run, in which less is resident, so that larger transients have room.

    What is there from its start adds up over a segment, what comes with each block adds up to the block that runs.
    """

    def __init__(self, always: Sequence[int], growing: Sequence[int], transient: Sequence[int]) -> None:
        self._always = [0, *accumulate(always)]
        self._grown = [0, *accumulate(growing)]
        moments = [grown + extra for grown, extra in zip(self._grown[1:], transient, strict=True)]
        self._maxima = _sparse_table(moments)

    def peak(self, *segments: tuple[int, int]) -> int:
        """The most that segments, one after the other on one device, take in this phase; none is empty."""
        always = grown = highest = 0
        for start, stop in segments:
            level = (stop - start).bit_length() - 1
            row = self._maxima[level]
            highest = max(highest, grown + max(row[start], row[stop - (1 << level)]) - self._grown[start])
            grown += self._grown[stop] - self._grown[start]
            always += self._always[stop] - self._always[start]
        return always + highest


class SegmentCosts:
    """Costs of all segments of a sequence of blocks: resident bytes add up, of transients the largest counts.

    Segments are [start, stop). A cost takes O(1), the furthest affordable stop O(log n). With `blocks`, the phases
    before the last count too: there less is resident, and more may be transient.
    """

    def __init__(
        self,
        resident_bytes: Sequence[int],
        transient_bytes: Sequence[int],
        blocks: Sequence[Block] = (),
        weights_bytes: Sequence[int] | None = None,
        load_transient_bytes: Sequence[int] = (),
    ) -> None:
        self.resident_bytes = tuple(resident_bytes)
        self.weights_bytes = self.resident_bytes if weights_bytes is None else tuple(weights_bytes)
        self.transient_bytes = tuple(transient_bytes)
        self._prefix = [0, *accumulate(self.resident_bytes)]
        self._weights = [0, *accumulate(self.weights_bytes)]
        self._conversions = tuple(load_transient_bytes)
        self._is_uniform = len(set(self.transient_bytes)) <= 1
        self._maxima = [] if self._is_uniform else _sparse_table(self.transient_bytes)
        self._smallest_transient = min(self.transient_bytes, default=0)
        self._blocks = tuple(blocks)
        self._is_backwards = False
        self._early = _early_phases(self._blocks)

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> SegmentCosts:
        """The costs of `blocks`, in execution order."""
        return cls(
            [block.resident_bytes for block in blocks],
            [block.transient_bytes for block in blocks],
            blocks,
            [block.weights_bytes for block in blocks],
            [block.load_transient_bytes for block in blocks] if any(map(_load_transient, blocks)) else (),
        )

    def __len__(self) -> int:
        return len(self.resident_bytes)

    def backwards(self) -> SegmentCosts:
        """The same blocks, last first."""
        costs = SegmentCosts(
            self.resident_bytes[::-1],
            self.transient_bytes[::-1],
            weights_bytes=self.weights_bytes[::-1],
            load_transient_bytes=self._conversions[::-1],
        )
        costs._blocks, costs._early, costs._is_backwards = self._blocks, self._early, not self._is_backwards
        return costs

    def without(self, start: int, stop: int) -> SegmentCosts:
        """The blocks before `start` and from `stop` on."""
        return SegmentCosts(
            self.resident_bytes[:start] + self.resident_bytes[stop:],
            self.transient_bytes[:start] + self.transient_bytes[stop:],
            self._blocks[:start] + self._blocks[stop:],
            self.weights_bytes[:start] + self.weights_bytes[stop:],
            self._conversions[:start] + self._conversions[stop:],
        )

    def lone(self) -> Iterator[tuple[int, int, int, int]]:
        """For each block its resident bytes, a transient that is enough in any company, and the same where it lies."""
        largest = [block.largest_transient_bytes for block in self._blocks] or self.transient_bytes
        transient = reversed(largest) if self._is_backwards else largest
        conversions = self._conversions or [0] * len(self)
        return zip(self.resident_bytes, transient, self.weights_bytes, conversions, strict=True)

    def weights(self, start: int, stop: int) -> int:
        """Bytes of the weights of a segment."""
        return self._weights[stop] - self._weights[start]

    def _conversion(self, segment: tuple[int, int]) -> int:
        """The most that loading one of a segment's blocks takes beside weights."""
        return max(self._conversions[slice(*segment)], default=0)

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
        return self.on_around(room, (start, stop))

    def on_around(self, room: Room, *segments: tuple[int, int]) -> int:
        """What `room` takes with several segments, in order, beside the blocks pinned to it."""
        segments = tuple((start, stop) for start, stop in segments if start < stop)
        if room.is_store:
            weights = sum(self.weights(start, stop) for start, stop in segments)
            return (
                room.held_resident_bytes + weights + max([room.held_transient_bytes, *map(self._conversion, segments)])
            )
        if not segments:
            return room.held_bytes
        peak, transient = 0, room.held_transient_bytes
        for start, stop in segments:
            peak += self._prefix[stop] - self._prefix[start]
            transient = max(transient, self.transient(start, stop))
        peak += transient
        if self._early:
            size = len(self)
            ordered = [(size - stop, size - start) for start, stop in segments[::-1]]
            early = ordered if self._is_backwards else segments
            peak = max(peak, *(phase.peak(*early) for phase in self._early))
        return room.overhead_bytes + room.held_resident_bytes + peak

    def reach(self, room: Room, start: int, cap: int) -> int:
        """The furthest stop at which `room` takes at most `cap` bytes; `start` where no block fits."""
        if room.is_store:
            left = cap - room.held_resident_bytes - room.held_transient_bytes + self._weights[start]
            stop = self._furthest(self._weights, start, left)
            while stop > start and self.on(room, start, stop) > cap:
                stop -= 1
            return stop
        stop = self._reach_at_the_end(room, start, cap)
        if not self._early or stop == start or self.on(room, start, stop) <= cap:
            return stop
        stops = range(start + 1, stop)
        return start + bisect_right(stops, cap, key=lambda stop: self.on(room, start, stop))

    def _reach_at_the_end(self, room: Room, start: int, cap: int) -> int:
        """The same, by what is there at the end of a run alone."""
        left = cap - room.overhead_bytes - room.held_resident_bytes + self._prefix[start]
        high = self._furthest(self._prefix, start, left - max(room.held_transient_bytes, self._smallest_transient))
        if self._is_uniform or high == start:
            return high
        low = self._furthest(self._prefix, start, left - max(room.held_transient_bytes, self.transient(start, high)))
        while low < high:
            middle = (low + high + 1) // 2
            transient = max(room.held_transient_bytes, self.transient(start, middle))
            if self._prefix[middle] + transient <= left:
                low = middle
            else:
                high = middle - 1
        return low

    @staticmethod
    def _furthest(sums: Sequence[int], start: int, most: int) -> int:
        """The furthest stop whose prefix sum is at most `most`, not before `start`."""
        return max(start, bisect_right(sums, most, start) - 1)


def _load_transient(block: Block) -> int:
    return block.load_transient_bytes


def _sparse_table(values: Sequence[int]) -> list[list[int]]:
    """Maxima of all windows whose length is a power of two; row k holds those of length 2**k."""
    rows = [list(values)]
    width = 1
    while 2 * width <= len(values):
        row = rows[-1]
        rows.append([max(pair) for pair in zip(row, row[width:], strict=False)])
        width *= 2
    return rows


def _early_phases(blocks: Sequence[Block]) -> tuple[_EarlyPhase, ...]:
    """Loading and prefill, as far as they can take more than the end does."""
    weights = [block.weights_bytes for block in blocks]
    phases = []
    if any(block.load_transient_bytes > block.kv_cache_bytes + block.transient_bytes for block in blocks):
        phases.append(_EarlyPhase(weights, [0] * len(blocks), [block.load_transient_bytes for block in blocks]))
    if any(
        block.prompt_kv_cache_bytes + block.prompt_transient_bytes > block.kv_cache_bytes + block.transient_bytes
        for block in blocks
    ):
        growing = [block.prompt_kv_cache_bytes for block in blocks]
        phases.append(_EarlyPhase(weights, growing, [block.prompt_transient_bytes for block in blocks]))
    return tuple(phases)
