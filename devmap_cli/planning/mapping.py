"""From a placement to a map."""

from __future__ import annotations

from typing import TYPE_CHECKING

from devmap_cli.devices.device import Device
from devmap_cli.mapfile import MapDevice, MapFile, MapModel, MapTransfer
from devmap_cli.model.cache import package_versions
from devmap_cli.model.spec import ModelSpec
from devmap_cli.planning.blocks import device_map_of
from devmap_cli.planning.nouns import Placement
from devmap_cli.planning.transfers import transfers

if TYPE_CHECKING:
    from devmap_cli.planning.means import PlanRequest


def map_file(spec: ModelSpec, request: PlanRequest, placement: Placement) -> MapFile:
    """The map that says what `placement` decided, complete for a run."""
    device_map = places_of(spec, placement)
    return MapFile(
        device_map=device_map,
        model=MapModel(spec.model_id, spec.revision, spec.class_name, spec.dtype, spec.quantization),
        strategy=placement.strategy,
        workload=request.workload,
        devices=tuple(_map_device(placement, device, request) for device in request.budgets.devices),
        transfers=tuple(
            MapTransfer(source, target, num_bytes)
            for (source, target), num_bytes in sorted(transfers(spec, device_map).items())
        ),
        versions=package_versions(),
        weights_only=request.weights_only,
    )


def places_of(spec: ModelSpec, placement: Placement) -> dict[str, Device]:
    """The device map of `placement`."""
    return {key: Device.parse(value) for key, value in device_map_of(spec, placement).items()}


def _map_device(placement: Placement, device: Device, request: PlanRequest) -> MapDevice:
    memory, card = placement.memory(device), request.cards.get(device)
    return MapDevice(
        device,
        request.budgets.whole(device),
        weights_bytes=memory.weights_bytes,
        kv_cache_bytes=memory.kv_cache_bytes,
        activation_bytes=memory.activation_bytes,
        overhead_bytes=memory.overhead_bytes,
        card=None if card is None else card.name,
    )
