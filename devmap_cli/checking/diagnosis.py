"""From what stopped a rehearsal to a finding: which module and line of the model, which devices, and what to move."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from devmap_cli.checking.coverage import bytes_by_device, is_whole, joined
from devmap_cli.checking.findings import Finding, entry, listing
from devmap_cli.checking.forecast import Move
from devmap_cli.checking.tracing import is_of_the_model, model_line
from devmap_cli.devices.device import CPU, Device
from devmap_cli.errors import first_line
from devmap_cli.model.names import is_ancestor, owner, parent
from devmap_cli.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from devmap_cli.model.spec import ModelSpec
    from devmap_cli.simulation.rehearsal import Failure

_MIXED = "Expected all tensors to be on the same device"
_DEVICE_NAME = re.compile(r"\b(?:sim:(\d+)|cpu)\b")


@dataclass(frozen=True, slots=True)
class Scene:
    """A model and a map, and how the simulation calls the map's devices: those that compute by their position."""

    model: Any
    spec: ModelSpec
    device_map: Mapping[str, Device]

    @property
    def computing(self) -> list[Device]:
        """The devices that compute: the map's accelerators, in order, or without any the cpu."""
        devices = set(self.device_map.values())
        return sorted(device for device in devices if device.is_accelerator) or [CPU]

    def places(self) -> dict[str, int | str]:
        """The map as the simulation takes it."""
        index = {device: position for position, device in enumerate(self.computing)}
        return {key: index.get(device, device.kind) for key, device in self.device_map.items()}

    def device(self, name: str) -> Device:
        """The device that the simulation calls `name`."""
        return next(iter(self.named_in(name)), CPU)

    def named_in(self, text: str) -> list[Device]:
        """The devices that a text of the simulation names, each once."""
        computing = self.computing
        found = (computing[int(match[1])] if match[1] else CPU for match in _DEVICE_NAME.finditer(text))
        return list(dict.fromkeys(found))

    def origin(self, failure: Failure) -> str:
        """What to call the place of the failure."""
        return failure.module or self.spec.class_name

    def line(self, failure: Failure) -> str:
        """`, at file:line: source` of the model's code, or nothing."""
        line = model_line(failure.error, self.model)
        return f", at {line}" if line else ""

    def cause(self, module: str) -> Move | None:
        """What the map does wrong around `module`, a block cut or tied weights apart, told as its mending."""
        for fqn, part in self.spec.modules():
            if is_whole(part) and is_ancestor(fqn, module):
                sizes = bytes_by_device(fqn, part, self.device_map)
                if len(sizes) > 1:
                    return Move(fqn, max(sizes, key=lambda device: sizes[device]))
        for group in self.spec.ties:
            move = joined(group, self.device_map)
            if move is not None and any(parent(name) == module for name in group):
                return Move(*move)
        return None

    def outer_key(self, module: str) -> str | None:
        """A key around `module` that another key inside it contradicts."""
        around = [key for key in self.device_map if is_ancestor(key, module)]
        return next((key for key in around if self._is_contradicted(key)), None)

    def _is_contradicted(self, outer: str) -> bool:
        device = self.device_map[outer]
        return any(is_ancestor(outer, key) and other != device for key, other in self.device_map.items())


@dataclass(frozen=True, slots=True)
class Shortage:
    """What the process would take of a device at its peak, and what it may, in bytes; `ways` lower it."""

    device: Device
    needed_bytes: int
    weights_bytes: int
    activation_bytes: int
    budget_bytes: int
    ways: tuple[str, ...]


def out_of_memory(short: Shortage, phase: str, module: str = "") -> Finding:
    """A device too small for the run, which ends in `phase`; `module` is the one that was computing."""
    device, missing = short.device, format_bytes(short.needed_bytes - short.budget_bytes)
    needed, weights = format_bytes(short.needed_bytes), format_bytes(short.weights_bytes)
    activations = format_bytes(short.activation_bytes)
    return Finding(
        "out-of-memory",
        "error",
        str(device.map_value),
        f"{device.label} would take {needed} at its peak, {weights} of it weights and {activations} activations: "
        f"{missing} over its budget of {format_bytes(short.budget_bytes)}",
        f"move {missing} or more from {device.label} elsewhere, or {' or '.join(short.ways)}",
        f"the run ends in {phase}, out of memory on {device.label}{f', in {module}' if module else ''}",
    )


def is_mixed(failure: Failure) -> bool:
    """Whether tensors met across devices."""
    return _MIXED in str(failure.error)


def mixed_devices(scene: Scene, failure: Failure, remedy: Sequence[Move]) -> Finding:
    """Tensors that meet across devices; `remedy` are moves with which they don't."""
    cause, outer = scene.cause(failure.module), scene.outer_key(failure.module)
    if cause is not None:
        fix = f"put it on one device: {entry(cause.module, cause.device)}"
    elif outer is not None:
        fix = f"replace {entry(outer, scene.device_map[outer])} by its parts"
    elif remedy:
        moved = " and ".join(entry(move.module, move.device) for move in remedy)
        fix = f"put {moved}, with which a rehearsal gets through"
    else:
        fix = f"put what {failure.module or 'the model'} reads there on one device"
    return Finding(
        "mixed-devices",
        "error",
        failure.module,
        f'{scene.origin(failure)} computes with tensors on {listing(scene.named_in(str(failure.error)))} ("{_MIXED}")',
        fix,
        f"the run ends in {failure.phase}{scene.line(failure)}",
    )


def moves(scene: Scene, module_order: Iterable[str], failure: Failure) -> Iterator[Move]:
    """What may bring together tensors that met across devices; nothing where keys contradict each other.

    Where a cut block or untied weights are the reason, its mending alone. Else first the module that failed, then its
    parts, last run first, only such as the map names whole or not at all; at last all that the module holds.
    """
    module = failure.module
    cause = scene.cause(module)
    if cause is not None:
        yield cause
        return
    if not module or scene.outer_key(module) is not None:
        return
    devices = [device for device in scene.named_in(str(failure.error)) if device.is_accelerator]
    parts = [name for name in module_order if name and parent(name) == module]
    for name in (module, *reversed(parts)):
        named_in_part = any(is_ancestor(name, key) and key != name for key in scene.device_map)
        if not named_in_part and owner(name, scene.device_map) in (None, name):
            yield from (Move(name, device) for device in devices if device != scene.device_map.get(name))
    if owner(module, scene.device_map) is None and not _holds_blocks(scene.spec, module):
        yield from (Move(module, device) for device in devices)


def _holds_blocks(spec: ModelSpec, fqn: str) -> bool:
    return any(part.no_split and is_ancestor(fqn, name) and name != fqn for name, part in spec.modules())


def run_fails(scene: Scene, failure: Failure) -> Finding:
    """The model's code fails with this map, in another way than the others."""
    return Finding(
        "run-fails",
        "error",
        failure.module,
        f"{scene.origin(failure)} fails with this map, and not on one device{scene.line(failure)}",
        "place the module and its neighbours on one device",
        f"the run ends{f' in {failure.phase}' if failure.phase else ''}: {_reason(failure)}",
    )


def not_rehearsed(scene: Scene, failure: Failure) -> Finding:
    """The model's code fails in the simulation whatever the map: for a reason of its own, or of the simulation's."""
    own = is_of_the_model(failure.error, scene.model)
    place = f", in {type(scene.model).__module__.partition('.')[0]}' own code" if own else ""
    return Finding(
        "not-rehearsed",
        "warning",
        failure.module,
        f"{scene.origin(failure)} fails on one device too{place}: {_reason(failure)}",
        "no map can: see whether another release of transformers or a mended config.json does"
        if own
        else "a run tells whether it works: devmap run with this map",
        "neither memory nor devices that mix are checked" + (", and a run will fail likewise" if own else ""),
    )


def _reason(failure: Failure) -> str:
    return f"{type(failure.error).__name__}: {first_line(failure.error)}"
