"""What a look at a map and the model's description shows: coverage, overlaps, cut blocks, ties, weights over budget."""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING

from devmap_cli.checking.findings import Finding, entry, listing
from devmap_cli.checking.neighbours import neighbour
from devmap_cli.devices.device import DISK, Device
from devmap_cli.model.names import is_ancestor, join, owner
from devmap_cli.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from devmap_cli.model.spec import ModelSpec, ModuleSpec, TensorSpec


def check_map(
    device_map: Mapping[str, Device], spec: ModelSpec, budgets: Mapping[Device, int] | None = None
) -> tuple[Finding, ...]:
    """Everything wrong with `device_map` for the model `spec`.

    Args:
        device_map: devices by module name, as read from a map.
        spec: the model that the map is for.
        budgets: bytes that each device may take; None leaves budgets unchecked.
    """
    return (
        *_uncovered(device_map, spec),
        *_unmatched_keys(device_map, spec),
        *_overlapping_keys(device_map),
        *_split_blocks(device_map, spec),
        *_split_ties(device_map, spec),
        *_over_budget(device_map, spec, budgets or {}),
    )


def weights_by_device(device_map: Mapping[str, Device], spec: ModelSpec) -> dict[Device, int]:
    """Bytes of weights and buffers per device of the map; shared ones count once, uncovered ones nowhere."""
    totals = dict.fromkeys(device_map.values(), 0)
    shared = spec.tied_to_another()
    for name, tensor in spec.tensors():
        key = owner(name, device_map)
        if key is not None and name not in shared:
            totals[device_map[key]] += tensor.num_bytes
    return totals


def _uncovered(device_map: Mapping[str, Device], spec: ModelSpec) -> Iterator[Finding]:
    """The largest modules that the map leaves out whole, and lone tensors of those it names only in part."""

    matched = part_names(spec) & device_map.keys()

    def visit(fqn: str, module: ModuleSpec) -> Iterator[Finding]:
        if owner(fqn, device_map) is not None:
            return
        if not any(is_ancestor(fqn, key) for key in matched):
            tensors = [tensor for _, inner in module.walk() for tensor in inner.tensors]
            yield from _left_out(fqn, tensors, device_map, spec)
            return
        for tensor in module.tensors:
            name = join(fqn, tensor.name)
            if name not in device_map:
                yield from _left_out(name, [tensor], device_map, spec)
        for child in module.children:
            yield from visit(join(fqn, child.name), child)

    return visit("", spec.root)


def _left_out(
    name: str, tensors: list[TensorSpec], device_map: Mapping[str, Device], spec: ModelSpec
) -> Iterator[Finding]:
    if not tensors:
        return
    num_parameters = sum(not tensor.is_buffer for tensor in tensors)
    parts = [
        f"{count} {noun}{'s' if count > 1 else ''}"
        for count, noun in ((num_parameters, "parameter"), (len(tensors) - num_parameters, "buffer"))
        if count
    ]
    size = format_bytes(sum(tensor.num_bytes for tensor in tensors))
    yield Finding(
        "uncovered-parameter" if num_parameters else "uncovered-buffer",
        "error",
        name,
        f"{name or 'the whole model'} has no device ({' and '.join(parts)}, {size})",
        f"add {entry(name, neighbour(name, device_map, spec))}",
        left_on_cpu(device_map, has_parameters=num_parameters > 0),
    )


def left_on_cpu(device_map: Mapping[str, Device], *, has_parameters: bool = True) -> str:
    """What from_pretrained does with a module that no key names, in words.

    transformers' `expand_device_map` falls back to the cpu; accelerate's `check_device_map`, asked only where there are
    several devices or disk, accepts that for buffers that are not saved.
    """
    refused = has_parameters and (len(set(device_map.values())) > 1 or DISK in device_map.values())
    return f"transformers leaves it on the cpu{', and accelerate then refuses the map' if refused else ''}"


def _unmatched_keys(device_map: Mapping[str, Device], spec: ModelSpec) -> Iterator[Finding]:
    names = part_names(spec)
    for key in device_map:
        if key not in names:
            alike = [name for name in names if name.rpartition(".")[2] == key.rpartition(".")[2]]
            close = difflib.get_close_matches(key, sorted(alike or names), n=1)
            yield Finding(
                "unmatched-key",
                "warning",
                key,
                f"{key} names no part of {spec.class_name}",
                f"rename it to {close[0]}" if close and close[0] not in device_map else "remove it",
                "harmless: transformers ignores it",
            )


def _overlapping_keys(device_map: Mapping[str, Device]) -> Iterator[Finding]:
    for key, device in device_map.items():
        outer = owner(key, (other for other in device_map if other != key))
        if outer is not None:
            differs = device_map[outer] != device
            yield Finding(
                "overlapping-keys",
                "error" if differs else "warning",
                key,
                f"{key} is on {device.label}, and inside {outer or 'the root'}, on {device_map[outer].label}",
                f"replace {entry(outer, device_map[outer])} by its parts" if differs else f"remove {json.dumps(key)}",
                "the longer name decides",
            )


def bytes_by_device(fqn: str, module: ModuleSpec, device_map: Mapping[str, Device]) -> dict[Device, int]:
    """Bytes of `module`, named `fqn`, on each device that holds some of it, in definition order."""
    sizes: dict[Device, int] = {}
    for inner_fqn, inner in module.walk(fqn):
        for tensor in inner.tensors:
            key = owner(join(inner_fqn, tensor.name), device_map)
            if key is not None:
                sizes[device_map[key]] = sizes.get(device_map[key], 0) + tensor.num_bytes
    return sizes


def is_whole(module: ModuleSpec) -> bool:
    """Whether all of `module` belongs on one device: blocks, and modules that compute with their own tensors alone."""
    return module.no_split or not module.children


def _split_blocks(device_map: Mapping[str, Device], spec: ModelSpec) -> Iterator[Finding]:
    def visit(fqn: str, module: ModuleSpec) -> Iterator[Finding]:
        if not is_whole(module):
            for child in module.children:
                yield from visit(join(fqn, child.name), child)
            return
        sizes = bytes_by_device(fqn, module, device_map)
        if len(sizes) > 1:
            yield Finding(
                "split-block",
                "error",
                fqn,
                f"{fqn} ({module.class_name}) may not be split, and is on {listing(sizes)}",
                f"put it on one device: {entry(fqn, max(sizes, key=lambda device: sizes[device]))}",
                "sums within it meet tensors of different devices",
            )

    return visit("", spec.root)


def _split_ties(device_map: Mapping[str, Device], spec: ModelSpec) -> Iterator[Finding]:
    for group in spec.ties:
        keys = {name: owner(name, device_map) for name in group}
        devices = list(dict.fromkeys(device_map[key] for key in keys.values() if key is not None))
        if len(devices) > 1:
            last = next(key for key in keys.values() if key is not None and device_map[key] == devices[-1])
            yield Finding(
                "split-tie",
                "error",
                group[0],
                f"{' and '.join(group)} share their weights, and are on {listing(devices)}",
                f"put them on one device: {entry(last, devices[0])}",
                "each of the devices holds a copy when it computes",
            )


def _over_budget(device_map: Mapping[str, Device], spec: ModelSpec, budgets: Mapping[Device, int]) -> Iterator[Finding]:
    for device, weights_bytes in weights_by_device(device_map, spec).items():
        missing_bytes = weights_bytes - budgets.get(device, weights_bytes)
        if missing_bytes > 0:
            yield Finding(
                "over-budget",
                "error",
                str(device.map_value),
                f"{device.label} gets {format_bytes(weights_bytes)} of weights: {format_bytes(missing_bytes)}"
                f" over its budget of {format_bytes(budgets[device])}",
                f"move {format_bytes(missing_bytes)} or more from {device.label} to another device",
                "loading runs out of memory",
            )


def part_names(spec: ModelSpec) -> set[str]:
    """All names that a key of a map may have: modules and, for those held by a split module, tensors."""
    return {fqn for fqn, _ in spec.modules()} | {name for name, _ in spec.tensors()}
