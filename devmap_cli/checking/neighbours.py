"""Where a module that a map leaves out belongs: with what it feeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from devmap_cli.devices.device import CPU, Device
from devmap_cli.model.names import is_ancestor, owner, parent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from devmap_cli.model.spec import ModelSpec


def neighbour(name: str, device_map: Mapping[str, Device], spec: ModelSpec) -> Device:
    """The device of what `name`, a module or a tensor, feeds; the cpu for an empty map.

    For a tensor that a module with parts holds itself: of the first part. Else of the module that runs after it, within
    the closest module around both, or of the one before. Where the execution order does not say when a module runs, the
    definition order counts.
    """
    modules = tuple(fqn for fqn, _ in spec.modules())
    if name not in modules:
        name = parent(name)
        inside = (owner(fqn, device_map) for fqn in modules if is_ancestor(name, fqn) and fqn != name)
        first = next((key for key in inside if key is not None), None)
        if first is not None:
            return device_map[first]
    executed = spec.execution_order
    order = executed if any(is_ancestor(name, fqn) for fqn in executed) else modules
    scope = name
    while scope:
        scope = parent(scope)
        found = _closest(name, [fqn for fqn in order if is_ancestor(scope, fqn)], device_map)
        if found is not None:
            return found
    return next(iter(device_map.values()), CPU)


def _closest(name: str, order: Sequence[str], device_map: Mapping[str, Device]) -> Device | None:
    """The device of the first module of `order` after `name` that has one; else of the last before it."""
    before: Device | None = None
    passed = False
    for fqn in order:
        if is_ancestor(name, fqn):
            passed = True
        elif not is_ancestor(fqn, name):
            key = owner(fqn, device_map)
            if key is not None and passed:
                return device_map[key]
            before = before if key is None else device_map[key]
    return before
