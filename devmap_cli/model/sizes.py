"""Sizes of modules, with shared weights counted once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from devmap_cli.model.names import join
from devmap_cli.model.spec import ModelSpec, ModuleSpec


@dataclass(frozen=True, slots=True)
class ModuleSize:
    """What a module and all below it hold: parameters (a count), their bytes, and the bytes of buffers."""

    num_parameters: int = 0
    parameter_bytes: int = 0
    buffer_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Parameters and buffers together."""
        return self.parameter_bytes + self.buffer_bytes

    def __add__(self, other: ModuleSize) -> ModuleSize:
        return ModuleSize(
            self.num_parameters + other.num_parameters,
            self.parameter_bytes + other.parameter_bytes,
            self.buffer_bytes + other.buffer_bytes,
        )


@dataclass(frozen=True)
class Sizes:
    """The size of every module of a model by fqn; a tied tensor counts where its owner is, and nowhere else."""

    by_fqn: dict[str, ModuleSize] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: ModelSpec) -> Sizes:
        """Sizes of all modules of `spec`."""
        sizes = cls()
        sizes._measure(spec.root, "", spec.tied_to_another())
        return sizes

    def __getitem__(self, fqn: str) -> ModuleSize:
        return self.by_fqn[fqn]

    @property
    def total(self) -> ModuleSize:
        """The whole model."""
        return self.by_fqn[""]

    def _measure(self, module: ModuleSpec, fqn: str, shared: frozenset[str]) -> ModuleSize:
        size = ModuleSize()
        for tensor in module.tensors:
            if join(fqn, tensor.name) in shared:
                continue
            if tensor.is_buffer:
                size += ModuleSize(buffer_bytes=tensor.num_bytes)
            else:
                size += ModuleSize(tensor.num_elements, tensor.num_bytes)
        for child in module.children:
            size += self._measure(child, join(fqn, child.name), shared)
        self.by_fqn[fqn] = size
        return size


def bytes_by_dtype(spec: ModelSpec) -> dict[str, int]:
    """Bytes of parameters and buffers per dtype, largest first, shared ones once."""
    shared = spec.tied_to_another()
    counter: Counter[str] = Counter()
    for name, tensor in spec.tensors():
        if name not in shared:
            counter[tensor.dtype] += tensor.num_bytes
    return dict(counter.most_common())


def kv_bytes(spec: ModelSpec, tokens: int, batch_size: int = 1) -> int | None:
    """Bytes of KV cache at a length of `tokens`; None where it is unknown."""
    if spec.kv_cache is None:
        return None
    return sum(layer.num_bytes(tokens, batch_size) for layer in spec.kv_cache)
