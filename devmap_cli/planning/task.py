"""One planning task as strategies see it: free blocks in order, rooms, and the runs they answer with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import lcm

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import Device, main_device
from devmap_cli.planning.costs import Room, SegmentCosts
from devmap_cli.planning.nouns import Block, Decision, Placement
from devmap_cli.planning.partition import Segments


@dataclass(frozen=True, slots=True)
class Run:
    """Free blocks [start, stop) that go to one device, and why."""

    device: Device
    start: int
    stop: int
    reason: str


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be placed where.

    `free` are the indices of blocks without a pin, `costs` are theirs. Pinned blocks are part of their rooms. With
    `keeps_spare` the first device should have room for one more block, where that costs nothing.
    """

    blocks: tuple[Block, ...]
    budgets: Budgets
    overhead_bytes: Mapping[Device, int]
    free: tuple[int, ...]
    costs: SegmentCosts
    accelerators: tuple[Room, ...]
    tiers: tuple[Room, ...]
    keeps_spare: bool = False

    @classmethod
    def of(
        cls,
        blocks: Sequence[Block],
        budgets: Budgets,
        overhead_bytes: Mapping[Device, int],
        gpu_weights: Mapping[Device, Fraction],
        *,
        keeps_spare: bool = False,
    ) -> Task:
        """The task of placing `blocks` within `budgets` (bytes)."""
        free = tuple(index for index, block in enumerate(blocks) if block.fixed is None)
        rooms = _rooms_of(blocks, budgets, overhead_bytes, gpu_weights)
        return cls(
            blocks=tuple(blocks),
            budgets=budgets,
            overhead_bytes=overhead_bytes,
            free=free,
            costs=SegmentCosts.of([blocks[index] for index in free]),
            accelerators=tuple(room for room in rooms if room.device.is_accelerator),
            tiers=tuple(room for room in rooms if not room.device.is_accelerator),
            keeps_spare=keeps_spare,
        )

    @property
    def rooms(self) -> tuple[Room, ...]:
        """Accelerators, then cpu and disk."""
        return (*self.accelerators, *self.tiers)

    def computing(self, rooms: Sequence[Room], start: int, stop: int) -> list[Room]:
        """Accelerators, the main one with what it computes for the free blocks [start, stop) that are offloaded.

        Each of these comes there while it runs.
        """
        main = main_device(room.device for room in rooms)
        blocks = [self.blocks[index] for index in self.free[start:stop]]
        kv_cache = sum(block.kv_cache_bytes for block in blocks)
        transient = max((block.largest_transient_bytes + block.streamed_bytes for block in blocks), default=0)
        return [
            room
            if room.device != main or not blocks
            else replace(
                room,
                held_resident_bytes=room.held_resident_bytes + kv_cache,
                held_transient_bytes=max(room.held_transient_bytes, transient),
                is_held=True,
            )
            for room in rooms
        ]

    def placement(self, strategy: str, runs: Sequence[Run]) -> Placement:
        """The placement that `runs` and the pins make."""
        chosen = {index: (block.fixed, "pinned") for index, block in enumerate(self.blocks) if block.fixed}
        for run in runs:
            chosen.update(dict.fromkeys(self.free[run.start : run.stop], (run.device, run.reason)))
        steps = [chosen[index] for index in range(len(self.blocks))]
        return Placement(
            strategy=strategy,
            blocks=self.blocks,
            devices=tuple(device for device, _ in steps),
            budgets=self.budgets,
            overhead_bytes=dict(self.overhead_bytes),
            decisions=tuple(self._decisions(steps)),
        )

    def _decisions(self, steps: Sequence[tuple[Device, str]]) -> Iterator[Decision]:
        resident: dict[Device, int] = {}
        transient: dict[Device, int] = {}
        for block, (device, reason) in zip(self.blocks, steps, strict=True):
            before = resident.get(device, 0) + transient.get(device, 0)
            is_stored = self.accelerators and not device.is_accelerator
            held = block.weights_bytes if is_stored else block.resident_bytes
            resident[device] = resident.get(device, self.overhead_bytes.get(device, 0)) + held
            beside = block.load_transient_bytes if is_stored else block.largest_transient_bytes
            transient[device] = max(transient.get(device, 0), beside)
            yield Decision(block.fqns[0], device, reason, held, before, resident[device] + transient[device])


def _rooms_of(
    blocks: Sequence[Block],
    budgets: Budgets,
    overhead_bytes: Mapping[Device, int],
    gpu_weights: Mapping[Device, Fraction],
) -> list[Room]:
    unit = lcm(*(weight.denominator for weight in gpu_weights.values()))
    pinned: dict[Device, list[Block]] = {}
    for block in blocks:
        if block.fixed is not None:
            pinned.setdefault(block.fixed, []).append(block)
    rooms = []
    has_accelerators = any(device.is_accelerator for device, _ in budgets)
    for device, budget_bytes in budgets:
        held = pinned.get(device, [])
        is_store = has_accelerators and not device.is_accelerator
        rooms.append(
            Room(
                device=device,
                budget_bytes=budget_bytes,
                scale=int(gpu_weights.get(device, Fraction(1)) * unit * budget_bytes),
                overhead_bytes=overhead_bytes.get(device, 0),
                held_resident_bytes=sum(block.weights_bytes if is_store else block.resident_bytes for block in held),
                held_transient_bytes=max(
                    (block.load_transient_bytes if is_store else block.largest_transient_bytes for block in held),
                    default=0,
                ),
                is_held=bool(held),
                is_store=is_store,
            )
        )
    return rooms


def runs_of(segments: Segments, reason: str) -> list[Run]:
    """The non-empty segments as runs, all for one reason."""
    spans = zip(segments.rooms, pairwise(segments.cuts), strict=True)
    return [Run(room.device, start, stop, reason) for room, (start, stop) in spans if stop > start]


def runs_around(segments: Segments, start: int, stop: int, reason: str) -> list[Run]:
    """The runs of segments that leave out the blocks [start, stop)."""
    width = stop - start
    runs = []
    for run in runs_of(segments, reason):
        if run.start < start:
            runs.append(Run(run.device, run.start, min(run.stop, start), reason))
        if run.stop > start:
            runs.append(Run(run.device, max(run.start, start) + width, run.stop + width, reason))
    return runs


def percent(use: Fraction) -> str:
    """A use for people: `71.3 %`."""
    return f"{float(use) * 100:.1f} %"
