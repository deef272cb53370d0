"""The allocations of one rehearsal with every block of a model on a device of its own.

Such a trace says what any other placement of the same blocks would allocate: each block's own allocations, where it
computes, and a copy of another block's tensor where that one computes elsewhere. `replay` plays it to the allocators
of a placement. Free of torch: the recorder is told of allocations, and knows them by number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import count
from operator import mul
from typing import Any, TypeVar

from devmap_cli.model.names import is_ancestor, parent

MAIN = -1
"""The outer place of the root, the only tower that has the embedding: the main device."""
MAX_DEVICES = 120
"""PyTorch counts devices in 8 bits, so that of more blocks several share a device."""


_Place = TypeVar("_Place")


class Event(IntEnum):
    """What happens in a trace, each with two numbers."""

    ALLOCATE = 0
    """By a block, so many bytes."""
    COPY = 1
    """The next allocation is a copy of the one with this number: none is made where both blocks are on one device."""
    MOVE = 9
    """The same of an input that `generate` brings to the first weight, here by its block.

    None is made where tokens are there already, or the first weight is offloaded: the input stays where it is.
    """
    WORKSPACE = 2
    """By a block, so many bytes, once per device: the matrix library's."""
    ONCE = 7
    """By a block, so many bytes, once per device: a buffer that its blocks share."""
    FREE = 3
    """Of the allocation with this number."""
    ENTER = 4
    """Of the holder with this number: its weights come if they are offloaded, and go when it is left."""
    LEAVE = 5
    CACHED = 6
    """The allocation with this number is in the KV cache at the end of the phase."""
    EMPTY = 8
    """All devices give back what their allocators keep for later."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A module that holds tensors itself, by the bytes of each of its parameters; `block` is where it belongs."""

    fqn: str
    block: int
    parameter_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tower:
    """A module of several `blocks` beside the one that has the embedding of tokens, or the root.

    Its own code runs where its blocks are if they are together, because accelerate brings its inputs there; else where
    its inputs are: where `outer` is, a block or a tower, as long as none is known to come from elsewhere. The inputs of
    the root come to the main device.
    """

    outer: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """What the blocks of a model allocate, in order.

    Args:
        num_blocks: how many blocks there are.
        weights: block and bytes of each tensor in the order of loading, tied ones once.
        buffers: block and bytes of each buffer, which stay where a block computes even if it is offloaded.
        conversion_bytes: for each block the most that making one of its weights takes beside it.
        read_bytes: for each block what the checkpoint holds of it.
        holders: the modules whose weights are brought one by one where they are offloaded.
        phases: name and events of each phase after loading; allocations are numbered from 0 through all phases, those
            of `weights` from -1 down.
        towers: outer ones first; in events they are numbered after all blocks.
        tokens: the block whose device people bring tokens to.
        moved_to: the block of the model's first weight, where inputs are moved there.
    """

    num_blocks: int
    weights: tuple[tuple[int, int], ...]
    buffers: tuple[tuple[int, int], ...]
    conversion_bytes: tuple[int, ...]
    read_bytes: tuple[int, ...]
    holders: tuple[Holder, ...]
    phases: Mapping[str, tuple[tuple[int, int, int], ...]]
    towers: tuple[Tower, ...] = ()
    tokens: int = 0
    moved_to: int | None = None

    @property
    def num_events(self) -> int:
        """In all phases."""
        return sum(map(len, self.phases.values()))

    @property
    def homes(self) -> list[int]:
        """For each block itself, and for each tower its first block."""
        return [*range(self.num_blocks), *(tower.blocks[0] for tower in self.towers)]

    def with_towers(self, places: Sequence[_Place], main: _Place) -> list[_Place]:
        """The places of all blocks, then those of towers; `main` is the main device."""
        placed = list(places)
        for tower in self.towers:
            own = {places[block] for block in tower.blocks}
            outer = main if tower.outer == MAIN else placed[tower.outer]
            placed.append(own.pop() if len(own) == 1 else outer)
        return placed

    def cut_towers(self, places: Sequence[_Place]) -> list[int]:
        """The numbers of towers, the root aside, whose blocks are in several places."""
        return [
            number
            for number, tower in enumerate(self.towers, start=self.num_blocks)
            if tower.outer != MAIN and len({places[block] for block in tower.blocks}) > 1
        ]

    def to_document(self) -> dict[str, Any]:
        """The trace as plain data."""
        return {
            "num_blocks": self.num_blocks,
            "weights": [number for pair in self.weights for number in pair],
            "buffers": [number for pair in self.buffers for number in pair],
            "conversion_bytes": self.conversion_bytes,
            "read_bytes": self.read_bytes,
            "towers": [[tower.outer, *tower.blocks] for tower in self.towers],
            "tokens": self.tokens,
            "moved_to": self.moved_to,
            "holders": [[holder.fqn, holder.block, *holder.parameter_bytes] for holder in self.holders],
            "phases": {name: [number for event in events for number in event] for name, events in self.phases.items()},
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Trace:
        """Back from `to_document`."""
        return cls(
            num_blocks=document["num_blocks"],
            weights=_tuples(document["weights"], 2),
            buffers=_tuples(document["buffers"], 2),
            conversion_bytes=tuple(document["conversion_bytes"]),
            read_bytes=tuple(document["read_bytes"]),
            holders=tuple(Holder(fqn, block, tuple(sizes)) for fqn, block, *sizes in document["holders"]),
            phases={name: _tuples(numbers, 3) for name, numbers in document["phases"].items()},
            towers=tuple(Tower(outer, tuple(blocks)) for outer, *blocks in document["towers"]),
            tokens=document["tokens"],
            moved_to=document["moved_to"],
        )


def are_alike(one: Trace, other: Trace) -> bool:
    """Whether two traces of one model have the same events in the same order, however large."""
    if one.weights != other.weights or one.phases.keys() != other.phases.keys():
        return False
    return all(
        [event[:2] for event in events] == [event[:2] for event in other.phases[name]]
        for name, events in one.phases.items()
    )


def mixed(traces: Sequence[Trace], shares: Sequence[float]) -> Trace:
    """A trace like all of `traces`, whose sizes are sums of theirs, each counted by its share; shares add up to 1."""

    def mix(sizes: Sequence[int]) -> int:
        return max(1, round(sum(map(mul, shares, sizes)))) if sizes[0] else 0

    phases = {}
    for name, events in traces[0].phases.items():
        columns = [[size for _, _, size in trace.phases[name]] for trace in traces]
        sizes = map(mix, zip(*columns, strict=True))
        phases[name] = tuple((event, first, size) for (event, first, _), size in zip(events, sizes, strict=True))
    return replace(traces[0], phases=phases)


def _tuples(numbers: Sequence[int], size: int) -> Any:
    return tuple(zip(*[iter(numbers)] * size, strict=True))


class Recorder:
    """Listens to a machine on which block number i is on device `device_of(i)`, and the code of towers likewise.

    Where they share a device, an allocation there belongs to the one that was entered last, and not left.

    Args:
        block_of: the number of each block by the names of its modules or tensors.
        towers: modules of several blocks whose inputs are brought to one device, outer ones first; the root is "".
        embedding: the module that gets the inputs of the model.
    """

    def __init__(self, block_of: Mapping[str, int], towers: Sequence[str] = (), embedding: str = "") -> None:
        self._block_of = block_of
        self.num_blocks = 1 + max(block_of.values(), default=-1)
        self.towers = {fqn: number for number, fqn in enumerate(towers, start=self.num_blocks)}
        num_places = self.num_blocks + len(self.towers)
        self.num_devices = min(num_places, MAX_DEVICES)
        self._tokens = self.block_of(embedding) or 0
        self._current = {self.device_of(number): number for number in range(num_places - 1, -1, -1)}
        self._is_shared = num_places > MAX_DEVICES
        self._holders: dict[str, int] = {}
        self._named_holders: list[Holder] = []
        self._weights: list[tuple[int, int]] = []
        self._buffers: list[tuple[int, int]] = []
        self._conversions = [0] * self.num_blocks
        self._read = [0] * self.num_blocks
        self._phases: dict[str, list[tuple[int, int, int]]] = {}
        self._events: list[tuple[int, int, int]] | None = None
        self._blocks: list[int] = []
        self._once: set[int] = set()
        self._around: list[int] = []
        self._moving_to: int | None = None
        self._moved_to: int | None = None

    @staticmethod
    def device_of(number: int) -> int:
        """The device that a block is on, or that a tower's own code uses."""
        return number % MAX_DEVICES

    def device_map(self) -> dict[str, int | str]:
        """The map of the rehearsal to listen to."""
        return {fqn: self.device_of(block) for fqn, block in self._block_of.items()}

    def block_of(self, name: str) -> int | None:
        """The block of a module or tensor; None for what is in none."""
        while name and name not in self._block_of:
            name = parent(name)
        return self._block_of.get(name)

    def block_on(self, device: int) -> int:
        """The block or tower that a device is used by now."""
        return self._current[device]

    # ------------------------------------------------------------------ while loading

    def weight(
        self, name: str, num_bytes: int, *, is_buffer: bool, conversion_bytes: int, read_bytes: int
    ) -> int | None:
        """A weight was loaded that is not tied to an earlier one; gives the number of its allocation, from -1 down."""
        block = self.block_of(name)
        if block is None:
            return None
        self._weights.append((block, num_bytes))
        if is_buffer:
            self._buffers.append((block, num_bytes))
        self._conversions[block] = max(self._conversions[block], conversion_bytes)
        self._read[block] += read_bytes
        return -len(self._weights)

    def holder(self, fqn: str, parameter_bytes: Sequence[int]) -> None:
        """A module holds parameters itself, tied ones too."""
        block = self.block_of(fqn)
        if block is not None and parameter_bytes:
            self._holders[fqn] = len(self._named_holders)
            self._named_holders.append(Holder(fqn, block, tuple(parameter_bytes)))

    # ------------------------------------------------------------------ while running

    def phase(self, name: str) -> None:
        """What follows belongs to phase `name`."""
        self._events = self._phases.setdefault(name, [])

    def stop(self) -> None:
        """What follows is no part of the run."""
        self._events = None

    def allocated(
        self, device: int, num_bytes: int, copy_of: int | None = None, *, is_workspace: bool = False
    ) -> int | None:
        """A device allocated, perhaps for a copy; gives the allocation's number, None where it is not recorded."""
        if self._events is None:
            return None
        block = self._current[device]
        if copy_of is not None and block == self._moving_to:
            self._moved_to = block
            self._events.append((Event.MOVE, copy_of, block))
        elif copy_of is not None:
            self._events.append((Event.COPY, copy_of, 0))
        self._blocks.append(block)
        self._events.append((Event.WORKSPACE if is_workspace else Event.ALLOCATE, block, num_bytes))
        return len(self._blocks) - 1

    def freed(self, number: int | None) -> None:
        """An allocation is no more."""
        if self._events is not None and number is not None:
            self._events.append((Event.FREE, number, 0))

    def entered(self, fqn: str) -> None:
        """A module's forward begins."""
        number = self._number(fqn)
        if self._is_shared and number is not None:
            self._around.append(number)
            self._current[self.device_of(number)] = number
        if self._events is not None and fqn in self._holders:
            self._events.append((Event.ENTER, self._holders[fqn], 0))

    def left(self, fqn: str) -> None:
        """A module's forward ends."""
        if self._is_shared and self._number(fqn) is not None:
            self._around.pop()
            for number in self._around[-1:]:
                self._current[self.device_of(number)] = number
        if self._events is not None and fqn in self._holders:
            self._events.append((Event.LEAVE, self._holders[fqn], 0))

    def working_for(self, number: int | None) -> None:
        """What a device allocates next is for the block of an earlier allocation."""
        if self._is_shared and number is not None and number >= 0:
            block = self._blocks[number]
            self._current[self.device_of(block)] = block

    @contextmanager
    def moving(self, name: str) -> Iterator[None]:
        """What comes to the block of tensor `name` are inputs that `generate` moves there."""
        self._moving_to = self.block_of(name)
        try:
            yield
        finally:
            self._moving_to = None

    def once(self, number: int | None) -> None:
        """An allocation is a buffer that is made once on each device, for all blocks there."""
        if number is not None:
            self._once.add(number)

    def emptied(self) -> None:
        """All devices gave back what their allocators kept for later."""
        if self._events is not None:
            self._events.append((Event.EMPTY, 0, 0))

    def cached(self, numbers: Iterable[int]) -> None:
        """These allocations are the KV cache now."""
        if self._events is not None:
            self._events += [(Event.CACHED, number, 0) for number in sorted(numbers)]

    def trace(self) -> Trace:
        """All that was recorded."""
        return Trace(
            num_blocks=self.num_blocks,
            weights=tuple(self._weights),
            buffers=tuple(self._buffers),
            conversion_bytes=tuple(self._conversions),
            read_bytes=tuple(self._read),
            holders=tuple(self._named_holders),
            phases=self._marked_phases(),
            towers=tuple(map(self._tower, self.towers)),
            tokens=self._tokens,
            moved_to=self._moved_to,
        )

    def _number(self, fqn: str) -> int | None:
        """Of the block or tower of exactly this name."""
        return self.towers.get(fqn, self._block_of.get(fqn))

    def _tower(self, fqn: str) -> Tower:
        blocks = dict.fromkeys(block for name, block in self._block_of.items() if is_ancestor(fqn, name))
        if not fqn:
            return Tower(MAIN, tuple(blocks))
        name = parent(fqn)
        while name and name not in self.towers:
            name = parent(name)
        return Tower(self.towers[name] if name else self._tokens, tuple(blocks))

    def _marked_phases(self) -> dict[str, tuple[tuple[int, int, int], ...]]:
        """The events, with what is made once per device marked as that."""
        numbers = count()
        allocations = (Event.ALLOCATE, Event.WORKSPACE)

        def marked(event: tuple[int, int, int]) -> tuple[int, int, int]:
            is_once = event[0] in allocations and next(numbers) in self._once
            return (Event.ONCE, *event[1:]) if is_once else event

        return {name: tuple(map(marked, events)) for name, events in self._phases.items()}
