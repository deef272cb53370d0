"""GPTQ and AWQ: integers of a few bits, packed into 32-bit words, with scales and zeros per group of inputs.

Sources: gptqmodel's and AutoGPTQ's QuantLinear (exllama kernels), AutoAWQ's WQLinear_GEMM.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from devmap_cli.model.quantization.linear import LinearShape, QuantizedLinear, Stored, ceil_div

_WORD_BITS = 32
_EXLLAMA_BITS = 4
_EXLLAMA_ROWS = 8
"""Up to this many rows exllama's kernel reads packed weights; more are multiplied by cuBLAS with unpacked ones."""
_AWQ_ROWS = 1024
"""From this many rows on AutoAWQ unpacks the weight first."""
_AWQ_SPLITS = 8
"""Below, its kernel splits the inputs in eight and adds the partial products."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Bits of a weight, and how many inputs share a scale (None: all)."""

    bits: int
    group_size: int | None

    @classmethod
    def of(cls, settings: dict[str, Any]) -> GroupSettings:
        """Of a config.json: AutoAWQ's own names are w_bit and q_group_size."""
        bits = settings.get("bits") or settings.get("w_bit") or 4
        size = settings.get("group_size") or settings.get("q_group_size") or 128
        return cls(int(bits), int(size) if int(size) > 0 else None)

    def num_groups(self, shape: LinearShape) -> int:
        """Groups of one output's weights."""
        return ceil_div(shape.in_features, self.group_size or shape.in_features)

    def words(self, num_weights: int) -> int:
        """32-bit words that hold this many weights."""
        return ceil_div(num_weights * self.bits, _WORD_BITS)


class UnpackingBuffer:
    """Exllama's `temp_dq`: on each device one buffer of the size of the largest weight, kept from the start.

    Source: AutoGPTQ's autogptq_post_init. A buffer lives as long as the packed weight it was first made for,
    whose `kept_beside` it is.
    """

    def __init__(self) -> None:
        self._num_weights = 0
        self._by_device: dict[str, weakref.ref[torch.Tensor]] = {}

    def make_room(self, num_weights: int) -> None:
        """Be large enough for a weight of so many elements."""
        self._num_weights = max(self._num_weights, num_weights)

    def beside(self, packed: Any) -> torch.Tensor:
        """The buffer on the device of a packed weight, in float16."""
        known = self._by_device.get(str(packed.device))
        buffer = None if known is None else known()
        if buffer is None:
            buffer = packed.new_empty((self._num_weights,), dtype=torch.float16)
            packed.kept_beside = buffer
            self._by_device[str(packed.device)] = weakref.ref(buffer)
        return buffer


class GPTQLinear(QuantizedLinear):
    """Weights packed along the inputs; `buffer` is what the layers of a model share."""

    qweight: torch.Tensor

    def __init__(self, shape: LinearShape, settings: GroupSettings, buffer: UnpackingBuffer) -> None:
        groups = settings.num_groups(shape)
        tensors = [
            Stored("qweight", (settings.words(shape.in_features), shape.out_features), torch.int32, True),
            Stored("qzeros", (groups, settings.words(shape.out_features)), torch.int32, True),
            Stored("scales", (groups, shape.out_features), torch.float16, True),
            Stored("g_idx", (shape.in_features,), torch.int32, True),
        ]
        super().__init__(shape, tensors, bias_dtype=torch.float16)
        self._buffer = buffer if settings.bits == _EXLLAMA_BITS else None
        buffer.make_room(shape.num_weights)

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """In float16, with the weight unpacked for a prompt."""
        inputs = rows.to(torch.float16)
        buffer = None if self._buffer is None else self._buffer.beside(self.qweight)
        if rows.shape[0] <= _EXLLAMA_ROWS:
            return self.product(inputs, self.qweight).to(rows.dtype)
        if buffer is None:
            return self.unpacked_product(inputs, self.qweight, torch.float16).to(rows.dtype)
        return nn.functional.linear(inputs, self.unpacked_into(buffer), self.bias).to(rows.dtype)


class AWQLinear(QuantizedLinear):
    """Weights packed along the outputs."""

    qweight: torch.Tensor

    def __init__(self, shape: LinearShape, settings: GroupSettings) -> None:
        groups, words = settings.num_groups(shape), settings.words(shape.out_features)
        tensors = [
            Stored("qweight", (shape.in_features, words), torch.int32, True),
            Stored("qzeros", (groups, words), torch.int32, True),
            Stored("scales", (groups, shape.out_features), torch.float16, True),
        ]
        super().__init__(shape, tensors, bias_dtype=torch.float16)

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """In float16, with partial products for few rows, and the weight unpacked for many."""
        inputs = rows.to(torch.float16)
        if rows.shape[0] >= _AWQ_ROWS:
            return self.unpacked_product(inputs, self.qweight, torch.float16).to(rows.dtype)
        partial = self.qweight.new_empty((_AWQ_SPLITS, rows.shape[0], self.out_features), dtype=torch.float16)
        output = self.product(inputs, self.qweight)
        del partial
        return output.to(rows.dtype)
