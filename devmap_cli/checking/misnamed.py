"""Keys that name no part of a model: the parts that they seem to mean, and what transformers makes of them."""

from __future__ import annotations

import difflib
import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from devmap_cli.model.names import join, parent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from devmap_cli.devices.device import Device
    from devmap_cli.model.spec import ModelSpec, ModuleSpec

_LEAST_ALIKE = 0.8
_DIGITS = re.compile(r"\d+")
_GLOB = re.compile(r"[*?\[]")


def part_names(spec: ModelSpec) -> dict[str, None]:
    """All names that a key of a map may have, in module order: modules and, for those held by a split one, tensors."""
    names: dict[str, None] = {}
    for fqn, module in spec.modules():
        names[fqn] = None
        names.update((join(fqn, tensor.name), None) for tensor in module.tensors)
    return names


def meant_by(device_map: Mapping[str, Device], spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """The parts that keys which name none seem to mean: the one most alike, or all that a glob matches.

    Only parts that no other key places, and each for one key alone.
    """
    names = part_names(spec)
    unknown = [key for key in device_map if key not in names]
    if not unknown:
        return {}
    free = _FreeNames(_free_names(names.keys() & device_map.keys(), spec))
    meant: dict[str, tuple[str, ...]] = {}
    for key in unknown:
        found = free.matching(key) if _GLOB.search(key) else free.most_alike(key)
        if found:
            meant[key] = found
            free.take(found)
    return meant


def loaded_by(name: str, device_map: Mapping[str, Device]) -> str | None:
    """The key by which transformers finds the device of the tensor `name`; None where it falls back to the cpu.

    It takes keys for patterns of the beginning of a name, so that `layers.1` also catches `layers.10`.
    Source: `expand_device_map` of transformers' integrations/accelerate.py.

    Raises:
        LookupError: loading ends there, because of what a key is as a pattern.
    """
    ordered = sorted(device_map, key=lambda key: (key.count("."), len(key)), reverse=True)
    try:
        match = re.match("|".join(f"({key})" for key in ordered), name)
    except re.error as error:
        raise LookupError(str(error)) from error
    if match is not None and match.group() not in device_map:
        raise LookupError(match.group())
    return match.group() if match is not None else "" if "" in device_map else None


def caught_by(key: str, names: Iterable[str]) -> str | None:
    """The first of `names` that transformers takes to begin with `key`, which is a pattern to it.

    Raises:
        LookupError: loading ends there, because of what the key is as a pattern.
    """
    try:
        pattern = re.compile(key)
    except re.error as error:
        raise LookupError(str(error)) from error
    for name in names:
        match = pattern.match(name)
        if match is not None and match.group() != key:
            raise LookupError(match.group())
        if match is not None:
            return name
    return None


def _free_names(placed: set[str], spec: ModelSpec) -> list[str]:
    """Names of modules and tensors that no key of `placed` is, holds or lies in, in module order."""
    around = {""} | {outer for key in placed for outer in _ancestors(key)}
    free: list[str] = []

    def visit(fqn: str, module: ModuleSpec) -> None:
        if fqn in placed:
            return
        if fqn not in around:
            free.append(fqn)
        free.extend(name for tensor in module.tensors if (name := join(fqn, tensor.name)) not in placed)
        for child in module.children:
            visit(join(fqn, child.name), child)

    visit("", spec.root)
    return free


def _ancestors(name: str) -> Iterable[str]:
    while name:
        name = parent(name)
        yield name


class _FreeNames:
    """Names that no key places yet, found by their last part and by the numbers in them."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._by_last_part: dict[str, list[str]] = {}
        self._by_numbers: dict[tuple[str, ...], list[str]] = {}
        self._taken: set[str] = set()
        self._around_taken: set[str] = set()
        for name in self._names:
            self._by_last_part.setdefault(_last_part(name.lower()), []).append(name)
            self._by_numbers.setdefault(tuple(_DIGITS.findall(name)), []).append(name)

    def take(self, names: Iterable[str]) -> None:
        """Let `names`, and what is in and around them, be free no more."""
        for name in names:
            self._taken.add(name)
            self._around_taken.update(_ancestors(name))

    def matching(self, pattern: str) -> tuple[str, ...]:
        """All that the glob matches, part by part."""
        alike = (name for name in self._names if name.count(".") == pattern.count(".") and fnmatchcase(name, pattern))
        return tuple(name for name in alike if self._is_free(name))

    def most_alike(self, key: str) -> tuple[str, ...]:
        """The name with less or more around it, if there is one; else one with the same numbers, a few letters off."""
        plain = key.strip(" ./").lower()
        nested = [name for name in self._by_last_part.get(_last_part(plain), ()) if _is_inside(name.lower(), plain)]
        free = [name for name in nested if self._is_free(name)]
        if len(free) == 1:
            return (free[0],)
        same_numbers = self._by_numbers.get(tuple(_DIGITS.findall(plain)), ())
        alike = [name for name in same_numbers if self._is_free(name)]
        return tuple(difflib.get_close_matches(plain, alike, n=1, cutoff=_LEAST_ALIKE))

    def _is_free(self, name: str) -> bool:
        inside_taken = name in self._taken or any(outer in self._taken for outer in _ancestors(name))
        return not inside_taken and name not in self._around_taken


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _is_inside(name: str, key: str) -> bool:
    return name == key or name.endswith(f".{key}") or key.endswith(f".{name}")
