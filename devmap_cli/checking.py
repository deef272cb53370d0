"""The judge: what is wrong with a device map, derived anew from the map and the model alone."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from devmap_cli.devices.device import CPU, Device
from devmap_cli.model.names import is_ancestor, join, owner
from devmap_cli.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from devmap_cli.model.spec import ModelSpec, ModuleSpec, TensorSpec

Code = Literal[
    "uncovered-parameter",
    "uncovered-buffer",
    "unmatched-key",
    "overlapping-keys",
    "split-block",
    "split-tie",
    "over-budget",
]
Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong with a map.

    Args:
        code: what kind of thing; stable, for scripts.
        severity: an error forbids a run; a warning does not.
        module: the module, tensor or key that it is about, or the device of an overfull one.
        message: what is wrong, one line.
        fix: the change to the map that would mend it, one line.
    """

    code: Code
    severity: Severity
    module: str
    message: str
    fix: str


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

    matched = _names(spec) & device_map.keys()

    def visit(fqn: str, module: ModuleSpec) -> Iterator[Finding]:
        if owner(fqn, device_map) is not None:
            return
        if not any(is_ancestor(fqn, key) for key in matched):
            yield from _left_out(fqn, [tensor for _, inner in module.walk() for tensor in inner.tensors], device_map)
            return
        for tensor in module.tensors:
            name = join(fqn, tensor.name)
            if name not in device_map:
                yield from _left_out(name, [tensor], device_map)
        for child in module.children:
            yield from visit(join(fqn, child.name), child)

    return visit("", spec.root)


def _left_out(name: str, tensors: list[TensorSpec], device_map: Mapping[str, Device]) -> Iterator[Finding]:
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
        f"add {_entry(name, _neighbour(name, device_map))}",
    )


def _neighbour(name: str, device_map: Mapping[str, Device]) -> Device:
    """The device of the key that shares the longest beginning with `name`, the first of equals."""

    def shared_parts(key: str) -> int:
        pairs = zip(key.split("."), name.split("."), strict=False)
        return next((index for index, (left, right) in enumerate(pairs) if left != right), len(key.split(".")))

    return device_map[max(device_map, key=shared_parts)] if device_map else CPU


def _unmatched_keys(device_map: Mapping[str, Device], spec: ModelSpec) -> Iterator[Finding]:
    names = _names(spec)
    for key in device_map:
        if key not in names:
            alike = [name for name in names if name.rpartition(".")[2] == key.rpartition(".")[2]]
            close = difflib.get_close_matches(key, sorted(alike or names), n=1)
            yield Finding(
                "unmatched-key",
                "warning",
                key,
                f"{key} names no part of {spec.class_name}",
                f"rename it to {close[0]}" if close else "remove it",
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
                f"replace {_entry(outer, device_map[outer])} by its parts" if differs else f"remove {json.dumps(key)}",
            )


def _split_blocks(device_map: Mapping[str, Device], spec: ModelSpec) -> Iterator[Finding]:
    def visit(fqn: str, module: ModuleSpec) -> Iterator[Finding]:
        if not module.no_split:
            for child in module.children:
                yield from visit(join(fqn, child.name), child)
            return
        tensors = (join(inner_fqn, tensor.name) for inner_fqn, inner in module.walk(fqn) for tensor in inner.tensors)
        keys = (owner(tensor, device_map) for tensor in tensors)
        devices = list(dict.fromkeys(device_map[key] for key in keys if key is not None))
        if len(devices) > 1:
            yield Finding(
                "split-block",
                "error",
                fqn,
                f"{fqn} ({module.class_name}) may not be split, and is on {_listing(devices)}",
                f"put it on one device: {_entry(fqn, devices[0])}",
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
                f"{' and '.join(group)} share their weights, and are on {_listing(devices)}",
                f"put them on one device: {_entry(last, devices[0])}",
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
            )


def _names(spec: ModelSpec) -> set[str]:
    """All names that a key of a map may have: modules and, for those held by a split module, tensors."""
    return {fqn for fqn, _ in spec.modules()} | {name for name, _ in spec.tensors()}


def _entry(name: str, device: Device) -> str:
    """The map's line for `name`, as JSON writes it."""
    return f"{json.dumps(name)}: {json.dumps(device.map_value)}"


def _listing(devices: list[Device]) -> str:
    return " and ".join(device.label for device in devices)
