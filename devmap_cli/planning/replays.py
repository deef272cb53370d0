"""Replays of one trace, each device's part remembered: what it holds depends on its own blocks alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from devmap_cli.simulation.memory import UNLIMITED_BYTES, DeviceRehearsal
from devmap_cli.simulation.replay import Replay, Seat, replay
from devmap_cli.simulation.trace import Trace

_Blocks = tuple[tuple[int, ...], tuple[int, ...]]
"""What a device computes: blocks that are there, and blocks that are offloaded."""


class Replays:
    """Replays of `trace`."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._unlimited: dict[_Blocks, DeviceRehearsal] = {}
        self._limited: dict[tuple[_Blocks, int], DeviceRehearsal | None] = {}

    def limited(self, seats: Sequence[Seat | None], capacities: Sequence[int]) -> Replay:
        """What devices of `capacities` (bytes) hold."""
        return replay(self.trace, seats, capacities)

    def unlimited(self, seats: Sequence[Seat | None], num_devices: int) -> list[DeviceRehearsal]:
        """What devices hold whose memory has no end."""
        if self.trace.has_cut_tower(seats):
            return self._played(seats, range(num_devices))
        keys = [_blocks_on(seats, device) for device in range(num_devices)]
        new = [device for device, key in enumerate(keys) if key not in self._unlimited]
        if new:
            for device, seen in zip(new, self._played(seats, new), strict=True):
                self._unlimited[keys[device]] = seen
        return [self._unlimited[key] for key in keys]

    def alone(self, blocks: Iterable[int], capacity: int) -> DeviceRehearsal | None:
        """What a device holds with these blocks and no others; None where `capacity` (bytes) is not enough."""
        seats: list[Seat | None] = [None] * self.trace.num_blocks
        for block in blocks:
            seats[block] = Seat(0)
        (seen,) = self.unlimited(seats, 1)
        if seen.most_reserved_bytes <= capacity:
            return seen
        if max(seen.allocated_bytes.values()) > capacity:
            return None
        key = _blocks_on(seats, 0), capacity
        if key not in self._limited:
            played = self.limited(seats, [capacity])
            self._limited[key] = None if played.failure is not None else played.devices[0]
        return self._limited[key]

    def _played(self, seats: Sequence[Seat | None], devices: Sequence[int]) -> list[DeviceRehearsal]:
        """What some of the devices hold."""
        numbers = {device: number for number, device in enumerate(devices)}
        some = [
            replace(seat, device=numbers[seat.device]) if seat is not None and seat.device in numbers else None
            for seat in seats
        ]
        return list(self.limited(some, [UNLIMITED_BYTES] * len(devices)).devices)


def _blocks_on(seats: Sequence[Seat | None], device: int) -> _Blocks:
    own = [(number, seat) for number, seat in enumerate(seats) if seat is not None and seat.device == device]
    return (
        tuple(number for number, seat in own if not seat.is_offloaded),
        tuple(number for number, seat in own if seat.is_offloaded),
    )
