"""Whether a placement holds what its run takes, and how much each device is short of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import CPU, Device
from devmap_cli.devices.runtime import runtime_overhead_bytes
from devmap_cli.planning.nouns import MemoryBreakdown, Placement
from devmap_cli.planning.profile import Profile
from devmap_cli.planning.replays import Replays
from devmap_cli.simulation.memory import DeviceRehearsal
from devmap_cli.simulation.replay import Seat

_MARGIN_BYTES = 4 << 20
"""What an allocator of PyTorch may reserve more or less for the same requests in another order: two small segments."""
_UNTOLD_BYTES, _UNTOLD_FROM = 2 << 20, 1 << 30
"""What a run may reserve beyond the trace, one small segment, where it takes so much that the order of requests varies.
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What devices lack, in bytes, none where all fits; `memory` is what they take, as far as it is known better than
    by adding up blocks. `is_close` says that all fits but for the margin that is kept free."""

    missing: Mapping[Device, int]
    memory: Mapping[Device, MemoryBreakdown]
    is_close: bool = False


class Judge(Protocol):
    """Tells of a placement whether it runs within budgets."""

    def verdict(self, placement: Placement, budgets: Budgets) -> Verdict:
        """What devices lack."""


class Arithmetic:
    """Adds up what blocks need: what the main device computes for offloaded blocks shows only in a placement."""

    def verdict(self, placement: Placement, budgets: Budgets) -> Verdict:
        """What the main device lacks."""
        main = placement.main_device
        over = placement.memory(main).peak_bytes - budgets.get(main)
        return Verdict({main: over} if over > 0 and main in budgets.devices else {}, {})


class Replaying:
    """Plays the trace of a profile to the allocators of a placement's devices.

    Args:
        profile: of the workload.
        more_bytes: what some devices take beyond what the profile says.
    """

    def __init__(self, profile: Profile, more_bytes: Mapping[Device, int] = MappingProxyType({})) -> None:
        self._replays = Replays(profile.trace)
        self._more_bytes = more_bytes
        self._keeps_margin = True

    def without_margin(self) -> Replaying:
        """The same, but that peaks may be as high as budgets."""
        other = copy(self)
        other._keeps_margin = False
        return other

    def verdict(self, placement: Placement, budgets: Budgets) -> Verdict:
        """What each accelerator lacks for all phases of the run."""
        main = placement.main_device
        if main not in budgets.devices:
            return Arithmetic().verdict(placement, budgets)
        if not main.is_accelerator:
            return self._on_cpu(placement, budgets)
        devices = [device for device in budgets.devices if device in placement.devices and device.is_accelerator]
        seats = [
            Seat(devices.index(place)) if place.is_accelerator else Seat(devices.index(main), is_offloaded=True)
            for place in placement.devices
        ]
        beside = {device: self.beside_bytes(device, budgets.get(device)) for device in devices}
        rooms = [budgets.get(device) - beside[device] for device in devices]
        margins = [margin_bytes(budgets.get(device)) for device in devices]
        capacities = [max(0, room - margin) for room, margin in zip(rooms, margins, strict=True)]
        unlimited = self._replays.unlimited(seats, len(devices), devices.index(main))
        if all(seen.most_reserved_bytes <= capacity for seen, capacity in zip(unlimited, capacities, strict=True)):
            return Verdict({}, _memory(placement, budgets, beside, unlimited))
        held = [max(seen.allocated_bytes.values()) for seen in unlimited]
        if any(size > room for size, room in zip(held, rooms, strict=True)):
            return Verdict(_lacking(devices, held, capacities), {})
        whole = self._replays.limited(seats, rooms, devices.index(main))
        memory = {} if whole.failure is not None else _memory(placement, budgets, beside, whole.devices)
        limited = self._replays.limited(seats, capacities, devices.index(main))
        if limited.failure is None:
            return Verdict({}, memory or _memory(placement, budgets, beside, limited.devices))
        short = limited.failure.device
        missing = _lacking(devices, held, capacities) or {devices[short]: max(1, margins[short])}
        return Verdict(missing, memory, is_close=whole.failure is None)

    def peak_bytes(
        self, device: Device, budget_bytes: int, blocks: Sequence[int], *, is_main: bool, away: Sequence[int] = ()
    ) -> int | None:
        """The peak of an accelerator that holds these blocks and no others, in bytes; None where it has no room.

        With `is_main` it is the main device of a placement, and computes for the blocks `away` too.
        """
        room = budget_bytes - self.beside_bytes(device, budget_bytes)
        capacity = max(0, room - margin_bytes(budget_bytes)) if self._keeps_margin else room
        seen = self._replays.alone(blocks, capacity, is_main=is_main, away=away)
        if seen is None:
            return None
        reserved = seen.peak.reserved_bytes
        return budget_bytes - room + reserved + _untold(reserved, room)

    def beside_bytes(self, device: Device, budget_bytes: int) -> int:
        """What an accelerator takes beside what is replayed, in bytes."""
        return runtime_overhead_bytes(device.kind, budget_bytes) + self._more_bytes.get(device, 0)

    def _on_cpu(self, placement: Placement, budgets: Budgets) -> Verdict:
        """What the cpu alone lacks, whose allocator keeps nothing for later."""
        seats = [Seat(0, is_offloaded=place != CPU) for place in placement.devices]
        (seen,) = self._replays.unlimited(seats, 1, 0)
        held = sum(
            block.weights_bytes
            for block, place in zip(placement.blocks, placement.devices, strict=True)
            if place == CPU
        )
        most = max(seen.phases.values(), key=lambda phase: phase.kv_cache_bytes + phase.activation_bytes)
        memory = MemoryBreakdown(held, most.kv_cache_bytes, most.activation_bytes, most.weights_bytes - held)
        missing = memory.peak_bytes - budgets.get(CPU)
        return Verdict({CPU: missing} if missing > 0 else {}, {CPU: memory})


class Rehearsing:
    """Has the model's own code run with a placement that another judge lets pass.

    Args:
        first: the other judge.
        missing: gives what each device lacks for a placement, in bytes.
    """

    def __init__(self, first: Judge, missing: Callable[[Placement], Mapping[Device, int]]) -> None:
        self._first = first
        self._missing = missing

    def verdict(self, placement: Placement, budgets: Budgets) -> Verdict:
        """What either of the two says is missing."""
        verdict = self._first.verdict(placement, budgets)
        return verdict if verdict.missing else replace(verdict, missing=self._missing(placement))


def _lacking(devices: Sequence[Device], held: Sequence[int], capacities: Sequence[int]) -> dict[Device, int]:
    """What devices lack to hold so many bytes of tensors."""
    over = {device: size - capacity for device, size, capacity in zip(devices, held, capacities, strict=True)}
    return {device: size for device, size in over.items() if size > 0}


def margin_bytes(budget_bytes: int) -> int:
    """What of a budget plans keep free, on small devices and with their small blocks less."""
    return min(_MARGIN_BYTES, budget_bytes >> 8)


def _memory(
    placement: Placement, budgets: Budgets, beside: Mapping[Device, int], played: Sequence[DeviceRehearsal]
) -> dict[Device, MemoryBreakdown]:
    """What devices take: what was played, and what each has `beside` that (bytes)."""
    weights: dict[Device, int] = {}
    for block, place in zip(placement.blocks, placement.devices, strict=True):
        weights[place] = weights.get(place, 0) + block.weights_bytes
    memory = {}
    for (device, beside_bytes), seen in zip(beside.items(), played, strict=True):
        peak = seen.peak
        held = weights.get(device, 0)
        untold = _untold(peak.reserved_bytes, budgets.get(device) - beside_bytes)
        rounding = peak.weights_bytes - held
        memory[device] = MemoryBreakdown(
            weights_bytes=held,
            kv_cache_bytes=peak.kv_cache_bytes,
            activation_bytes=peak.activation_bytes,
            overhead_bytes=peak.overhead_bytes + rounding + beside_bytes + untold,
        )
    return memory


def _untold(reserved_bytes: int, room_bytes: int) -> int:
    """What a device with so much room may reserve beyond what was played."""
    return max(0, min(_UNTOLD_BYTES, room_bytes - reserved_bytes)) if reserved_bytes >= _UNTOLD_FROM else 0
