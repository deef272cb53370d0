"""From a described model and budgets to a placement, and from a placement to a map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import DISK, Device
from devmap_cli.mapfile import MapDevice, MapFile, MapModel, MapTransfer, MapWorkload
from devmap_cli.model.cache import package_versions
from devmap_cli.model.spec import ModelSpec
from devmap_cli.planning.blocks import blocks_of, device_map_of
from devmap_cli.planning.nouns import Block, Infeasible, Placement
from devmap_cli.planning.pins import Pin, apply_pins
from devmap_cli.planning.strategies import plan
from devmap_cli.planning.transfers import transfers


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


def make_plan(spec: ModelSpec, request: PlanRequest) -> Placement | Infeasible:
    """Place the blocks of `spec` as `request` says.

    Raises:
        RequestError: a pin, a weight or the strategy does not go with the model or the budgets.
    """
    workload = request.workload
    tokens = 0 if request.weights_only else workload.prompt_tokens + workload.max_new_tokens
    blocks = blocks_of(spec, tokens, workload.batch_size)
    if request.weights_only:
        blocks = tuple(replace(block, kv_cache_bytes=0, transient_bytes=0, streamed_bytes=0) for block in blocks)
    return _plan_for_offloading(apply_pins(blocks, request.pins, spec), request)


def _plan_for_offloading(blocks: tuple[Block, ...], request: PlanRequest) -> Placement | Infeasible:
    """Plan, and where this leaves all accelerators empty, offload as `auto` does: it also skips blocks at the front."""
    answer = _plan_with_room_to_stream(blocks, request)
    if isinstance(answer, Placement) and set(answer.devices) == {DISK}:
        return _disk_alone(answer)
    idle = isinstance(answer, Placement) and not any(device.is_accelerator for device in answer.devices)
    if idle and request.budgets.accelerators and request.strategy != "auto":
        other = _plan_with_room_to_stream(blocks, replace(request, strategy="auto"))
        if isinstance(other, Placement) and any(device.is_accelerator for device in other.devices):
            return replace(other, strategy=request.strategy)
    return answer


def _plan_with_room_to_stream(blocks: tuple[Block, ...], request: PlanRequest) -> Placement | Infeasible:
    """Plan, keeping room on the main device for the KV cache and the passing weights of what is offloaded.

    How much that is shows only in a plan, so plans are made with more room kept until one holds; what is kept only
    grows, and the whole cache and the largest module are its limit.
    """
    kept: dict[Device, int] = {}
    while True:
        budgets = request.budgets.less(kept)
        answer = plan(request.strategy, blocks, budgets, gpu_weights=request.gpu_weights)
        if isinstance(answer, Infeasible):
            return answer
        main = answer.main_device
        over = answer.memory(main).peak_bytes - request.budgets.get(main)
        if over <= 0 or main not in request.budgets.devices:
            return replace(answer, budgets=request.budgets)
        kept[main] = kept.get(main, 0) + over


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
    device_map = {key: Device.parse(value) for key, value in device_map_of(spec, placement).items()}
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
