"""bitsandbytes: int8 with a scale per output, nf4 and fp4 with one per 64 weights.

Sources: bitsandbytes' nn/modules.py (Params4bit, Int8Params), functional.py (quantize_4bit, QuantState),
autograd/_functions.py (MatMul4Bit, MatMul8bitLt) and backends/cuda/ops.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from devmap_cli.model.quantization.linear import (
    LinearShape,
    QuantizedLinear,
    Stored,
    ceil_div,
    meet,
    packed_product,
    quantized,
)

_BLOCK = 64
_NESTED_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Settings4bit:
    """The part of transformers' BitsAndBytesConfig that 4-bit sizes depend on; None computes in the model's dtype."""

    compute_dtype: torch.dtype | None
    storage: torch.dtype
    is_nested: bool

    @classmethod
    def of(cls, settings: dict[str, Any], *, on_the_fly: bool) -> Settings4bit:
        """Of a config.json, with transformers' defaults; made on the fly it computes in the model's dtype."""
        compute = settings.get("bnb_4bit_compute_dtype") or "float32"
        storage = settings.get("bnb_4bit_quant_storage") or "uint8"
        return cls(
            None if on_the_fly else _dtype(compute, torch.float32),
            _dtype(storage, torch.uint8),
            bool(settings.get("bnb_4bit_use_double_quant")),
        )


def _dtype(name: object, default: torch.dtype) -> torch.dtype:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else default


class Linear4bit(QuantizedLinear):
    """Two weights a byte; the scales are 8-bit themselves where they are quantized again."""

    absmax: torch.Tensor

    def __init__(self, shape: LinearShape, settings: Settings4bit) -> None:
        num_blocks = ceil_div(shape.num_weights, _BLOCK)
        packed = ceil_div(shape.num_weights, 2 * settings.storage.itemsize)
        tensors = [Stored("weight", (packed, 1), settings.storage), Stored("quant_map", (16,), torch.float32, True)]
        if settings.is_nested:
            tensors += [
                Stored("absmax", (num_blocks,), torch.uint8, True),
                Stored("nested_absmax", (ceil_div(num_blocks, _NESTED_BLOCK),), torch.float32, True),
                Stored("nested_quant_map", (256,), torch.float32, True),
                Stored("nested_offset", (), torch.float32, True),
            ]
        else:
            tensors.append(Stored("absmax", (num_blocks,), torch.float32, True))
        super().__init__(shape, tensors)
        self.compute_dtype = settings.compute_dtype or shape.dtype
        self.is_nested = settings.is_nested

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """One row is multiplied with the packed weight, several with the unpacked one."""
        inputs = rows.to(self.compute_dtype)
        scales = self.absmax.to(torch.float32) if self.is_nested else None
        if rows.shape[0] == 1 and self.in_features % _BLOCK == 0:
            output = self.product(inputs, self.weight)
        else:
            output = self.unpacked_product(inputs, self.weight, self.weight_dtype)
        del scales, inputs
        return output.to(rows.dtype)


class Linear8bitLt(QuantizedLinear):
    """LLM.int8(): inputs quantized row by row, the product in int32, then scaled to float16."""

    def __init__(self, shape: LinearShape, threshold: float) -> None:
        weight = Stored("weight", (shape.out_features, shape.in_features), torch.int8)
        super().__init__(shape, [weight, Stored("SCB", (shape.out_features,), torch.float32, True)])
        self.threshold = threshold

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """As the CUDA kernels do it, for inputs without outliers, of which there are few."""
        meet(rows, self.weight)
        scales, inputs = self._quantized(rows.to(torch.float16))
        accumulated = packed_product(inputs, [self.weight], self.out_features, torch.int32)
        output = accumulated.to(torch.float16)
        if self.bias is not None:
            output.add_(self.bias)
        del inputs, scales, accumulated
        return output.to(rows.dtype)

    def _quantized(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outliers = rows.abs().ge(self.threshold) if self.threshold > 0 else None
        made = quantized(rows, rows.shape, torch.int8, (rows.shape[0],))
        del outliers
        return made
