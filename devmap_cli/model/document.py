"""The JSON document of `devmap inspect --json`."""

from __future__ import annotations

from typing import Any

from devmap_cli.model.names import join
from devmap_cli.model.sizes import Sizes, bytes_by_dtype
from devmap_cli.model.spec import ModelSpec, ModuleSpec


def inspect_document(spec: ModelSpec) -> dict[str, Any]:
    """All of `spec` as plain data; sizes in integer `*_bytes`, tied tensors counted once."""
    sizes = Sizes.of(spec)
    return {
        "format": "devmap.inspect/1",
        "model": {
            "id": spec.model_id,
            "revision": spec.revision,
            "class": spec.class_name,
            "model_type": spec.model_type,
            "dtype": spec.dtype,
            "quantization": spec.quantization,
        },
        "total": _size(sizes, ""),
        "dtypes": [{"dtype": name, "num_bytes": size} for name, size in bytes_by_dtype(spec).items()],
        "tied_weights": [list(group) for group in spec.ties],
        "no_split_classes": list(dict.fromkeys(m.class_name for _, m in spec.modules() if m.no_split)),
        "kv_cache": None if spec.kv_cache is None else _kv_cache(spec),
        "execution_order": list(spec.execution_order),
        "notes": list(spec.notes),
        "tree": _module(spec.root, "", sizes),
    }


def _size(sizes: Sizes, fqn: str) -> dict[str, int]:
    size = sizes[fqn]
    return {
        "num_parameters": size.num_parameters,
        "num_bytes": size.num_bytes,
        "parameter_bytes": size.parameter_bytes,
        "buffer_bytes": size.buffer_bytes,
    }


def _kv_cache(spec: ModelSpec) -> dict[str, Any]:
    layers = spec.kv_cache or ()
    return {
        "bytes_per_token": sum(layer.bytes_per_token for layer in layers),
        "fixed_bytes": sum(layer.fixed_bytes for layer in layers),
        "layers": [
            {
                "module": layer.fqn,
                "bytes_per_token": layer.bytes_per_token,
                "fixed_bytes": layer.fixed_bytes,
                "max_tokens": layer.max_tokens,
            }
            for layer in layers
        ],
    }


def _module(module: ModuleSpec, fqn: str, sizes: Sizes) -> dict[str, Any]:
    return {
        "fqn": fqn,
        "class": module.class_name,
        **_size(sizes, fqn),
        "no_split": module.no_split,
        "tensors": [
            {
                "name": join(fqn, tensor.name),
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "num_bytes": tensor.num_bytes,
                "buffer": tensor.is_buffer,
            }
            for tensor in module.tensors
        ],
        "children": [_module(child, join(fqn, child.name), sizes) for child in module.children],
    }
