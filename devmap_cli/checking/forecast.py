"""What a rehearsal foretells of a run: peaks per device and phase, copies, findings, and what it had to assume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from devmap_cli.devices.runtime import runtime_overhead_bytes
from devmap_cli.mapfile import MapDevice, MapTransfer
from devmap_cli.model.names import is_ancestor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from devmap_cli.checking.findings import Finding
    from devmap_cli.devices.device import Device

PHASES = ("load", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The most that a device holds in one phase, in bytes: the parts add up to `peak_bytes`."""

    phase: str
    weights_bytes: int
    kv_cache_bytes: int
    activation_bytes: int
    overhead_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.kv_cache_bytes + self.activation_bytes + self.overhead_bytes

    def to_document(self) -> dict[str, Any]:
        """The figures as plain data."""
        return {
            "phase": self.phase,
            "weights_bytes": self.weights_bytes,
            "kv_cache_bytes": self.kv_cache_bytes,
            "activation_bytes": self.activation_bytes,
            "overhead_bytes": self.overhead_bytes,
            "peak_bytes": self.peak_bytes,
        }


def allocatable_bytes(budget_bytes: int, device: Device) -> int:
    """What a budget of a device leaves to the allocator: all but the runtime's own share."""
    return budget_bytes - runtime_overhead_bytes(device.kind, budget_bytes)


@dataclass(frozen=True, slots=True)
class DeviceForecast:
    """What one device will hold; `phases` go as far as the rehearsal got, `highest` is the phase that takes most.

    A device that only stores weights (cpu and disk) has the load phase alone. `budget_bytes` is None without a limit.
    """

    device: Device
    budget_bytes: int | None
    phases: tuple[PhasePeak, ...]
    highest: PhasePeak

    @property
    def free_bytes(self) -> int | None:
        """What is left of the budget at the highest moment; below zero where it is not enough."""
        if self.budget_bytes is None:
            return None
        return allocatable_bytes(self.budget_bytes, self.device) - self.highest.peak_bytes

    @property
    def runtime_overhead_bytes(self) -> int:
        """An estimate of what the process takes there outside the allocator; no part of `phases` or of what is free."""
        return runtime_overhead_bytes(self.device.kind, self.budget_bytes)

    def map_device(self, budget_bytes: int) -> MapDevice:
        """The line of a map that says the same."""
        peak = self.highest
        return MapDevice(
            self.device,
            budget_bytes,
            weights_bytes=peak.weights_bytes,
            kv_cache_bytes=peak.kv_cache_bytes,
            activation_bytes=peak.activation_bytes,
            overhead_bytes=peak.overhead_bytes + self.runtime_overhead_bytes,
        )

    def to_document(self) -> dict[str, Any]:
        """The figures as plain data."""
        return {
            "device": self.device.map_value,
            "budget_bytes": self.budget_bytes,
            "peak_phase": self.highest.phase,
            "peak_bytes": self.highest.peak_bytes,
            "free_bytes": self.free_bytes,
            "runtime_overhead_bytes": self.runtime_overhead_bytes,
            "phases": [phase.to_document() for phase in self.phases],
        }


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes that `module` brings from one device to another in one phase."""

    phase: str
    source: Device
    target: Device
    module: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Move:
    """A module put on another device."""

    module: str
    device: Device

    def applied(self, device_map: Mapping[str, Device]) -> dict[str, Device]:
        """`device_map` with the whole module where the move puts it."""
        parts = [key for key in device_map if key != self.module and is_ancestor(self.module, key)]
        return {
            **{key: device for key, device in device_map.items() if key not in parts},
            self.module: self.device,
        }


@dataclass(frozen=True, slots=True)
class Forecast:
    """The outcome of one rehearsal, or of none.

    `skipped` says why the map could not be rehearsed, None where it was. `stopped_in` is the phase that the run does
    not get through, None where it ends well, and `remedy` the moves with which a rehearsal did get through, if some
    were found.
    """

    devices: tuple[DeviceForecast, ...] = ()
    findings: tuple[Finding, ...] = ()
    assumptions: tuple[str, ...] = ()
    copies: tuple[Copy, ...] = ()
    skipped: str | None = None
    stopped_in: str | None = None
    remedy: tuple[Move, ...] = ()

    def transfers(self, batch_size: int) -> tuple[MapTransfer, ...]:
        """Bytes per generated token and pair of devices."""
        totals: dict[tuple[Device, Device], int] = {}
        for copy in self.copies:
            if copy.phase != PHASES[-1]:
                continue
            pair = (copy.source, copy.target)
            totals[pair] = totals.get(pair, 0) + copy.num_bytes
        return tuple(MapTransfer(*pair, total // batch_size) for pair, total in sorted(totals.items()))
