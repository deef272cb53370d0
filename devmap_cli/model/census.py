"""From an empty torch model to its torch-free description."""

from __future__ import annotations

from typing import TYPE_CHECKING

from devmap_cli.model.names import join
from devmap_cli.model.spec import ModuleSpec, TensorSpec

if TYPE_CHECKING:
    import torch


def module_spec(module: torch.nn.Module, no_split: frozenset[str], name: str = "") -> ModuleSpec:
    """Describe `module` and all below it.

    Args:
        no_split: class names of modules that may not be cut.
        name: the module's name in its parent.
    """
    parameters = [(key, value, False) for key, value in module._parameters.items() if value is not None]
    buffers = [(key, value, True) for key, value in module._buffers.items() if value is not None]
    class_name = type(module).__name__
    return ModuleSpec(
        name=name,
        class_name=class_name,
        tensors=tuple(_tensor_spec(key, value, is_buffer) for key, value, is_buffer in parameters + buffers),
        children=tuple(module_spec(child, no_split, key) for key, child in module.named_children()),
        no_split=class_name in no_split,
    )


def _tensor_spec(name: str, tensor: torch.Tensor, is_buffer: bool) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, tuple(tensor.shape), dtype, tensor.nbytes, is_buffer)


def tie_groups(model: torch.nn.Module) -> tuple[tuple[str, ...], ...]:
    """Names of tensors that are one and the same object, in module order; groups of two and more only."""
    names_by_identity: dict[int, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                names_by_identity.setdefault(id(tensor), []).append(join(fqn, key))
    return tuple(tuple(names) for names in names_by_identity.values() if len(names) > 1)
