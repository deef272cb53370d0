"""8-bit floats: transformers' fine-grained FP8 with its experts, FBGEMM's, and the plain kind that ModelOpt exports.

The parameters of the fine-grained classes are made by transformers' own constructors; the forwards here allocate what
its kernels do (integrations/finegrained_fp8.py, fbgemm_fp8.py): inputs quantized on the way in, scales beside them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations import finegrained_fp8

from devmap_cli.model.quantization.linear import (
    LinearShape,
    QuantizedLinear,
    Stored,
    ceil_div,
    meet,
    packed_product,
    quantized,
)

_INPUT_GROUP = 128
"""Inputs that share a scale where they are quantized by blocks."""


def quantized_rows(rows: torch.Tensor, group: int | None = _INPUT_GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale for each `group` of a row (None: one for all of it), and rows as 8-bit floats."""
    groups = 1 if group is None else ceil_div(rows.shape[-1], group)
    return quantized(rows, rows.shape, torch.float8_e4m3fn, (rows.shape[0], groups))


def _multiply(rows: torch.Tensor, weight: torch.Tensor, out_features: int) -> torch.Tensor:
    meet(rows, weight)
    inputs = quantized_rows(rows)
    output = packed_product(rows, [weight], out_features)
    del inputs
    return output


class FP8Linear(finegrained_fp8.FP8Linear):
    """One scale for each block of the weight."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - its base names it so
        """The same shape with `out_features` last."""
        rows = input.reshape(-1, self.in_features)
        output = _multiply(rows, self.weight, self.out_features)
        if self.bias is not None:
            output.add_(self.bias)
        return output.reshape(*input.shape[:-1], self.out_features)


class FP8GroupedLinear(finegrained_fp8.FP8GroupedLinear):
    """Independent products of the groups in the last dimension but one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (…, groups, inputs of a group) to (…, groups, outputs of a group)."""
        rows = x.movedim(-2, 0).reshape(-1, x.shape[-1])
        outputs_per_group = self.out_features // self.n_groups
        output = _multiply(rows, self.weight, outputs_per_group)
        output = output.reshape(self.n_groups, *x.shape[:-2], outputs_per_group).movedim(0, -2)
        return output if self.bias is None else output.add_(self.bias.view(self.n_groups, -1))


class FP8Experts(finegrained_fp8.FP8Experts):
    """All experts of a layer in two parameters, multiplied in one grouped kernel each."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum over each row's experts, in the shape of `hidden_states`."""
        rows = hidden_states.repeat_interleave(top_k_index.shape[-1], dim=0)
        weight = self.gate_up_proj if self.has_gate else self.up_proj
        inner = _multiply(rows, weight, weight.shape[1])
        inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
        output = _multiply(inner, self.down_proj, self.hidden_dim)
        return weighted_sum(output, top_k_weights)


def weighted_sum(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Each token's expert outputs scaled and put back in the order of tokens, then added up."""
    weighted = rows * weights.reshape(-1, 1).to(rows.dtype)
    ordered = torch.empty_like(weighted)
    return ordered.view(weights.shape[0], -1, rows.shape[-1]).sum(dim=1)


class FbgemmFp8Linear(QuantizedLinear):
    """One scale for each output, inputs quantized row by row."""

    def __init__(self, shape: LinearShape) -> None:
        super().__init__(
            shape,
            [
                Stored("weight", (shape.out_features, shape.in_features), torch.float8_e4m3fn),
                Stored("weight_scale", (shape.out_features, 1), torch.float32),
                Stored("input_scale_ub", (1,), torch.float32, True),
            ],
            bias_dtype=torch.float32,
        )

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """In 8 bit, the bias added in place."""
        inputs = quantized_rows(rows, None)
        output = self.product(rows, self.weight)
        del inputs
        return output


class ModelOptFP8Linear(QuantizedLinear):
    """One scale for the weight and one, measured beforehand, for its inputs."""

    def __init__(self, shape: LinearShape) -> None:
        super().__init__(
            shape,
            [
                Stored("weight", (shape.out_features, shape.in_features), torch.float8_e4m3fn),
                Stored("weight_scale", (), torch.float32),
                Stored("input_scale", (), torch.float32),
            ],
        )

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """In 8 bit."""
        inputs = rows.to(torch.float8_e4m3fn)
        output = self.product(rows, self.weight)
        del inputs
        return output


def fine_grained_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The arguments of transformers' classes, from a config.json and with its defaults."""
    size = settings.get("weight_block_size", (128, 128))
    return {
        "block_size": None if size is None else tuple(size),
        "activation_scheme": str(settings.get("activation_scheme", "dynamic")).lower(),
        "scale_fmt": settings.get("scale_fmt", "float"),
    }
