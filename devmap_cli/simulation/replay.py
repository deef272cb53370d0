"""Plays a trace to the allocators of a placement: what each device would hold, without running the model again.

The allocators are those of a rehearsal, and get the same requests in the same order. Free of torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from devmap_cli.simulation.allocator import CachingAllocator
from devmap_cli.simulation.memory import AllocatorOutOfMemoryError, DeviceRehearsal, PhaseMemory
from devmap_cli.simulation.pool import Block
from devmap_cli.simulation.trace import Event, Trace

_ELSEWHERE = -1


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a block computes, by the number of the device, and whether its weights are only brought there to do so."""

    device: int
    is_offloaded: bool = False


@dataclass(frozen=True, slots=True)
class ReplayFailure:
    """The device that ran out of memory, the phase, and the module that held weights last."""

    device: int
    phase: str
    module: str


@dataclass(frozen=True, slots=True)
class Replay:
    """What the devices held, as far as memory sufficed."""

    devices: tuple[DeviceRehearsal, ...]
    failure: ReplayFailure | None = None


def replay(trace: Trace, seats: Sequence[Seat | None], capacities: Sequence[int], main: int | None) -> Replay:
    """What devices of `capacities` (bytes) hold with block i of `trace` on `seats[i]`, or on none of them.

    `main` is the number of the main device, None for one that is none of them.

    What a device holds depends on its own blocks, so that a part of the devices is enough to tell of them. Only the
    inputs of a tower that is cut over devices may go to one that is none of its own (`Tower`).
    """
    return _Player(trace, seats, capacities, main).play()


class _Shared:
    """Memory in use, until all that counts as it is freed."""

    __slots__ = ("block", "device", "num_uses")

    def __init__(self, device: int, block: Block) -> None:
        self.device = device
        self.block = block
        self.num_uses = 1


class _Player:
    def __init__(self, trace: Trace, seats: Sequence[Seat | None], capacities: Sequence[int], main: int | None) -> None:
        self._trace = trace
        self._seats = seats
        places = trace.with_towers(seats, None if main is None else Seat(main))
        self._devices = [_ELSEWHERE if seat is None else seat.device for seat in places]
        self._cut_towers = set(trace.cut_towers(seats))
        self._allocators = [CachingAllocator(capacity) for capacity in capacities]
        self._weights = [0] * len(capacities)
        self._workspaces = [0] * len(capacities)
        self._kv_cache: Counter[tuple[str, int]] = Counter()
        self._made_once: set[tuple[int, int]] = set()
        self._streamed: dict[int, list[tuple[CachingAllocator, Block]]] = {}
        self._live: dict[int, _Shared] = {}
        self._source: _Shared | None = None
        self._stays = False
        self._count = 0
        self._phase = "load"
        self._module = ""
        self._device = 0

    def play(self) -> Replay:
        """Load, then all phases."""
        failure = None
        scope = ExitStack()
        try:
            with scope:
                self._enter(scope, "load")
                self._load()
                for phase, events in self._trace.phases.items():
                    self._enter(scope, phase)
                    self._run(events)
        except AllocatorOutOfMemoryError:
            failure = ReplayFailure(self._device, self._phase, self._module)
        return Replay(tuple(self._report(index) for index in range(len(self._allocators))), failure)

    def _enter(self, scope: ExitStack, phase: str) -> None:
        scope.close()
        self._phase = phase
        for allocator in self._allocators:
            scope.enter_context(allocator.phase(phase))

    # ------------------------------------------------------------------ loading

    def _load(self) -> None:
        """As from_pretrained does: memory for all weights of a device in one piece, they, what it converts."""
        totals: Counter[int] = Counter()
        for block, num_bytes in self._trace.weights:
            if self._is_here(block):
                totals[self._devices[block]] += num_bytes
        for device, num_bytes in totals.items():
            self._give_back(device, num_bytes)
        for number, (block, num_bytes) in enumerate(self._trace.weights, start=1):
            if self._is_here(block) and (taken := self._take(self._devices[block], num_bytes)) is not None:
                self._live[-number] = _Shared(self._devices[block], taken)
        self._convert()
        for block, num_bytes in self._trace.buffers:
            seat = self._seats[block]
            if seat is not None and seat.is_offloaded:
                self._take(seat.device, num_bytes)
        self._weights = [allocator.use.allocated_bytes for allocator in self._allocators]

    def _convert(self) -> None:
        largest: dict[int, int] = {}
        for block, num_bytes in enumerate(self._trace.conversion_bytes):
            if num_bytes and self._is_here(block):
                device = self._devices[block]
                largest[device] = max(largest.get(device, 0), num_bytes)
        for device, num_bytes in largest.items():
            self._give_back(device, num_bytes)

    def _is_here(self, block: int) -> bool:
        seat = self._seats[block]
        return seat is not None and not seat.is_offloaded

    def _take(self, device: int, num_bytes: int) -> Block | None:
        self._device = device
        return self._allocators[device].allocate(num_bytes) if num_bytes else None

    def _give_back(self, device: int, num_bytes: int) -> None:
        block = self._take(device, num_bytes)
        if block is not None:
            self._allocators[device].free(block)

    # ------------------------------------------------------------------ running

    def _run(self, events: Sequence[tuple[int, int, int]]) -> None:
        allocate, free = int(Event.ALLOCATE), int(Event.FREE)
        rare: dict[int, Callable[[int, int], None]] = {
            Event.COPY: self._copy,
            Event.MOVE: self._move,
            Event.WORKSPACE: self._open_matmul_library,
            Event.ONCE: self._make_once,
            Event.ENTER: self._bring,
            Event.LEAVE: self._drop,
            Event.CACHED: self._cache,
            Event.EMPTY: self._empty,
        }
        rare = {int(event): play for event, play in rare.items()}  # members hash by name
        devices, live, cut_towers = self._devices, self._live, self._cut_towers
        for event, first, second in events:
            if event == allocate:
                if devices[first] == _ELSEWHERE and first not in cut_towers and not self._stays:
                    self._count += 1
                    self._source = None
                else:
                    self._allocate(first, second)
            elif event == free:
                if first in live:
                    self._free(first)
            else:
                rare[event](first, second)

    def _allocate(self, block: int, num_bytes: int) -> None:
        source, self._source = self._source, None
        stays, self._stays = self._stays, False
        if source is not None and block in self._cut_towers:
            self._devices[block] = source.device  # its first input: nothing brings that anywhere
            self._cut_towers.remove(block)
        device = self._devices[block]
        number = self._count
        self._count += 1
        if source is not None and (stays or source.device == device):
            source.num_uses += 1
        elif stays or device == _ELSEWHERE:
            return
        else:
            self._device = device
            source = _Shared(device, self._allocators[device].allocate(num_bytes))
        self._live[number] = source

    def _free(self, number: int) -> None:
        shared = self._live.pop(number)
        shared.num_uses -= 1
        if not shared.num_uses:
            self._allocators[shared.device].free(shared.block)

    def _copy(self, number: int, _: int) -> None:
        self._source = self._live.get(number)

    def _move(self, number: int, block: int) -> None:
        self._source = self._live.get(number)
        seat = self._seats[block]
        is_offloaded = seat is not None and seat.is_offloaded
        self._stays = is_offloaded or self._devices[block] == self._devices[self._trace.tokens]

    def _open_matmul_library(self, block: int, num_bytes: int) -> None:
        device = self._devices[block]
        self._count += 1
        if device != _ELSEWHERE and not self._workspaces[device]:
            self._take(device, num_bytes)
            self._workspaces[device] = num_bytes

    def _make_once(self, block: int, num_bytes: int) -> None:
        device = self._devices[block]
        self._count += 1
        if device != _ELSEWHERE and (device, num_bytes) not in self._made_once:
            self._made_once.add((device, num_bytes))
            self._take(device, num_bytes)

    def _cache(self, number: int, _: int) -> None:
        shared = self._live.get(number)
        if shared is not None:
            self._kv_cache[self._phase, shared.device] += shared.block.size

    def _empty(self, _: int, __: int) -> None:
        for allocator in self._allocators:
            allocator.empty_cache()

    def _bring(self, holder_index: int, _: int) -> None:
        """A module's weights come to where it computes, if they are elsewhere."""
        holder = self._trace.holders[holder_index]
        self._module = holder.fqn
        seat = self._seats[holder.block]
        if seat is not None and seat.is_offloaded:
            allocator = self._allocators[seat.device]
            brought = self._streamed.setdefault(holder_index, [])
            self._device = seat.device
            brought += [(allocator, allocator.allocate(size)) for size in holder.parameter_bytes if size]

    def _drop(self, holder_index: int, _: int) -> None:
        for allocator, block in self._streamed.pop(holder_index, ()):
            allocator.free(block)

    # ------------------------------------------------------------------ figures

    def _report(self, index: int) -> DeviceRehearsal:
        uses = self._allocators[index].phases
        allocated = {phase: use.allocated_bytes for phase, use in uses.items()}
        return DeviceRehearsal(
            index=index,
            capacity_bytes=self._allocators[index].capacity_bytes,
            phases={
                phase: PhaseMemory.of(
                    use,
                    weights_bytes=self._weights[index],
                    kv_cache_bytes=self._kv_cache[phase, index],
                    workspace_bytes=0 if phase == "load" else self._workspaces[index],
                )
                for phase, use in uses.items()
            },
            allocated_bytes=allocated,
            peak_phase=max(allocated, key=lambda phase: allocated[phase]),
        )
