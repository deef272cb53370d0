"""4-bit floats: MXFP4 (gpt-oss) and NVFP4 (ModelOpt's exports), linear layers and experts.

Sources: transformers' integrations/mxfp4.py and the layout of its kernels; NVIDIA ModelOpt's export to Hugging Face.
"""

from __future__ import annotations

import torch
from torch import nn

from devmap_cli.model.quantization.float8 import weighted_sum
from devmap_cli.model.quantization.linear import (
    LinearShape,
    QuantizedLinear,
    Stored,
    ceil_div,
    hold,
    meet,
    packed_product,
    quantized,
)

MX_BLOCK = 32
NV_BLOCK = 16


class NVFP4Linear(QuantizedLinear):
    """A scale for each 16 weights and one for all; a weight-only kind has none for its inputs."""

    def __init__(self, shape: LinearShape, *, quantizes_inputs: bool) -> None:
        outputs = shape.out_features
        tensors = [
            Stored("weight", (outputs, ceil_div(shape.in_features, 2)), torch.uint8),
            Stored("weight_scale", (outputs, ceil_div(shape.in_features, NV_BLOCK)), torch.float8_e4m3fn),
            Stored("weight_scale_2", (), torch.float32),
        ]
        if quantizes_inputs:
            tensors.append(Stored("input_scale", (), torch.float32))
        super().__init__(shape, tensors)
        self.quantizes_inputs = quantizes_inputs

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """In 4 bit, with the inputs packed alike, or with the packed weight alone."""
        packed = _packed_rows(rows) if self.quantizes_inputs else None
        output = self.product(rows, self.weight)
        del packed
        return output


def _packed_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, inputs = rows.shape
    num_scales = (num_rows, ceil_div(inputs, NV_BLOCK))
    return quantized(rows, (num_rows, ceil_div(inputs, 2)), torch.uint8, num_scales, torch.float8_e4m3fn)


class PackedExperts(nn.Module):
    """Experts whose three-dimensional parameters are packed along their last dimension.

    `stored` are its tensors, named after the parameters of `experts`, whose biases stay.
    """

    def __init__(self, experts: nn.Module, tensors: list[Stored]) -> None:
        super().__init__()
        up = next(value for name, value in experts.named_parameters() if name.endswith("up_proj"))
        down = experts.down_proj
        assert isinstance(down, torch.Tensor)
        is_plain = up.shape[2] == down.shape[1] and up.shape[1] in (down.shape[2], 2 * down.shape[2])
        self.hidden_size = down.shape[1] if is_plain else down.shape[2]  # of outputs by inputs, or transposed
        self.num_experts = up.shape[0]
        self.up_features = up[0].numel() // self.hidden_size
        self.inner_features = down[0].numel() // self.hidden_size
        hold(self, tensors)

    def forward(self, hidden_states: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        """The weighted sum over each row's experts; without `routing` the rows are sorted by expert already."""
        meet(hidden_states, next(self.parameters()))
        if not routing:
            return self._run(hidden_states)
        weights = next(tensor for tensor in reversed(routing) if tensor.is_floating_point())
        top_k = next(tensor for tensor in routing if not tensor.is_floating_point()).shape[-1]
        output = self._run(hidden_states.repeat_interleave(top_k, dim=0))
        return weighted_sum(output, weights[..., :top_k])

    def _run(self, rows: torch.Tensor) -> torch.Tensor:
        inner = packed_product(rows, self._packed("up"), self.up_features)
        gated = inner.new_empty((rows.shape[0], self.inner_features))
        del inner
        return packed_product(gated, self._packed("down"), self.hidden_size)

    def _packed(self, direction: str) -> list[torch.Tensor]:
        return [tensor for name, tensor in self.named_parameters() if f"{direction}_proj" in name]


class NVFP4Experts(PackedExperts):
    """Each expert's projections as ModelOpt exports them, put together."""

    def __init__(self, experts: nn.Module, *, quantizes_inputs: bool) -> None:
        tensors: list[Stored] = []
        for name, parameter in experts.named_parameters():
            if parameter.dim() != 3:
                tensors.append(Stored(name, tuple(parameter.shape), parameter.dtype))
                continue
            count, first, last = parameter.shape
            num_scales = (count, 2) if "gate_up" in name else (count,)  # gate and up are two layers there
            tensors += [
                Stored(name, (count, first, ceil_div(last, 2)), torch.uint8),
                Stored(f"{name}_scale", (count, first, ceil_div(last, NV_BLOCK)), torch.float8_e4m3fn),
                Stored(f"{name}_scale_2", num_scales, torch.float32),
            ]
            if quantizes_inputs:
                tensors.append(Stored(f"{name}_input_scale", num_scales, torch.float32))
        super().__init__(experts, tensors)


class FP8PerTensorExperts(PackedExperts):
    """Each expert's projections in 8 bit with one scale, as ModelOpt exports them, put together."""

    def __init__(self, experts: nn.Module) -> None:
        tensors: list[Stored] = []
        for name, parameter in experts.named_parameters():
            if parameter.dim() != 3:
                tensors.append(Stored(name, tuple(parameter.shape), parameter.dtype))
                continue
            num_scales = (parameter.shape[0], 2) if "gate_up" in name else (parameter.shape[0],)
            tensors += [
                Stored(name, tuple(parameter.shape), torch.float8_e4m3fn),
                Stored(f"{name}_scale", num_scales, torch.float32),
                Stored(f"{name}_input_scale", num_scales, torch.float32),
            ]
        super().__init__(experts, tensors)


class Mxfp4GptOssExperts(PackedExperts):
    """gpt-oss' experts as its Triton kernels read them; the biases are float32, and gating is part of the product."""

    def __init__(self, experts: nn.Module) -> None:
        tensors: list[Stored] = []
        for name in ("gate_up_proj", "down_proj"):
            count, inputs, outputs = getattr(experts, name).shape
            tensors += [
                Stored(name, (count, outputs, ceil_div(inputs, 2)), torch.uint8),
                Stored(f"{name}_scales", (count, outputs, ceil_div(inputs, MX_BLOCK)), torch.uint8),
                Stored(f"{name}_bias", (count, outputs), torch.float32),
            ]
        super().__init__(experts, tensors)

    def _run(self, rows: torch.Tensor) -> torch.Tensor:
        gated = packed_product(rows, self._packed("up"), self.inner_features)
        return packed_product(gated, self._packed("down"), self.hidden_size)
