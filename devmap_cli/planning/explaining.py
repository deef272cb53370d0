"""Why a placement leaves devices unused."""

from __future__ import annotations

from collections.abc import Set

from devmap_cli.devices.device import CPU, DISK, Device
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
    used = set(placement.devices)
    if not device.is_accelerator:
        return _idle_tier(device, used)
    free = placement.budgets[device] - placement.overhead_bytes.get(device, 0)
    smallest = min((block.resident_bytes + block.largest_transient_bytes for block in placement.blocks), default=0)
    if free < smallest:
        return f"too small: {format_bytes(max(0, free))} for blocks, the smallest takes {format_bytes(smallest)}"
    if any(not place.is_accelerator for place in used):
        return "no room there for the KV cache and the passing weights of what is offloaded"
    if placement.strategy == "fewest":
        count = sum(place.is_accelerator for place in used)
        return f"{count} {'accelerator holds' if count == 1 else 'accelerators hold'} all"
    if placement.strategy == "sequential":
        return _passed_over(placement, device)
    if placement.strategy == "balanced_low_0" and device == placement.budgets.accelerators[0]:
        return "the other accelerators hold all"
    if len(placement.blocks) < len(placement.budgets.accelerators):
        return f"there are only {len(placement.blocks)} blocks"
    return "using it would not lower the highest use of the others"


def _idle_tier(device: Device, used: Set[Device]) -> str:
    if device == CPU and DISK in used:
        return "no room there for what is offloaded"
    holders = ["the accelerators"] if any(place.is_accelerator for place in used) else []
    holders += [CPU.label] if CPU in used else []
    return f"all fits on {' and '.join(holders)}"


def _passed_over(placement: Placement, device: Device) -> str:
    """Why devices were filled without this accelerator among them."""
    accelerators = placement.budgets.accelerators
    later = set(accelerators[accelerators.index(device) + 1 :])
    places = zip(placement.blocks, placement.devices, strict=True)
    following = next((block.fqns[0] for block, place in places if place in later), None)
    return "the devices before it hold all" if following is None else f"no room there for {following} and what it needs"
