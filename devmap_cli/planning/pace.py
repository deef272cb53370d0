"""How fast placements of one profile are, on given devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from devmap_cli.devices.cards import Card
from devmap_cli.devices.device import CPU, DISK, Device
from devmap_cli.planning.nouns import Placement
from devmap_cli.planning.profile import DECODE, PREFILL, Profile
from devmap_cli.planning.rates import Rates, accelerator_rates, disk_rates, host_rates
from devmap_cli.planning.speed import BlockWork, Handover, Speed, predict
from devmap_cli.simulation.work import Work

if TYPE_CHECKING:
    from devmap_cli.devices.measuring import Measured


@dataclass(frozen=True)
class Pace:
    """Predicts the speed of placements.

    Args:
        profile: what the placed blocks have to do.
        dtype: what the model computes in, as torch names it.
        cards: of the accelerators, as far as they are known; for others one is assumed.
        measured: figures of the machine that they are in; assumed without them.
    """

    profile: Profile
    dtype: str
    cards: Mapping[Device, Card]
    measured: Measured | None = None

    def of(self, placement: Placement) -> Speed:
        """The speed of `placement`, whose blocks are those of the profile."""
        nothing = (Work(),) * len(placement.blocks)
        prefill, decode = (self.profile.work.get(phase, nothing) for phase in (PREFILL, DECODE))
        read_bytes = self.profile.trace.read_bytes
        blocks = [
            BlockWork(block.weights_bytes, before, after, read_bytes[index], num_forwards=self._num_forwards[index])
            for index, (block, before, after) in enumerate(zip(placement.blocks, prefill, decode, strict=True))
        ]
        rates = {device: self.rates(device) for device in (*placement.devices, CPU, DISK)}
        return predict(blocks, placement.devices, rates, self._handovers)

    def rates(self, device: Device) -> Rates:
        """What `device` reaches."""
        if device == CPU:
            return host_rates(self.dtype, self.measured)
        if device == DISK:
            return disk_rates(self.measured)
        return accelerator_rates(self.cards.get(device), self.dtype, kind=device.kind, measured=self.measured)

    @cached_property
    def _handovers(self) -> tuple[Handover, ...]:
        return self.profile.handovers()

    @cached_property
    def _num_forwards(self) -> list[int]:
        """How often a block's weights are brought: as often as the holders in it have it all, rounded."""
        held = [0] * self.profile.trace.num_blocks
        for holder in self.profile.trace.holders:
            held[holder.block] += sum(holder.parameter_bytes)
        weights = [0] * len(held)
        for block, size in self.profile.trace.weights:
            weights[block] += size
        return [max(1, round(brought / size)) if size else 1 for brought, size in zip(held, weights, strict=True)]
