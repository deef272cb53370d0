"""Mends a map: every module on one device, blocks whole, tied weights together, no key for nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from devmap_cli.checking.coverage import is_whole
from devmap_cli.checking.misnamed import meant_by, part_names
from devmap_cli.checking.neighbours import neighbour
from devmap_cli.model.names import is_ancestor, join, owner, parent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from devmap_cli.devices.device import Device
    from devmap_cli.model.spec import ModelSpec, ModuleSpec


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between a map and its repaired form.

    `device` is where the module is now, None where its key is gone; `reason` is in words.
    """

    module: str
    device: Device | None
    reason: str

    def to_document(self) -> dict[str, object]:
        """The change as plain data."""
        device = None if self.device is None else self.device.map_value
        return {"module": self.module, "device": device, "reason": self.reason}


def repair(device_map: Mapping[str, Device], spec: ModelSpec) -> tuple[dict[str, Device], tuple[Change, ...]]:
    """A map without findings of coverage, overlaps, cuts and ties, as close to `device_map` as may be.

    Keys that name nothing are renamed to what they seem to mean, or go. What the map leaves out goes with the module
    that it feeds, a cut block to the device that holds most of it, tied weights
    to the device of the first of them.

    Args:
        device_map: in today's names.

    Returns:
        The map in module order, and what changed.
    """
    names, meant = part_names(spec), meant_by(device_map, spec)
    before = {
        name: device for key, device in device_map.items() for name in ((key,) if key in names else meant.get(key, ()))
    }
    after = _Writer(before, _assigned(before, spec)).keys("", spec.root)
    renamed = [Change(name, device_map[key], f"was {key}") for key, found in meant.items() for name in found]
    unknown = [key for key in device_map if key not in names and key not in meant]
    dropped = [Change(key, None, "names no part of the model") for key in unknown]
    changes = (*renamed, *dropped, *_changes(before, after, spec))
    return (after, changes) if changes else (dict(device_map), ())


def _assigned(device_map: Mapping[str, Device], spec: ModelSpec) -> dict[str, Device]:
    """The device of every tensor."""
    devices: dict[str, Device] = {}
    for names in _inseparable(spec):
        device = _device_for(names, device_map, spec)
        devices.update(dict.fromkeys(names, device))
    return devices


def _inseparable(spec: ModelSpec) -> list[list[str]]:
    """Names of tensors that belong on one device: of a block, of a module without parts, and of all tied to them."""
    groups: dict[str, list[str]] = {}
    group_of: dict[str, str] = {}
    for name, block in _blocks_of_tensors("", spec.root, None):
        group_of[name] = name if block is None else block
        groups.setdefault(group_of[name], []).append(name)
    for tied in spec.ties:
        first, *others = dict.fromkeys(group_of[name] for name in tied)
        for other in others:
            moved = groups.pop(other)
            groups[first] += moved
            group_of.update(dict.fromkeys(moved, first))
    return list(groups.values())


def _blocks_of_tensors(fqn: str, module: ModuleSpec, block: str | None) -> Iterator[tuple[str, str | None]]:
    """Every tensor with the block that it is part of, if any."""
    block = fqn if block is None and is_whole(module) else block
    yield from ((join(fqn, tensor.name), block) for tensor in module.tensors)
    for child in module.children:
        yield from _blocks_of_tensors(join(fqn, child.name), child, block)


def _device_for(names: Sequence[str], device_map: Mapping[str, Device], spec: ModelSpec) -> Device:
    """The device that has most bytes of `names`; where none has any, that of what they feed."""
    sizes = {name: tensor.num_bytes for name, tensor in spec.tensors()} if len(names) > 1 else {}
    shared = spec.tied_to_another()
    totals: dict[Device, int] = {}
    for name in names:
        key = owner(name, device_map)
        if key is not None:
            totals.setdefault(device_map[key], 0)
            totals[device_map[key]] += 0 if name in shared else sizes.get(name, 0)
    if totals:
        return max(totals, key=lambda device: totals[device])
    return neighbour(names[0] if len(names) == 1 else _smallest_module(names), device_map, spec)


def _smallest_module(names: Sequence[str]) -> str:
    """The module that holds all of `names`; of names far apart, that of the first."""
    common = parent(names[0])
    while not all(is_ancestor(common, name) for name in names):
        common = parent(common)
    return common or parent(names[0])


class _Writer:
    """Writes the keys of a map in which every tensor has its device, those of the map before where they still hold."""

    def __init__(self, before: Mapping[str, Device], devices: Mapping[str, Device]) -> None:
        self._before = before
        self._devices = devices

    def keys(self, fqn: str, module: ModuleSpec) -> dict[str, Device]:
        """The keys for `module`, named `fqn`, and all below it."""
        tensors = [join(inner_fqn, tensor.name) for inner_fqn, inner in module.walk(fqn) for tensor in inner.tensors]
        devices = {self._devices[name] for name in tensors}
        if not tensors and fqn in self._before:
            return {fqn: self._before[fqn]}
        if len(devices) == 1 and self._is_one_key(fqn, module, tensors):
            return {fqn: devices.pop()}
        written = {join(fqn, tensor.name): self._devices[join(fqn, tensor.name)] for tensor in module.tensors}
        for child in module.children:
            written |= self.keys(join(fqn, child.name), child)
        return written

    def _is_one_key(self, fqn: str, module: ModuleSpec, tensors: Sequence[str]) -> bool:
        """Whether the map had this key, named no part of it, or named parts of a block not all, or apart."""
        if fqn in self._before or not any(is_ancestor(fqn, key) for key in self._before):
            return True
        keys = [owner(name, self._before) for name in tensors]
        return is_whole(module) and len({None if key is None else self._before[key] for key in keys}) > 1


def _changes(before: Mapping[str, Device], after: Mapping[str, Device], spec: ModelSpec) -> Iterator[Change]:
    tied = {name: group for group in spec.ties for name in group}
    tensors: dict[str, list[str]] = {key: [] for key in after}
    for name, _ in spec.tensors():
        key = owner(name, after)
        if key is not None:
            tensors[key].append(name)
    for key, device in after.items():
        if before.get(key) != device or any(is_ancestor(key, other) and other != key for other in before):
            yield Change(key, device, _reason(tensors[key], device, before, tied))
    for key in before:
        if key not in after and not any(is_ancestor(outer, key) for outer in after):
            inner = sum(is_ancestor(key, name) for name in after)
            yield Change(key, None, f"{inner} parts of it are named instead")


def _reason(
    tensors: Sequence[str], device: Device, before: Mapping[str, Device], tied: Mapping[str, Sequence[str]]
) -> str:
    keys = [owner(name, before) for name in tensors]
    places = {None if key is None else before[key] for key in keys}
    if places == {None}:
        return "no key named it"
    if places == {device}:
        return "named by itself instead of by what is around it" if len(set(keys)) == 1 else "named as one"
    partners = [name for tensor in tensors for name in tied.get(tensor, ()) if name not in tensors]
    if len(places) == 1 and partners:
        return f"shares its weights with {parent(partners[0])}"
    return "a block stays on one device"
