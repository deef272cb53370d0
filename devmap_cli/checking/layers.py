"""What the placement of layers means for a run: hops between devices, layers off the GPUs, quantized layers there."""

from __future__ import annotations

from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING

from devmap_cli.checking.findings import Finding, listing
from devmap_cli.devices.device import CPU
from devmap_cli.model.names import is_ancestor, owner, parent
from devmap_cli.model.quantization.scheme import NO_KERNELS, OFF_GPU, least_capability, quantization_in_map

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from devmap_cli.devices.cards import Card
    from devmap_cli.devices.device import Device
    from devmap_cli.model.spec import ModelSpec


def check_layers(
    device_map: Mapping[str, Device], spec: ModelSpec, cards: Mapping[Device, Card] = MappingProxyType({})
) -> tuple[Finding, ...]:
    """What is wrong with where the map puts layers (the modules that may not be split).

    Args:
        device_map: in today's names; layers that it does not cover are passed over.
        cards: of the accelerators, as far as they are known.
    """
    places = _places(device_map, spec)
    return (
        *quantized_off_gpu(device_map, spec),
        *_quantized_on_old_cards(places, spec, cards),
        *_back_and_forth(places),
        *(_mostly_off_gpu(places) if any(device.is_accelerator for device in device_map.values()) else ()),
    )


def _places(device_map: Mapping[str, Device], spec: ModelSpec) -> dict[str, Device]:
    """The device of each layer that lies on one, in execution order, stacks that the order does not know last.

    A stack of which it knows only a part, as of layers that run for images alone, goes in definition order.
    """
    layers = [fqn for fqn, module in spec.modules() if module.no_split]
    position = {fqn: index for index, fqn in enumerate(spec.execution_order)}
    ordered = {}
    for stack in _stacks(dict.fromkeys(layers)).values():
        known = [position[fqn] for fqn in stack if fqn in position]
        first = min(known, default=len(position))
        for index, fqn in enumerate(stack):
            ordered[fqn] = (first, index) if len(known) < len(stack) else (position[fqn], 0)
    keys = {fqn: owner(fqn, device_map) for fqn in sorted(layers, key=lambda fqn: ordered[fqn])}
    return {fqn: device_map[key] for fqn, key in keys.items() if key is not None}


def quantized_off_gpu(device_map: Mapping[str, Device], spec: ModelSpec) -> Iterator[Finding]:
    """Parts of a quantized model where they cannot run."""
    quantization = quantization_in_map(spec.quantization)
    method = quantization.method if quantization else ""
    consequence = OFF_GPU.get(method)
    devices = set(device_map.values())
    is_spread = any(device.is_accelerator for device in devices)
    if consequence is None or devices == {CPU} or (consequence == NO_KERNELS and not is_spread):
        return
    places = _places(device_map, spec)
    for key, device in device_map.items():
        holds_layers = any(is_ancestor(key, fqn) or is_ancestor(fqn, key) for fqn in places)
        if not device.is_accelerator and (holds_layers or consequence != NO_KERNELS):
            yield Finding(
                "quantized-on-cpu",
                "error",
                key,
                f"{key or 'the whole model'} of this {method} model is on {device.label}",
                "put it on a GPU",
                consequence,
            )


def _quantized_on_old_cards(
    places: Mapping[str, Device], spec: ModelSpec, cards: Mapping[Device, Card]
) -> Iterator[Finding]:
    """Quantized layers on cards that have no kernels for them."""
    method, least = least_capability(spec.quantization)
    for device in dict.fromkeys(places.values()):
        card = cards.get(device)
        if card is None or card.compute_capability is None or card.compute_capability >= least:
            continue
        own = card.compute_capability
        yield Finding(
            "quantized-on-old-card",
            "error",
            next(fqn for fqn, place in places.items() if place == device),
            f"{method} weights are on {device.label}, a {card.name}",
            "take newer cards, or weights of another kind",
            f"they run from compute capability {least[0]}.{least[1]} on, and it has {own[0]}.{own[1]}",
        )


def _back_and_forth(places: Mapping[str, Device]) -> Iterator[Finding]:
    """Per stack of layers, as towers run one after the other: devices that the run leaves and comes back to."""
    main = next((device for device in places.values() if device.is_accelerator), None)
    for stack, layers in _stacks(places).items():
        computing = [places[fqn] if places[fqn].is_accelerator else main or places[fqn] for fqn in layers]
        runs = [device for device, _ in groupby(computing)]
        needed = len(set(runs)) - 1
        if len(runs) - 1 > needed:
            shown = " → ".join(device.label for device in runs[:5]) + (" → …" if len(runs) > 5 else "")
            yield Finding(
                "back-and-forth",
                "warning",
                stack,
                f"the layers of {stack} go {shown}",
                "give each device layers that follow each other",
                f"{len(runs) - 1} crossings in each pass through them where {needed} would do",
            )


def _mostly_off_gpu(places: Mapping[str, Device]) -> Iterator[Finding]:
    off = [fqn for fqn, device in places.items() if not device.is_accelerator]
    if off and 3 * len(off) >= len(places):
        devices = dict.fromkeys(places[fqn] for fqn in off)
        stacks = _stacks(dict.fromkeys(off))
        yield Finding(
            "mostly-on-cpu",
            "warning",
            max(stacks, key=lambda stack: len(stacks[stack])),
            f"{len(off)} of {len(places)} layers are on {listing(devices)}",
            "take a smaller dtype, a quantized model or more GPUs",
            "their weights cross to a GPU each time they compute, which decides the speed",
        )


def _stacks(places: Mapping[str, object]) -> dict[str, Sequence[str]]:
    stacks: dict[str, list[str]] = {}
    for fqn in places:
        stacks.setdefault(parent(fqn), []).append(fqn)
    return {stack: tuple(layers) for stack, layers in stacks.items()}
