"""Replays of one trace, each device's part remembered: what it holds depends on its own blocks alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from devmap_cli.simulation.memory import UNLIMITED_BYTES, DeviceRehearsal
from devmap_cli.simulation.replay import Replay, Seat, replay
from devmap_cli.simulation.trace import Trace

_Part = tuple[tuple[int, ...], tuple[int, ...], bool]
"""What a device computes: blocks that are there, blocks that are offloaded, and whether it is the main one."""


class Replays:
    """Replays of `trace`."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._unlimited: dict[_Part, DeviceRehearsal] = {}
        self._limited: dict[tuple[_Part, int], DeviceRehearsal | None] = {}

    def limited(self, seats: Sequence[Seat | None], capacities: Sequence[int], main: int | None) -> Replay:
        """What devices of `capacities` (bytes) hold, the main one being number `main`."""
        return replay(self.trace, seats, capacities, main)

    def unlimited(self, seats: Sequence[Seat | None], num_devices: int, main: int | None) -> list[DeviceRehearsal]:
        """What devices hold whose memory has no end."""
        moved_to = None if self.trace.moved_to is None else seats[self.trace.moved_to]
        if self.trace.cut_towers(seats) or (moved_to is not None and moved_to.is_offloaded):
            return self._played(seats, range(num_devices), main)
        parts = [_part(seats, device, main) for device in range(num_devices)]
        new = [device for device, part in enumerate(parts) if part not in self._unlimited]
        if new:
            for device, seen in zip(new, self._played(seats, new, main), strict=True):
                self._unlimited[parts[device]] = seen
        return [self._unlimited[part] for part in parts]

    def alone(
        self, blocks: Iterable[int], capacity: int, *, is_main: bool, away: Iterable[int] = ()
    ) -> DeviceRehearsal | None:
        """What a device holds with these blocks and no others; None where `capacity` (bytes) is not enough.

        It computes for the blocks `away` too, which are offloaded.
        """
        seats: list[Seat | None] = [None] * self.trace.num_blocks
        for block in blocks:
            seats[block] = Seat(0)
        for block in away:
            seats[block] = Seat(0, is_offloaded=True)
        main = 0 if is_main else None
        (seen,) = self.unlimited(seats, 1, main)
        if seen.most_reserved_bytes <= capacity:
            return seen
        if max(seen.allocated_bytes.values()) > capacity:
            return None
        key = _part(seats, 0, main), capacity
        if key not in self._limited:
            played = self.limited(seats, [capacity], main)
            self._limited[key] = None if played.failure is not None else played.devices[0]
        return self._limited[key]

    def _played(self, seats: Sequence[Seat | None], devices: Sequence[int], main: int | None) -> list[DeviceRehearsal]:
        """What some of the devices hold."""
        numbers = {device: number for number, device in enumerate(devices)}
        some = [
            replace(seat, device=numbers[seat.device]) if seat is not None and seat.device in numbers else None
            for seat in seats
        ]
        main_number = None if main is None else numbers.get(main)
        return list(self.limited(some, [UNLIMITED_BYTES] * len(devices), main_number).devices)


def _part(seats: Sequence[Seat | None], device: int, main: int | None) -> _Part:
    own = [(number, seat) for number, seat in enumerate(seats) if seat is not None and seat.device == device]
    return (
        tuple(number for number, seat in own if not seat.is_offloaded),
        tuple(number for number, seat in own if seat.is_offloaded),
        device == main,
    )
