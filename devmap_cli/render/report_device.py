"""What a report shows of each device: its parts in bytes, and the modules that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from devmap_cli.mapfile import MapDevice, MapFile
from devmap_cli.model.names import parent
from devmap_cli.model.spec import ModelSpec
from devmap_cli.render.tree import name_ranges
from devmap_cli.units import format_bytes

PARTS = {
    "weights": "weights",
    "kv_cache": "KV cache",
    "activation": "activations",
    "overhead": "overhead",
    "free": "free",
}
"""What the bytes of a device are for, in the order of a bar, and how each part is called."""


@dataclass(frozen=True, slots=True)
class ReportModule:
    """One key of a device map and its bytes; `shared_with` is the key that holds weights which it shares."""

    name: str
    num_bytes: int
    shared_with: str = ""

    @property
    def text(self) -> str:
        """Name and size: `lm_head: 0 B, shares weights with model.embed_tokens`."""
        exact = f" ({self.num_bytes:,} bytes)" if self.num_bytes >= 1024 else ""
        shared = f", shares weights with {self.shared_with}" if self.shared_with else ""
        return f"{self.name or 'the whole model'}: {format_bytes(self.num_bytes)}{exact}{shared}"


@dataclass(frozen=True, slots=True)
class ModuleRun:
    """Modules that are shown as one: layers that follow each other, or a single module."""

    modules: tuple[ReportModule, ...]

    @property
    def is_numbered(self) -> bool:
        """Whether these are layers: elements of a list."""
        return self.modules[0].name.rpartition(".")[2].isdigit()

    @property
    def short_name(self) -> str:
        """The name without what leads to it: `layers.0-13`, `lm_head`."""
        names = tuple(module.name.rpartition(".")[2] for module in self.modules)
        if not self.is_numbered:
            return names[0] or "the whole model"
        stack = parent(self.modules[0].name).rpartition(".")[2]
        return f"{stack}.{name_ranges(names)}" if stack else name_ranges(names)

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(module.num_bytes for module in self.modules)


@dataclass(frozen=True, slots=True)
class ReportDevice:
    """One device: what was planned for it, its card where that is known, and what it holds in map order."""

    memory: MapDevice
    card: str = ""
    modules: tuple[ReportModule, ...] = ()

    @property
    def label(self) -> str:
        """`GPU 0`, `cpu`."""
        return self.memory.device.label

    @property
    def extent_bytes(self) -> int:
        """How far its bar reaches: its budget, or its peak where that is above."""
        return max(self.memory.budget_bytes, self.memory.peak_bytes)

    @property
    def over_bytes(self) -> int:
        """By how much the peak is above the budget."""
        return max(0, -self.memory.free_bytes) if self.memory.budget_bytes else 0

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each of `PARTS`: together the budget, or the peak where that is above."""
        sizes = {part: int(getattr(self.memory, f"{part}_bytes")) for part in PARTS}
        return {**sizes, "free": max(0, sizes["free"])}

    @property
    def use(self) -> str:
        """The peak as a share of the budget: `86 %`; nothing without a budget."""
        budget = self.memory.budget_bytes
        return f"{100 * self.memory.peak_bytes / budget:.0f} %" if budget else ""

    @property
    def runs(self) -> tuple[ModuleRun, ...]:
        """What it holds, layers that follow each other together."""
        runs: list[list[ReportModule]] = []
        for module in self.modules:
            if runs and _is_next(runs[-1][-1].name, module.name):
                runs[-1].append(module)
            else:
                runs.append([module])
        return tuple(ModuleRun(tuple(run)) for run in runs)


def modules_of(plan: MapFile, spec: ModelSpec) -> list[ReportModule]:
    """The keys of a map in its order; a tensor counts at the key nearest to it, a shared one at its owner's."""
    sizes = dict.fromkeys(plan.device_map, 0)
    shared: dict[str, str] = {}
    tied_to = {name: group[0] for group in spec.ties for name in group[1:]}
    for name, tensor in spec.tensors():
        key = _covering(name, sizes)
        if key is None:
            continue
        if name not in tied_to:
            sizes[key] += tensor.num_bytes
        elif (owner := _covering(tied_to[name], sizes)) not in (None, key):
            shared.setdefault(key, owner or "the whole model")
    return [ReportModule(key, size, shared.get(key, "")) for key, size in sizes.items()]


def _covering(name: str, keys: Mapping[str, int]) -> str | None:
    """The longest key that is, or contains, what `name` names."""
    while name and name not in keys:
        name = parent(name)
    return name if name in keys else None


def _is_next(before: str, name: str) -> bool:
    """Whether `name` is the list element after `before`."""
    stack, _, number = name.rpartition(".")
    last = before.rpartition(".")[2]
    return bool(number.isdecimal() and last.isdecimal() and parent(before) == stack and int(number) == int(last) + 1)
