"""From a described model and budgets to a placement, and from a placement to a map."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import DISK, Device
from devmap_cli.devices.runtime import runtime_overhead_bytes
from devmap_cli.mapfile import MapDevice, MapFile, MapModel, MapTransfer, MapWorkload
from devmap_cli.model.cache import package_versions
from devmap_cli.model.spec import ModelSpec
from devmap_cli.planning.blocks import blocks_of, device_map_of
from devmap_cli.planning.judging import Arithmetic, Judge, Rehearsing, Replaying
from devmap_cli.planning.nouns import Block, Infeasible, Placement
from devmap_cli.planning.pace import Pace
from devmap_cli.planning.pins import Pin, apply_pins
from devmap_cli.planning.profile import Profile
from devmap_cli.planning.strategies import plan, plan_offloading
from devmap_cli.planning.transfers import transfers

_FINENESS = 4096
"""What is kept free grows by at least this part of a budget."""
_MAX_STREAM_LIMITS = 3


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """All that a plan depends on, besides the model.

    `weights_only` lets budgets cap weights alone, as accelerate's max_memory does.
    """

    strategy: str
    budgets: Budgets
    workload: MapWorkload
    pins: tuple[Pin, ...] = ()
    gpu_weights: Mapping[Device, Fraction] = field(default_factory=dict)
    weights_only: bool = False


def make_plan(
    spec: ModelSpec,
    request: PlanRequest,
    profile: Profile | None = None,
    missing: Callable[[Mapping[str, Device]], Mapping[Device, int]] | None = None,
    pace: Pace | None = None,
    *,
    is_probe: bool = False,
) -> Placement | Infeasible:
    """Place the blocks of `spec` as `request` says.

    With the `profile` of the workload all that a run takes counts, else weights and KV cache alone. `missing` tells for
    a device map what each device lacks in a rehearsal (bytes); what it lets pass is taken. `pace` tells which of
    several placements with offloaded blocks is the fastest; without it the one that offloads least is taken. With
    `is_probe` an answer "no" does not say how little would be enough.

    Raises:
        RequestError: a pin, a weight or the strategy does not go with the model or the budgets.
    """
    if request.weights_only:
        blocks = tuple(replace(block, streamed_bytes=0) for block in blocks_of(spec, 0, 1))
        return _Planner(request, apply_pins(blocks, request.pins, spec), {}, Arithmetic(), is_probe=is_probe).plan()
    workload = request.workload
    blocks = blocks_of(spec, workload.prompt_tokens + workload.max_new_tokens, workload.batch_size)
    judge: Judge = Arithmetic()
    overhead = {
        device: runtime_overhead_bytes(device.kind, budget)
        for device, budget in request.budgets
        if device.is_accelerator
    }
    if profile is not None:
        blocks = profile.blocks(blocks)
        judge = Replaying(profile)
        overhead = {device: size + profile.shared_bytes for device, size in overhead.items()}
        if missing is not None:
            judge = Rehearsing(judge, lambda placement: missing(_device_map(spec, placement)))
    pinned = apply_pins(blocks, request.pins, spec)
    return _Planner(request, pinned, overhead, judge, pace, is_probe=is_probe).plan()


class _Planner:
    """Plans, has it judged, and plans again with room kept for what was missing."""

    def __init__(
        self,
        request: PlanRequest,
        blocks: tuple[Block, ...],
        overhead: Mapping[Device, int],
        judge: Judge,
        pace: Pace | None = None,
        *,
        is_probe: bool = False,
    ) -> None:
        self._request = request
        self._blocks = blocks
        self._overhead = overhead
        self._judge = judge
        self._pace = pace
        self._is_probe = is_probe

    def plan(self) -> Placement | Infeasible:
        """Plan, and where this leaves all accelerators empty, offload as `auto` does: it skips blocks at the front."""
        request = self._request
        answer = self._plan_judged(request.strategy)
        if isinstance(answer, Placement) and set(answer.devices) == {DISK}:
            return _disk_alone(answer)
        idle = isinstance(answer, Placement) and not any(device.is_accelerator for device in answer.devices)
        if idle and request.budgets.accelerators and request.strategy != "auto":
            other = self._plan_judged("auto")
            if isinstance(other, Placement) and any(device.is_accelerator for device in other.devices):
                return replace(other, strategy=request.strategy)
        return answer

    def _plan_judged(self, strategy: str) -> Placement | Infeasible:
        """A plan that was judged to fit; where `auto` offloads, the fastest of several.

        What passes through the main device needs room there, as much as the largest module that is offloaded: with less
        room kept, larger modules stay where they are.
        """
        answer = self._settled(strategy)
        accelerators = self._request.budgets.accelerators
        assert answer is not None
        if strategy != "auto" or not accelerators or (isinstance(answer, Placement) and not _offloaded(answer)):
            return answer
        answers = [answer, *(self._settled(strategy, limit) for limit in self._stream_limits())]
        placements = [other for other in answers if isinstance(other, Placement)]
        return min(placements, key=self._slowness, default=answer)

    def _slowness(self, placement: Placement) -> tuple[float, int]:
        seconds = 0.0 if self._pace is None else self._pace.of(placement).seconds_per_token
        return seconds, _offloaded(placement)

    def _stream_limits(self) -> list[int]:
        """Sizes of modules up to which blocks may be offloaded, at most a few."""
        sizes = sorted({block.streamed_bytes for block in self._blocks if block.streamed_bytes})
        steps = [
            size
            for size, larger in zip(sizes, [*sizes[1:], None], strict=True)
            if larger is None or larger > 1.2 * size
        ]
        return steps[-_MAX_STREAM_LIMITS - 1 : -1]

    def _first_sight(self, strategy: str, budgets: Budgets, stream_limit: int | None) -> Placement | Infeasible | None:
        overhead, weights = self._overhead, self._request.gpu_weights
        if stream_limit is None:
            return plan(
                strategy,
                self._blocks,
                budgets,
                overhead_bytes=overhead,
                gpu_weights=weights,
                is_probe=self._is_probe,
            )
        return plan_offloading(self._blocks, budgets, stream_limit, overhead_bytes=overhead, gpu_weights=weights)

    def _settled(self, strategy: str, stream_limit: int | None = None) -> Placement | Infeasible | None:
        """A plan that was judged to fit, with room kept for what was missing before.

        What is kept only grows, and by more with every round, so that it ends.
        """
        budgets = self._request.budgets
        kept: dict[Device, int] = {}
        if stream_limit is not None:
            kept[budgets.accelerators[0]] = stream_limit
        for number in count():
            answer = self._first_sight(strategy, budgets.less(kept), stream_limit)
            if answer is None:
                return None
            if isinstance(answer, Infeasible):
                return _with_kept(answer, kept)
            verdict = self._judge.verdict(answer, budgets)
            if not verdict.missing:
                return replace(answer, budgets=budgets, measured=verdict.memory)
            for device, missing in verdict.missing.items():
                unseen = budgets.get(device) + missing - answer.memory(device, held_only=True).peak_bytes
                step = 1 + budgets.get(device) // _FINENESS << number
                kept[device] = max(unseen, kept.get(device, 0) + step)
        raise AssertionError("counting does not end")


def _offloaded(placement: Placement) -> int:
    """Bytes of weights on cpu and disk."""
    places = zip(placement.blocks, placement.devices, strict=True)
    return sum(block.weights_bytes for block, place in places if not place.is_accelerator)


def _with_kept(answer: Infeasible, kept: Mapping[Device, int]) -> Infeasible:
    """The answer for whole budgets: what was kept free is needed too."""
    more = sum(kept.values()) if answer.device is None else kept.get(answer.device, 0)
    return replace(answer, needed_bytes=answer.needed_bytes + more, budget_bytes=answer.budget_bytes + more)


def _disk_alone(placement: Placement) -> Infeasible:
    """The answer where no device could compute: disk holds weights and nothing else."""
    main = placement.main_device
    budgets = placement.budgets
    largest = max(budgets.accelerators, key=budgets.get, default=main)
    needed = placement.memory(main).peak_bytes
    missing = needed - budgets.get(largest)
    reason = "no device that computes has room for the KV cache and the weights passing through"
    return Infeasible(placement.strategy, reason, needed, budgets.get(largest), max(1, missing), largest, largest)


def map_file(spec: ModelSpec, request: PlanRequest, placement: Placement) -> MapFile:
    """The map that says what `placement` decided, complete for a run."""
    device_map = _device_map(spec, placement)
    return MapFile(
        device_map=device_map,
        model=MapModel(spec.model_id, spec.revision, spec.class_name, spec.dtype, spec.quantization),
        strategy=placement.strategy,
        workload=request.workload,
        devices=tuple(
            _map_device(placement, device, request.budgets.whole(device)) for device in request.budgets.devices
        ),
        transfers=tuple(
            MapTransfer(source, target, num_bytes)
            for (source, target), num_bytes in sorted(transfers(spec, device_map).items())
        ),
        versions=package_versions(),
    )


def _device_map(spec: ModelSpec, placement: Placement) -> dict[str, Device]:
    return {key: Device.parse(value) for key, value in device_map_of(spec, placement).items()}


def _map_device(placement: Placement, device: Device, budget_bytes: int) -> MapDevice:
    memory = placement.memory(device)
    return MapDevice(
        device,
        budget_bytes,
        weights_bytes=memory.weights_bytes,
        kv_cache_bytes=memory.kv_cache_bytes,
        activation_bytes=memory.activation_bytes,
        overhead_bytes=memory.overhead_bytes,
    )
