"""The torch-free description of a model: modules, tensors, ties, execution order, KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from devmap_cli.model.names import join


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter or buffer held directly by a module.

    `name` is local to the module; `num_bytes` is what it takes once loaded.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    is_buffer: bool = False

    @property
    def num_elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        product = 1
        for size in self.shape:
            product *= size
        return product


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """One module with its own tensors and its children, both in definition order.

    `name` is local to the parent ("" for the root); `no_split` says that its forward needs all of it on one device.
    """

    name: str
    class_name: str
    tensors: tuple[TensorSpec, ...] = ()
    children: tuple[ModuleSpec, ...] = ()
    no_split: bool = False

    def walk(self, fqn: str = "") -> Iterator[tuple[str, ModuleSpec]]:
        """This module and all below it, depth first in definition order, with fully qualified names."""
        ahead = [(fqn, self)]
        while ahead:
            name, module = ahead.pop()
            yield name, module
            ahead.extend((join(name, child.name), child) for child in reversed(module.children))


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """What one layer's module keeps per sequence between decode steps.

    `bytes_per_token` grows with the length up to `max_tokens` (a sliding window; None for no limit); `fixed_bytes`
    does not grow (states of linear attention, Mamba and convolutions).
    """

    fqn: str
    bytes_per_token: int
    fixed_bytes: int = 0
    max_tokens: int | None = None

    def num_bytes(self, tokens: int, batch_size: int = 1) -> int:
        """Bytes held at a length of `tokens`, for `batch_size` sequences."""
        kept = tokens if self.max_tokens is None else min(tokens, self.max_tokens)
        return batch_size * (self.bytes_per_token * kept + self.fixed_bytes)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that placing a model needs to know about it.

    `ties` are groups of fully qualified tensor names that share one storage, the owner first. `execution_order` are
    fqns of modules in the order in which a forward first enters them; `output_bytes_per_token` is what each of them
    hands on, where its output has one row per token. `renamings` lead from names of older releases to today's.
    `kv_cache` is None where it is unknown, with the reason in `notes`. `key` names all that the description depends on,
    None where that can change. `max_positions` is the longest sequence that the model was made for, None where its
    config states none; `token_embedding` the module that gets the tokens, "" where it is unknown.
    """

    model_id: str
    revision: str | None
    class_name: str
    model_type: str
    dtype: str
    root: ModuleSpec
    ties: tuple[tuple[str, ...], ...] = ()
    execution_order: tuple[str, ...] = ()
    output_bytes_per_token: dict[str, int] = field(default_factory=dict)
    kv_cache: tuple[KvCacheSpec, ...] | None = None
    renamings: tuple[tuple[str, str], ...] = ()
    quantization: dict[str, Any] | None = None
    notes: tuple[str, ...] = field(default=())
    key: str | None = None
    max_positions: int | None = None
    token_embedding: str = ""

    def modules(self) -> Iterator[tuple[str, ModuleSpec]]:
        """All modules depth first in definition order, with fully qualified names."""
        return self.root.walk()

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """All parameters and buffers in module order, with fully qualified names; tied ones under each name."""
        for fqn, module in self.modules():
            for tensor in module.tensors:
                yield join(fqn, tensor.name), tensor

    def tied_to_another(self) -> frozenset[str]:
        """Names of tensors that share the storage of an earlier one, which alone counts."""
        return frozenset(name for group in self.ties for name in group[1:])
