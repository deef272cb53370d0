"""What a plan is made from: the request, and what tells of placements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.capability import Capability, capability_of, lowest_capability, matmul_workspace_bytes
from devmap_cli.devices.device import Device
from devmap_cli.devices.runtime import runtime_overhead_bytes
from devmap_cli.mapfile import MapWorkload
from devmap_cli.model.spec import ModelSpec
from devmap_cli.planning.blocks import blocks_of
from devmap_cli.planning.judging import Arithmetic, Judge, Rehearsing, Replaying
from devmap_cli.planning.mapping import places_of
from devmap_cli.planning.nouns import Block, Placement
from devmap_cli.planning.pace import Pace
from devmap_cli.planning.pins import Pin
from devmap_cli.planning.profile import Profile

if TYPE_CHECKING:
    from devmap_cli.devices.cards import Card

_LEAST_LOOKS, _MOST_LOOKS, _LOOKED_EVENTS = 40, 1000, 1_500_000
"""So many parts of placements are replayed: more where a trace has few events, so that they take little time."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """All that a plan depends on, besides the model.

    `weights_only` lets budgets cap weights alone, as accelerate's max_memory does. `cards` are those of the
    accelerators, as far as they are known.
    """

    strategy: str
    budgets: Budgets
    workload: MapWorkload
    pins: tuple[Pin, ...] = ()
    gpu_weights: Mapping[Device, Fraction] = field(default_factory=dict)
    weights_only: bool = False
    cards: Mapping[Device, Card] = field(default_factory=dict)

    @property
    def capability(self) -> Capability:
        """The lowest of the cards', by which all are planned for."""
        return lowest_capability(self.cards.values())

    @property
    def more_workspace_bytes(self) -> dict[Device, int]:
        """What the matrix library takes of accelerators beyond what it takes of the lowest card."""
        least = matmul_workspace_bytes(self.capability)
        sizes = {device: matmul_workspace_bytes(capability_of(card)) for device, card in self.cards.items()}
        return {device: size - least for device, size in sizes.items() if size > least}


@dataclass(frozen=True, slots=True)
class Means:
    """What a planner plans by.

    Args:
        judge: says whether a placement fits.
        shared_bytes: what a device takes once for all its blocks; None where that and the runtime don't count.
        more_bytes: what some devices take beyond that.
        pace: tells how fast a placement is.
        is_probe: that only whether anything fits is asked.
        num_looks: how many parts of placements are replayed for the sake of one that sums don't find.
        unrehearsed: says it for other budgets too, where `judge` rehearses and so knows those of the request alone.
        confirm: rehearses what fits but for a margin, and tells what devices lack.
        replaying: replays single devices too.
    """

    judge: Judge
    shared_bytes: int | None = None
    more_bytes: Mapping[Device, int] = field(default_factory=dict)
    pace: Pace | None = None
    is_probe: bool = False
    num_looks: int = 0
    unrehearsed: Judge | None = None
    confirm: Callable[[Placement], Mapping[Device, int]] | None = None
    replaying: Replaying | None = None

    def overhead(self, budgets: Budgets) -> dict[Device, int]:
        """What each accelerator takes beside its blocks, in bytes."""
        if self.shared_bytes is None:
            return {}
        return {
            device: runtime_overhead_bytes(device.kind, budget) + self.shared_bytes + self.more_bytes.get(device, 0)
            for device, budget in budgets
            if device.is_accelerator
        }


def needs(
    spec: ModelSpec,
    request: PlanRequest,
    profile: Profile | None,
    missing: Callable[[Mapping[str, Device]], Mapping[Device, int]] | None,
    pace: Pace | None,
    *,
    is_probe: bool,
) -> tuple[tuple[Block, ...], Means]:
    """The blocks with what counts of their needs, and what they are planned by."""
    if request.weights_only:
        blocks = tuple(replace(block, kv_cache_bytes=0, streamed_bytes=0) for block in blocks_of(spec, 0, 1))
        return blocks, Means(Arithmetic(), is_probe=is_probe)
    workload = request.workload
    blocks = blocks_of(spec, workload.prompt_tokens + workload.max_new_tokens, workload.batch_size)
    means = Means(Arithmetic(), 0, request.more_workspace_bytes, pace, is_probe)
    if profile is not None:
        blocks = profile.blocks(blocks)
        judge = Replaying(profile, request.more_workspace_bytes)
        num_events = max(1, profile.trace.num_events)
        num_looks = max(_LEAST_LOOKS, min(_MOST_LOOKS, _LOOKED_EVENTS // num_events))
        means = replace(means, judge=judge, shared_bytes=profile.shared_bytes, replaying=judge)
        means = replace(means, num_looks=num_looks)
        if missing is not None:
            rehearsing = Rehearsing(judge, lambda placement: missing(places_of(spec, placement)))
            means = replace(means, judge=rehearsing, unrehearsed=judge)
    return blocks, means
