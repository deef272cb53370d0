"""Why a placement leaves devices unused."""

from __future__ import annotations

from devmap_cli.devices.device import CPU, Device
from devmap_cli.planning.nouns import Placement
from devmap_cli.units import format_bytes


def unused_reasons(placement: Placement) -> list[tuple[Device, str]]:
    """Each device that holds nothing, with the reason."""
    used = set(placement.devices)
    return [(device, _reason(placement, device)) for device, _ in placement.budgets if device not in used]


def unused_accelerators(placement: Placement) -> list[tuple[Device, str]]:
    """Each accelerator that holds nothing, with the reason."""
    return [(device, reason) for device, reason in unused_reasons(placement) if device.is_accelerator]


def _reason(placement: Placement, device: Device) -> str:
    if not device.is_accelerator:
        where = "the accelerators" if placement.budgets.accelerators else CPU.label
        return f"all fits on {where}"
    free = placement.budgets[device] - placement.overhead_bytes.get(device, 0)
    smallest = min((block.resident_bytes + block.transient_bytes for block in placement.blocks), default=0)
    if free < smallest:
        return f"too small: {format_bytes(max(0, free))} for blocks, the smallest takes {format_bytes(smallest)}"
    if any(not place.is_accelerator for place in placement.devices):
        return "no room there for the KV cache and the passing weights of what is offloaded"
    used = sum(1 for other in placement.budgets.accelerators if other in set(placement.devices))
    if placement.strategy == "fewest":
        return f"{used} {'accelerator holds' if used == 1 else 'accelerators hold'} all"
    if placement.strategy == "sequential":
        return "the devices before it hold all"
    if placement.strategy == "balanced_low_0" and device == placement.budgets.accelerators[0]:
        return "the other accelerators hold all"
    if len(placement.blocks) < len(placement.budgets.accelerators):
        return f"there are only {len(placement.blocks)} blocks"
    return "using it would not lower the highest use of the others"
