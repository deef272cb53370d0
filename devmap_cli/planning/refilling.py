"""Placements found by filling devices as replays tell, for where sums find none or offload more than need be."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice, permutations, takewhile

from devmap_cli.devices.device import Device, main_device
from devmap_cli.planning.auto import offloaded
from devmap_cli.planning.costs import Room
from devmap_cli.planning.nouns import Placement
from devmap_cli.planning.partition import Segments, fill
from devmap_cli.planning.parts import SMALL_BYTES, Cuts, Parts, Peaks, Seen, largest_size
from devmap_cli.planning.task import Run, Task, runs_around

_MAX_ORDERS, _MAX_PERMUTATIONS = 24, 1 << 10
_REASON = "next in order, each device as far as its budget goes"

Window = tuple[int, int]
"""Free blocks [start, stop) that are offloaded."""


class Limited:
    """Peaks of which only so many are told; all others are too much."""

    def __init__(self, peaks: Peaks, num_looks: int) -> None:
        self._peaks = peaks
        self._num_left = num_looks

    @property
    def is_used_up(self) -> bool:
        """Whether no more are told."""
        return self._num_left < 0

    def beside_bytes(self, device: Device, budget_bytes: int) -> int:
        """What a device takes whatever it holds."""
        return self._peaks.beside_bytes(device, budget_bytes)

    def peak_bytes(
        self, device: Device, budget_bytes: int, blocks: Sequence[int], *, is_main: bool, away: Sequence[int] = ()
    ) -> int | None:
        """The peak of a device that holds these blocks; None where they are too much."""
        self._num_left -= 1
        if self.is_used_up:
            return None
        return self._peaks.peak_bytes(device, budget_bytes, blocks, is_main=is_main, away=away)


def on_accelerators(task: Task, peaks: Limited) -> Iterator[list[Run]]:
    """All blocks on accelerators, one after the other: in the given order, then in others."""
    seen = Seen(task.blocks)
    for order in _orders(task, task.accelerators):
        if peaks.is_used_up:
            return
        parts = Parts(task, peaks, main_device(room.device for room in order), seen=seen)
        cuts = parts.filled(order) if parts.may_hold(order) else None
        if cuts is None and _are_small(order):
            cuts = parts.reached(order)
        if cuts is not None:
            yield _around(order, cuts, 0, 0)


def _orders(task: Task, rooms: Sequence[Room]) -> list[tuple[Room, ...]]:
    """A few orders of accelerators, those first that hold most by sums; it matters where the main one is."""
    main = main_device(room.device for room in rooms)
    kinds: dict[tuple[object, ...], tuple[Room, ...]] = {}
    for order in islice(permutations(rooms), _MAX_PERMUTATIONS):
        kinds.setdefault(tuple((room.kind, room.device == main) for room in order), order)
    return sorted(kinds.values(), key=lambda order: -fill(task.costs, order).segments.stop)[:_MAX_ORDERS]


def offloading(task: Task, peaks: Limited, answer: Placement | None, *, in_order: bool) -> Iterator[list[Run]]:
    """One run of blocks on cpu and disk, each time a smaller one, the others on the accelerators, one after the other.

    All are smaller than what an answer offloads that is known already, and are looked for beside that first. With
    `in_order` what is offloaded are the last ones, and accelerators are filled in the given order; else it begins or
    ends where an accelerator does, too, and these are in other orders, or without those before the largest, or that
    alone: what is offloaded computes on the first that is used.
    """
    if not task.accelerators or not task.tiers:
        return
    seen = Seen(task.blocks)
    below = task.costs.weights(0, len(task.costs)) if answer is None else answer.offloaded_bytes
    for search, windows in _searches(task, peaks, seen, answer, in_order=in_order):
        if peaks.is_used_up:
            return
        if (window := search.smallest(windows, below)) is not None:
            below = task.costs.weights(*window)
            yield search.runs(window)


def _searches(
    task: Task, peaks: Limited, seen: Seen, answer: Placement | None, *, in_order: bool
) -> Iterator[tuple[_Search, Iterator[Window]]]:
    """What is looked through, in this order."""
    if in_order:
        search = _Search(task, peaks, task.accelerators, seen)
        yield search, search.ending(len(task.costs))
        return
    if answer is not None:
        places = [answer.devices[index] for index in task.free]
        away = [index for index, place in enumerate(places) if not place.is_accelerator]
        rank = {place: number for number, place in enumerate(dict.fromkeys(places))}
        own = sorted(task.accelerators, key=lambda room: rank.get(room.device, len(rank)))
        search = _Search(task, peaks, own, seen)
        for index in away[:1]:
            yield search, search.beginning(index)
            yield search, search.ending(away[-1] + 1)
    largest = max(task.accelerators, key=lambda room: room.budget_bytes - room.overhead_bytes)
    behind = [room for room in task.accelerators if main_device([largest.device, room.device]) == largest.device]
    others = [] if len(behind) == len(task.accelerators) else _orders(task, behind)
    for order in [*_orders(task, task.accelerators), *others, (largest,)]:
        search = _Search(task, peaks, order, seen)
        yield search, search.ending(len(task.costs))
        yield from ((search, windows) for windows in search.others())


class _Search:
    """Looks for the smallest run of blocks to offload, with accelerators in one order."""

    def __init__(self, task: Task, peaks: Limited, order: Sequence[Room], seen: Seen) -> None:
        self._task = task
        self._peaks = peaks
        self._order = order
        self._main = main_device(room.device for room in order)
        self._seen = seen

    def others(self) -> Iterator[Iterator[Window]]:
        """Ever larger windows from where accelerators end if they are filled by sums, and likewise from the back."""
        costs, order = self._task.costs, self._order
        size = len(costs)
        front = fill(costs, order).segments.cuts
        back = [size - cut for cut in fill(costs.backwards(), order[::-1]).segments.cuts]
        for start in sorted({0, 1, *front} - {size}):
            yield self.beginning(start)
        for stop in sorted({size - 1, *back} - {0, size}, reverse=True):
            yield self.ending(stop)

    def beginning(self, start: int) -> Iterator[Window]:
        """Ever larger windows from `start` on."""
        return ((start, stop) for stop in range(start + 1, len(self._task.costs) + (start > 0)))

    def ending(self, stop: int) -> Iterator[Window]:
        """Ever larger windows up to `stop`."""
        return ((start, stop) for start in range(stop - 1, -1 + (stop == len(self._task.costs)), -1))

    def smallest(self, growing: Iterator[Window], below: int) -> Window | None:
        """The smallest of growing windows for which all fits, of less than `below` bytes; None where none does.

        A larger one makes others fit, until the main device computes too much.
        """
        windows = list(takewhile(lambda window: self._is_stored(window, below), growing))[::-1]
        most = bisect_left(windows, 1, key=lambda window: not self._may_do(window))
        if _are_small(self._order):
            return next(filter(self._does, reversed(windows[:most])), None)
        guess = bisect_left(windows[:most], 1, key=lambda window: not self._does_by_sums(window))
        # a sum may be above what a run takes: where no window does by sums, it is the smallest ones that may
        size = largest_size(lambda size: self._does(windows[size - 1]), guess or most, most)
        return windows[size - 1] if size else None

    def runs(self, window: Window) -> list[Run]:
        """The runs around a window that was found, and its own."""
        cuts, away = self._cuts(window), offloaded(self._task, *window)
        assert cuts is not None, "a window was chosen that doesn't make the rest fit"
        assert away is not None, "a window was chosen that is not stored anywhere"
        return [*_around(self._order, cuts, *window), *away]

    def _is_stored(self, window: Window, below: int) -> bool:
        """Whether cpu and disk hold a window's blocks, and these are of less than `below` bytes."""
        return self._task.costs.weights(*window) < below and offloaded(self._task, *window) is not None

    def _may_do(self, window: Window) -> bool:
        """Whether the others might fit by what weights and KV cache alone take."""
        return self._parts(window).may_hold(self._task.computing(self._order, *window))

    def _does_by_sums(self, window: Window) -> bool:
        rooms = self._task.computing(self._order, *window)
        costs = self._parts(window).costs
        return fill(costs, rooms).segments.stop == len(costs)

    def _does(self, window: Window) -> bool:
        """Whether the others do fit."""
        return self._cuts(window) is not None

    def _cuts(self, window: Window) -> Cuts | None:
        return self._parts(window).filled(self._task.computing(self._order, *window))

    def _parts(self, window: Window) -> Parts:
        return Parts(self._task, self._peaks, self._main, window=window, seen=self._seen)


def _are_small(rooms: Sequence[Room]) -> bool:
    """Whether devices are so small that fewer blocks may take more."""
    return all(room.budget_bytes < SMALL_BYTES for room in rooms)


def _around(order: Sequence[Room], cuts: Cuts, start: int, stop: int) -> list[Run]:
    return runs_around(Segments(tuple(order), tuple(cuts)), start, stop, _REASON)
