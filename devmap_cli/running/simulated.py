"""The seam to simulated devices: a machine with the accelerators that a map asks for."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from devmap_cli.devices.detection import detect
from devmap_cli.devices.device import CPU

if TYPE_CHECKING:
    from collections.abc import Iterator

    from devmap_cli.mapfile import MapFile

SIMULATED_KIND = "sim"


@contextmanager
def simulated_machine(document: MapFile) -> Iterator[None]:
    """Have every accelerator of the map, each with its budget as memory; one without a budget has the host's.

    KV caches are quantized by the simulation's own layers, which make the numbers of the packages that real ones need.
    """
    from devmap_cli.simulation.backend import simulated_devices
    from devmap_cli.simulation.quantized_cache import quantized_layers

    budgets = {item.device: item.budget_bytes for item in document.devices}
    wanted = {device for device in document.device_map.values() if device.is_accelerator}
    capacities = {device.index or 0: budgets.get(device, detect([CPU])[0].total_bytes) for device in wanted}
    sizes = [capacities.get(index, 0) for index in range(max(capacities, default=-1) + 1)]
    with simulated_devices(sizes), quantized_layers():
        yield
