"""What all quantized linear layers share: tensors of given shapes, and a forward that shapes are enough for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import library, nn
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer that is to be replaced; `bias_dtype` is None without a bias."""

    in_features: int
    out_features: int
    dtype: torch.dtype
    bias_dtype: torch.dtype | None

    @classmethod
    def of(cls, module: nn.Module) -> LinearShape:
        """The shape of a Linear, or of a Conv1D, which keeps its weight transposed."""
        weight, bias = module.weight, module.bias
        assert isinstance(weight, torch.Tensor)
        outputs, inputs = reversed(weight.shape) if isinstance(module, Conv1D) else weight.shape
        return cls(inputs, outputs, weight.dtype, bias.dtype if isinstance(bias, torch.Tensor) else None)

    @property
    def num_weights(self) -> int:
        """Elements of the weight that is replaced."""
        return self.in_features * self.out_features


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor that a quantized layer holds."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_buffer: bool = False


def hold(module: nn.Module, tensors: Iterable[Stored]) -> None:
    """Give `module` these tensors, on the meta device."""
    for tensor in tensors:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if tensor.is_buffer:
            module.register_buffer(tensor.name, empty)
        else:
            module.register_parameter(tensor.name, nn.Parameter(empty, requires_grad=False))


class QuantizedLinear(nn.Module):
    """A linear layer with packed weights; its class says how, by `multiply`."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, shape: LinearShape, tensors: Iterable[Stored], bias_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.in_features = shape.in_features
        self.out_features = shape.out_features
        self.weight_dtype = shape.dtype
        hold(self, tensors)
        if shape.bias_dtype is None:
            self.register_parameter("bias", None)
        else:
            hold(self, [Stored("bias", (shape.out_features,), bias_dtype or shape.bias_dtype)])

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The same shape with `out_features` last, in the dtype of the input."""
        rows = hidden_states.reshape(-1, self.in_features)
        return self.multiply(rows).reshape(*hidden_states.shape[:-1], self.out_features)

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """The product for each of `rows` (two-dimensional), with what the kernel allocates on the way."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """As torch's Linear shows it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """An output that a fused kernel writes from `rows` and the packed `weight`, the bias added in place."""
        meet(rows, weight)
        output = packed_product(rows, self._packed(), self.out_features)
        return output if self.bias is None else output.add_(self.bias)

    def unpacked_product(self, rows: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The product with `weight` unpacked to `dtype` first, which lives as long as the product takes."""
        unpacked = self.unpacked(weight, dtype).to(rows.dtype)
        bias = None if self.bias is None else self.bias.to(rows.dtype)
        return nn.functional.linear(rows, unpacked, bias)

    def unpacked_into(self, buffer: torch.Tensor) -> torch.Tensor:
        """The weight unpacked into the front of `buffer`, (outputs, inputs)."""
        unpacked = buffer[: self.in_features * self.out_features].view(self.out_features, self.in_features)
        torch.ops.devmap.unpack_into(self._packed(), unpacked)
        return unpacked

    def unpacked(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight that `weight` and what lies beside it stand for, (outputs, inputs)."""
        others = [tensor for tensor in self._packed() if tensor is not weight]
        size = (self.out_features, self.in_features)
        result: torch.Tensor = torch.ops.devmap.unpack([weight, *others], size, dtype)
        return result

    def _packed(self) -> list[torch.Tensor]:
        """All that stands for the weight, scales among it."""
        tensors = {**dict(self.named_parameters(recurse=False)), **dict(self.named_buffers(recurse=False))}
        return [tensor for name, tensor in tensors.items() if name != "bias"]


_operators = library.Library("devmap", "DEF")
_operators.define(
    "packed_product(Tensor rows, Tensor[] packed, int num_outputs, *, ScalarType? dtype=None) -> Tensor",
)
_operators.define("unpack(Tensor[] packed, int[] size, ScalarType dtype) -> Tensor")
_operators.define("unpack_into(Tensor[] packed, Tensor(a!) buffer) -> ()")
_operators.define(
    "quantize(Tensor rows, int[] size, ScalarType dtype, int[] num_scales, ScalarType scale_dtype) -> (Tensor, Tensor)"
)
_operators.impl(
    "packed_product",
    lambda rows, _packed, num_outputs, *, dtype=None: rows.new_empty((rows.shape[0], num_outputs), dtype=dtype),
    "CompositeExplicitAutograd",
)
_operators.impl(
    "unpack", lambda packed, size, dtype: packed[0].new_empty(size, dtype=dtype), "CompositeExplicitAutograd"
)
_operators.impl("unpack_into", lambda _packed, _buffer: None, "CompositeExplicitAutograd")
_operators.impl(
    "quantize",
    lambda rows, size, dtype, num_scales, scale_dtype: (
        rows.new_empty(num_scales, dtype=scale_dtype),
        rows.new_empty(size, dtype=dtype),
    ),
    "CompositeExplicitAutograd",
)


def packed_product(
    rows: torch.Tensor, packed: list[torch.Tensor], num_outputs: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """What a fused kernel makes of `rows` and the tensors that stand for a weight, or for those of all experts.

    An operator of its own, so that whoever counts what operators read sees what this one does.
    """
    result: torch.Tensor = torch.ops.devmap.packed_product(rows, packed, num_outputs, dtype=dtype)
    return result


def quantized(
    rows: torch.Tensor,
    size: Sequence[int],
    dtype: torch.dtype,
    num_scales: Sequence[int],
    scale_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of `rows`, and what a kernel makes of `rows` by them."""
    scales, packed = torch.ops.devmap.quantize(rows, size, dtype, num_scales, scale_dtype)
    return scales, packed


def meet(rows: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise as PyTorch does where the two lie on different devices; takes no memory."""
    rows.new_empty((0, 1), dtype=torch.uint8).add(weight.new_empty((0, 1), dtype=torch.uint8))


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)
