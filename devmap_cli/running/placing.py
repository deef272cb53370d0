"""From a map's devices to those of this machine, as transformers and torch name them."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from devmap_cli.devices.device import CPU, DISK, Device
from devmap_cli.errors import SurroundingsError
from devmap_cli.running.simulated import SIMULATED_KIND

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_NUMBERED = ("cuda", "xpu", SIMULATED_KIND)


def on_this_machine(device: Device, kind: str | None) -> Device:
    """The device that a map's `device` means where accelerators are of `kind`: a number means any kind."""
    if kind == SIMULATED_KIND and device.is_accelerator:
        return Device(kind, device.index or 0)
    if device.kind != "cuda" or kind is None:
        return device
    return Device("mps") if kind == "mps" else replace(device, kind=kind)


def transformers_map(device_map: Mapping[str, Device]) -> dict[str, int | str]:
    """The map as from_pretrained takes it: numbers for the kinds whose `Tensor.to` takes numbers."""
    return {
        module: device.index if device.kind in _NUMBERED and device.index is not None else str(device)
        for module, device in device_map.items()
    }


def check_devices_here(devices: Iterable[Device], kind: str | None, model: str) -> None:
    """See that this machine, with accelerators of `kind`, has every device of a map.

    Raises:
        SurroundingsError: it lacks some.
    """
    here = {CPU, DISK, *_accelerators(kind)}
    lacking = sorted(set(devices) - here)
    if lacking:
        raise SurroundingsError(
            f"the map needs {_listing(lacking)}, and this machine has {_listing(sorted(here))}",
            f"plan for what is here: devmap plan {shlex.quote(model)} -o map.json; or try the map with --simulate",
        )


def _accelerators(kind: str | None) -> list[Device]:
    import torch

    if kind is None:
        return []
    if kind == "mps":
        return [Device("mps")]
    return [Device(kind, index) for index in range(torch.get_device_module(kind).device_count())]


def _listing(devices: list[Device]) -> str:
    *first, last = (device.label for device in devices)
    return f"{', '.join(first)} and {last}" if first else last
