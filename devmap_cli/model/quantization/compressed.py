"""compressed-tensors: formats as they are loaded. All weights are unpacked, for good, before the first forward.

Sources: compressed-tensors' compressors (naive, pack-quantized, nvfp4 and mxfp4) and its
ModelCompressor.add_decompress_hook, transformers' quantizer_compressed_tensors.py. Settings are the `config_groups` of
config.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from devmap_cli.model.quantization.linear import LinearShape, QuantizedLinear, Stored, ceil_div

_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How the weights of one config group are stored; `layout` is the compressor's name."""

    layout: str
    num_bits: int
    is_float: bool
    strategy: str
    group_size: int
    block: tuple[int, int]
    is_symmetric: bool
    has_group_order: bool

    @classmethod
    def of(cls, group: dict[str, Any], layout: str) -> WeightScheme:
        """Of one of the config's groups; `layout` is the config's own, which the group may overrule."""
        weights = group.get("weights") or {}
        rows, columns = weights.get("block_structure") or (128, 128)
        return cls(
            layout=str(group.get("format") or layout),
            num_bits=int(weights.get("num_bits", 8)),
            is_float=weights.get("type") == "float",
            strategy=str(weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")),
            group_size=int(weights.get("group_size") or 0),
            block=(rows, columns),
            is_symmetric=bool(weights.get("symmetric", True)),
            has_group_order=weights.get("actorder") == "group",
        )

    def scale_shape(self, shape: LinearShape) -> tuple[int, ...]:
        """Scales of a weight."""
        outputs, inputs = shape.out_features, shape.in_features
        if self.strategy in ("group", "tensor_group") and self.group_size > 0:
            return (outputs, ceil_div(inputs, self.group_size))
        if self.strategy == "block":
            return (ceil_div(outputs, self.block[0]), ceil_div(inputs, self.block[1]))
        return (1,) if self.strategy == "tensor" else (outputs, 1)

    def tensors(self, shape: LinearShape) -> list[Stored]:
        """What a layer holds."""
        outputs, inputs = shape.out_features, shape.in_features
        scale_shape = self.scale_shape(shape)
        if self.is_float and self.num_bits == 4:
            return self._float4(outputs, inputs, scale_shape)
        scale = Stored("weight_scale", scale_shape, shape.dtype)
        if self.layout != "pack-quantized":
            kept = torch.float8_e4m3fn if self.is_float else torch.int8
            tensors = [Stored("weight", (outputs, inputs), kept), scale]
            zeros = Stored("weight_zero_point", scale_shape, torch.int8)
        else:
            words = ceil_div(inputs, _WORD_BITS // self.num_bits)
            tensors = [Stored("weight_packed", (outputs, words), torch.int32), scale]
            tensors.append(Stored("weight_shape", (2,), torch.int64))
            rows = ceil_div(scale_shape[0] * self.num_bits, _WORD_BITS)
            zeros = Stored("weight_zero_point", (rows, *scale_shape[1:]), torch.int32)
        if not self.is_symmetric:
            tensors.append(zeros)
        if self.has_group_order:
            tensors.append(Stored("weight_g_idx", (inputs,), torch.int32))
        return tensors

    def _float4(self, outputs: int, inputs: int, scale_shape: tuple[int, ...]) -> list[Stored]:
        packed = Stored("weight_packed", (outputs, ceil_div(inputs, 2)), torch.uint8)
        if self.layout.startswith("mxfp4"):
            return [packed, Stored("weight_scale", scale_shape, torch.uint8)]
        return [
            packed,
            Stored("weight_scale", scale_shape, torch.float8_e4m3fn),
            Stored("weight_global_scale", (1,), torch.float32),
        ]


class CompressedLinear(QuantizedLinear):
    """A layer whose weight is unpacked once; one that is offloaded is unpacked for each product."""

    def __init__(self, shape: LinearShape, scheme: WeightScheme) -> None:
        super().__init__(shape, scheme.tensors(shape))
        self._key = "weight_packed" if "weight_packed" in self._parameters else "weight"

    def unpack(self) -> None:
        """Put the unpacked weight in the place of the packed one, where that is in memory."""
        packed = self._parameters[self._key]
        if packed is not None and not packed.is_meta and not self._is_unpacked(packed):
            dense = self.unpacked(packed, self.weight_dtype)
            self._parameters[self._key] = nn.Parameter(dense, requires_grad=False)

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """With the unpacked weight."""
        weight = self._parameters[self._key]
        assert weight is not None
        if not self._is_unpacked(weight):
            return self.unpacked_product(rows, weight, self.weight_dtype)
        bias = None if self.bias is None else self.bias.to(rows.dtype)
        return nn.functional.linear(rows, weight.to(rows.dtype), bias)

    def _is_unpacked(self, weight: torch.Tensor) -> bool:
        return weight.dtype == self.weight_dtype


def unpack_before_forward(model: nn.Module) -> None:
    """Let `model` unpack all its layers when it is called, as compressed-tensors' hook on the whole model does."""

    def unpack(called: nn.Module, _args: Any) -> None:
        for module in called.modules():
            if isinstance(module, CompressedLinear):
                module.unpack()

    model.register_forward_pre_hook(unpack)


class Groups:
    """Which scheme a module gets: that of the first group whose targets name it, unless it is ignored."""

    def __init__(self, settings: dict[str, Any]) -> None:
        layout = str(settings.get("format") or "dense")
        self._ignored = list(settings.get("ignore") or ())
        self._groups = [
            (list(group.get("targets") or ()), WeightScheme.of(group, layout))
            for group in (settings.get("config_groups") or {}).values()
            if isinstance(group, dict) and group.get("weights")
        ]

    def scheme_of(self, name: str, module: nn.Module) -> WeightScheme | None:
        """None where the module stays as it is."""
        if _names(self._ignored, name, module):
            return None
        return next((scheme for targets, scheme in self._groups if _names(targets, name, module)), None)


def _names(targets: Iterable[str], name: str, module: nn.Module) -> bool:
    """Whether one of `targets` is the module's name or class, or after `re:` a pattern that its name begins with."""
    classes = {kind.__name__ for kind in type(module).__mro__}
    for target in targets:
        if target.startswith("re:"):
            if re.match(target[3:], name):
                return True
        elif target == name or target in classes:
            return True
    return False
