"""Device memory that CUDA kernels take besides their results, and give back when they are done.

Only what grows with the input: counters and flags of a few bytes are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from devmap_cli.simulation.shapes import count_nonzero

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from devmap_cli.simulation.operators import Call

aten = torch.ops.aten

_INT64_BYTES = 8

USES_MATMUL_LIBRARY = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.linear.default,
        aten.addmv.default,
        aten.mv.default,
        aten.dot.default,
    }
)
"""Operators that run on cuBLAS, which keeps a workspace from its first use on."""


def _mask_positions(call: Call) -> int:
    """Indexing by a mask makes the positions it selects first: `expandTensors` of ATen/native/IndexingUtils.h."""
    masks = [index for index in call.args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
    return sum(_count(mask) * mask.dim() * _INT64_BYTES for mask in masks)


def _count(mask: torch.Tensor) -> int:
    return mask.numel() if mask.is_meta else count_nonzero(mask)


def _masked_scatter(call: Call) -> int:
    """A prefix sum and a copy of the mask, both of the full shape: `masked_scatter__cuda` of ATen/native/cuda."""
    shape = call.args[0].shape
    mask_bytes = 0 if call.args[1].shape == shape and call.args[1].is_contiguous() else int(shape.numel())
    return int(shape.numel()) * _INT64_BYTES + mask_bytes


SCRATCH_RULES: dict[Any, Callable[[Call], int]] = {
    aten.index.Tensor: _mask_positions,
    aten.index_put.default: _mask_positions,
    aten.index_put_.default: _mask_positions,
    aten.masked_scatter.default: _masked_scatter,
    aten.masked_scatter_.default: _masked_scatter,
}
"""What the kernel of an operator takes while it runs, in bytes."""
