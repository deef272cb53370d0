"""What a look at a map and the model's description shows: coverage, overlaps, cut blocks, ties, weights over budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from devmap_cli.checking.findings import Finding, entry, listing, quoted
from devmap_cli.checking.misnamed import caught_by, loaded_by, meant_by, part_names
from devmap_cli.checking.neighbours import neighbour
from devmap_cli.devices.device import DISK, Device
from devmap_cli.model.names import is_ancestor, join, owner
from devmap_cli.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

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
    meant = meant_by(device_map, spec)
    return (
        *_mixed_kinds(device_map),
        *_uncovered(device_map, spec, meant),
        *_unmatched_keys(device_map, spec, meant),
        *_overlapping_keys(device_map, spec),
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


def _mixed_kinds(device_map: Mapping[str, Device]) -> Iterator[Finding]:
    """Accelerators of several kinds: torch is built for one, and a bare number means one of that kind."""
    accelerators = sorted({device for device in device_map.values() if device.is_accelerator})
    kinds = list(dict.fromkeys(device.kind for device in accelerators))
    if len(kinds) > 1:
        odd = next(key for key, device in device_map.items() if device.kind == kinds[-1])
        yield Finding(
            "mixed-accelerators",
            "error",
            odd,
            f"the map mixes kinds of accelerators, {listing(accelerators)}, and a model runs on one kind",
            "name all of one kind: 0 and 1, or npu:0 and npu:1",
            "torch knows one kind of accelerator at a time, and takes a bare number for one of that kind",
        )


def _uncovered(
    device_map: Mapping[str, Device], spec: ModelSpec, meant: Mapping[str, tuple[str, ...]]
) -> Iterator[Finding]:
    """The largest modules that the map leaves out whole, and lone tensors of those it names only in part."""
    matched = part_names(spec).keys() & device_map.keys()

    def visit(fqn: str, module: ModuleSpec) -> Iterator[Finding]:
        if owner(fqn, device_map) is not None:
            return
        if not any(is_ancestor(fqn, key) for key in matched):
            tensors = {join(inner, item.name): item for inner, part in module.walk(fqn) for item in part.tensors}
            yield from _left_out(fqn, tensors, device_map, spec, meant)
            return
        for tensor in module.tensors:
            name = join(fqn, tensor.name)
            if name not in device_map:
                yield from _left_out(name, {name: tensor}, device_map, spec, meant)
        for child in module.children:
            yield from visit(join(fqn, child.name), child)

    return visit("", spec.root)


def _left_out(
    name: str,
    tensors: Mapping[str, TensorSpec],
    device_map: Mapping[str, Device],
    spec: ModelSpec,
    meant: Mapping[str, tuple[str, ...]],
) -> Iterator[Finding]:
    if not tensors:
        return
    num_parameters = sum(not tensor.is_buffer for tensor in tensors.values())
    parts = [
        f"{count} {noun}{'s' if count > 1 else ''}"
        for count, noun in ((num_parameters, "parameter"), (len(tensors) - num_parameters, "buffer"))
        if count
    ]
    size = format_bytes(sum(tensor.num_bytes for tensor in tensors.values()))
    yield Finding(
        "uncovered-parameter" if num_parameters else "uncovered-buffer",
        "error",
        name,
        f"{name or 'the whole model'} has no device ({' and '.join(parts)}, {size})",
        _rename(name, meant) or f"add {entry(name, neighbour(name, device_map, spec))}",
        left_out(device_map, next(iter(tensors)), has_parameters=num_parameters > 0),
    )


def _rename(name: str, meant: Mapping[str, tuple[str, ...]]) -> str:
    """The renaming of keys that covers `name` or parts of it; "" where none does."""
    keys = [key for key, parts in meant.items() if any(is_ancestor(name, part) for part in parts)]
    if not keys:
        return ""
    more = f", and likewise {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"{_renamed(keys[0], meant[keys[0]], _visible(keys[0]))}{more}"


def _renamed(key: str, parts: tuple[str, ...], said: str = "it") -> str:
    if len(parts) == 1:
        return f"rename {said} to {parts[0]}"
    return f"name the {len(parts)} parts that {key} means: {parts[0]} to {parts[-1]}"


def _visible(key: str) -> str:
    return key if key == key.strip() else quoted(key)


def left_out(device_map: Mapping[str, Device], tensor: str, *, has_parameters: bool = True) -> str:
    """What from_pretrained does with `tensor`, which no key names, and its module, in words.

    transformers' `expand_device_map` falls back to the cpu; accelerate's `check_device_map`, asked only where there are
    several devices or disk, accepts that for buffers that are not saved.
    """
    refused = has_parameters and (len(set(device_map.values())) > 1 or DISK in device_map.values())
    try:
        caught = loaded_by(tensor, device_map)
    except LookupError:
        return "loading ends there"
    place = "transformers leaves it on the cpu"
    if caught is not None:
        place = f"transformers loads it to {device_map[caught].label}, as its name begins with {caught}"
    return f"{place}{', and accelerate then refuses the map' if refused else ''}"


def _unmatched_keys(
    device_map: Mapping[str, Device], spec: ModelSpec, meant: Mapping[str, tuple[str, ...]]
) -> Iterator[Finding]:
    names = part_names(spec)
    unmatched = [key for key in device_map if key not in names]
    if not unmatched:
        return
    tensors = [name for name, _ in spec.tensors() if owner(name, device_map) is None]
    for key in unmatched:
        ends_loading, consequence = _read_as_pattern(key, tensors)
        yield Finding(
            "unmatched-key",
            "error" if ends_loading else "warning",
            key,
            f"{_visible(key)} names no part of {spec.class_name}",
            _renamed(key, meant[key]) if key in meant else "remove it",
            consequence,
        )


def _read_as_pattern(key: str, tensors: Iterable[str]) -> tuple[bool, str]:
    """Whether loading ends because of a key that names nothing, and what transformers does with it.

    Args:
        tensors: those that no key names.
    """
    try:
        caught = caught_by(key, tensors)
    except LookupError:
        return True, "transformers takes it for a pattern, and loading ends with an error"
    if caught is None:
        return False, "harmless: transformers ignores it"
    return False, f"transformers takes it for the beginning of {caught}"


def _overlapping_keys(device_map: Mapping[str, Device], spec: ModelSpec) -> Iterator[Finding]:
    names = part_names(spec)
    keys = [key for key in device_map if key in names]
    for key in keys:
        device = device_map[key]
        outer = owner(key, (other for other in keys if other != key))
        if outer is not None:
            differs = device_map[outer] != device
            yield Finding(
                "overlapping-keys",
                "error" if differs else "warning",
                key,
                f"{key} is on {device.label}, and inside {outer or 'the root'}, on {device_map[outer].label}",
                f"replace {entry(outer, device_map[outer])} by its parts" if differs else f"remove {quoted(key)}",
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
        move = joined(group, device_map)
        if move is not None:
            keys = [owner(name, device_map) for name in group]
            devices = dict.fromkeys(device_map[key] for key in keys if key is not None)
            is_off = any(not device.is_accelerator for device in devices)
            yield Finding(
                "split-tie",
                "error",
                group[0],
                f"{' and '.join(group)} share their weights, and are on {listing(devices)}",
                f"put them on one device: {entry(*move)}",
                "each of them holds a copy"
                if is_off
                else "accelerate ties them again on one device, where what the other computes with is not",
            )


def joined(tied: Iterable[str], device_map: Mapping[str, Device]) -> tuple[str, Device] | None:
    """The key to change, and the device to put it on, so that tensors that share a storage are on one; None if so."""
    keys = [key for key in (owner(name, device_map) for name in tied) if key is not None]
    devices = list(dict.fromkeys(device_map[key] for key in keys))
    if len(devices) < 2:
        return None
    return next(key for key in keys if device_map[key] == devices[-1]), devices[0]


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
