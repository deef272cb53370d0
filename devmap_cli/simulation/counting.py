"""Counts the operations and bytes of each operator that runs on a simulated device.

Operations are counted by the formulas of `torch.utils.flop_counter`, which go by shapes. Bytes are those of the tensors
that an operator is given and those it makes, each read or written once: caches between kernel and memory are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.flop_counter import flop_registry

from devmap_cli.simulation.tensor import DeviceTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from typing import Any

    from devmap_cli.simulation.machine import SimulatedDevice
    from devmap_cli.simulation.operators import Call

aten = torch.ops.aten

_MAX_KEPT = 10_000
_SMALL_BYTES = 1 << 16
"""Tensors of up to this size count as they are, expanded or not: their bytes do not matter."""

_WITHOUT_KERNEL = frozenset(
    {
        "_unsafe_view",
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "set_",
        "squeeze_",
        "transpose_",
        "unsafe_chunk",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "unsqueeze_",
    }
)
"""Operators that only take memory, or give it another shape, though PyTorch does not call them views."""


def counter_of(func: Any) -> Callable[[Call, Any], tuple[int, int] | None] | None:
    """What counts operations and bytes of a call of operator `func`; None for one that starts no kernel."""
    packet = func.overloadpacket
    name = func._schema.name.rpartition("::")[2]
    if func.is_view or name in _WITHOUT_KERNEL:
        return None
    flops = _FLOPS.get(name) or (_by_registry if packet in flop_registry else None)
    num_bytes = _BYTES.get(name, _all_bytes)

    def count(call: Call, results: Any) -> tuple[int, int] | None:
        made = [results] if isinstance(results, torch.Tensor) else _tensors_among(results)
        if flops is None:
            return 0, num_bytes(call, made)
        return (flops(call, made[0]), num_bytes(call, made)) if made else None

    return count


def count_copy(device: SimulatedDevice, target: torch.Tensor, source: torch.Tensor) -> None:
    """Count a copy of `source` to `target` within `device`."""
    add_work(device, 0, _stored_bytes(source) + target.nbytes)


def attention_work(
    call: Call, query: Sequence[int], key: Sequence[int], value: Sequence[int], output: torch.Tensor
) -> tuple[int, int]:
    """Operations and bytes of fused attention by the shapes of its arguments, (batch, heads, tokens, head size).

    Both products count whole, also where a causal mask lets a kernel leave half of them out, as PyTorch's own
    `sdpa_flop_count` does. Keys and values are read once: what is read again by other queries comes from a cache.
    """
    batch, heads, tokens, head_size = query
    flops = 2 * batch * heads * tokens * key[2] * (head_size + value[3])
    return flops, _all_bytes(call, [output])


def add_work(device: SimulatedDevice, flops: int, bytes_moved: int) -> None:
    """Count one kernel of `device`."""
    machine, block = device.machine, None
    if machine.tape is not None:
        machine.tape.worked(device, flops, bytes_moved)
    if machine.recorder is not None and device.index is not None:
        block = machine.recorder.block_on(device.index)
    device.counter.add(machine.current_phase, flops, bytes_moved, block)


# ---------------------------------------------------------------- operations


_known_flops: dict[Hashable, int] = {}


def _by_registry(call: Call, result: torch.Tensor) -> int:
    key = (call.func, result.shape, *[tensor.shape for tensor in call.tensors])
    flops = _known_flops.get(key)
    if flops is None:
        if len(_known_flops) >= _MAX_KEPT:
            _known_flops.clear()
        formula = flop_registry[call.func.overloadpacket]
        flops = _known_flops[key] = int(formula(*call.args, **call.kwargs, out_val=result))
    return flops


def _product_flops(call: Call, result: torch.Tensor) -> int:
    return 2 * result.numel() * int(call.args[0].shape[-1])


def _matrix_vector_flops(call: Call, _result: torch.Tensor) -> int:
    """Of `mv`, `dot` and `addmv`, the last of which has the matrix second."""
    return 2 * int(max(call.tensors, key=torch.Tensor.numel).numel())


def _grouped_flops(call: Call, result: torch.Tensor) -> int:
    """Each row with the matrix of its group; where both are grouped by the inner dimension, a result per group."""
    rows, matrices = call.args[:2]
    num_groups = result.shape[0] if rows.dim() == matrices.dim() == 2 else 1
    return 2 * result.numel() * int(rows.shape[-1]) // max(1, num_groups)


_FLOPS: dict[str, Callable[[Call, torch.Tensor], int]] = {
    "linear": _product_flops,
    "packed_product": _product_flops,
    "mv": _matrix_vector_flops,
    "addmv": _matrix_vector_flops,
    "dot": _matrix_vector_flops,
    "_grouped_mm": _grouped_flops,
}
"""Formulas for operators that PyTorch's registry lacks, because they are made of others elsewhere."""


# ---------------------------------------------------------------- bytes


def _stored_bytes(tensor: torch.Tensor) -> int:
    """Its bytes in memory: what is expanded over a dimension lies there once."""
    num_bytes = tensor.nbytes
    if num_bytes <= _SMALL_BYTES:
        return num_bytes
    form = tensor.form if isinstance(tensor, DeviceTensor) else None
    return min(num_bytes, tensor.untyped_storage().nbytes() if form is None else form.storage_bytes)


def _all_bytes(call: Call, made: list[torch.Tensor]) -> int:
    total = 0
    for tensor in call.tensors:
        total += _stored_bytes(tensor)
    for tensor in made:
        total += tensor.nbytes
    return total


def _row_bytes(call: Call, made: list[torch.Tensor]) -> int:
    """The rows read and written, and the indices."""
    return 2 * _result_bytes(call, made) + sum([_stored_bytes(index) for index in call.tensors[1:]])


def _written_row_bytes(call: Call, _made: list[torch.Tensor]) -> int:
    """Values read and written, and the indices, at most as long as they are."""
    return 2 * sum([_stored_bytes(tensor) for tensor in call.tensors[1:]])


def _result_bytes(_call: Call, made: list[torch.Tensor]) -> int:
    return sum([tensor.nbytes for tensor in made])


def _grouped_bytes(call: Call, made: list[torch.Tensor]) -> int:
    """Rows and results, and of the matrices those whose group has rows."""
    rows, matrices, *ends = call.tensors
    num_bytes = _stored_bytes(rows) + _result_bytes(call, made)
    if matrices.dim() < 3:
        return num_bytes + _stored_bytes(matrices)
    num_groups = int(matrices.shape[0])
    return num_bytes + matrices.nbytes // num_groups * _num_used(num_groups, rows, ends)


def _packed_bytes(call: Call, made: list[torch.Tensor]) -> int:
    """Rows, results and the packed weight; of all experts' weights, which have three dimensions, those in use."""
    rows, *packed = call.tensors
    num_bytes = _stored_bytes(rows) + _result_bytes(call, made)
    largest = max(packed, key=torch.Tensor.dim)
    if largest.dim() < 3:
        return num_bytes + sum([_stored_bytes(tensor) for tensor in packed])
    num_experts = int(largest.shape[0])
    share = sum([tensor.nbytes // num_experts for tensor in packed])
    return num_bytes + share * _num_used(num_experts, rows, [])


def _num_used(num_groups: int, rows: torch.Tensor, ends: list[torch.Tensor]) -> int:
    """How many groups have rows: by where each ends, or if that is unknown, as many as there can be."""
    if rows.dim() == 3:
        return num_groups
    if ends and not ends[0].is_meta:
        return len(set(ends[0].tolist()) - {0})
    return min(num_groups, int(rows.shape[0]))


_BYTES: dict[str, Callable[[Call, list[torch.Tensor]], int]] = {
    **dict.fromkeys(
        ("_unsafe_index", "embedding", "gather", "index", "index_select", "masked_select", "take"), _row_bytes
    ),
    **dict.fromkeys(
        ("_index_put_impl_", "index_add_", "index_copy_", "index_put_", "scatter_", "scatter_add_"), _written_row_bytes
    ),
    **dict.fromkeys(("fill_", "zero_"), _result_bytes),
    "_grouped_mm": _grouped_bytes,
    "packed_product": _packed_bytes,
}
"""Operators that do not read and write all of their arguments and results."""


def _tensors_among(results: Any) -> list[torch.Tensor]:
    return [item for item in results if isinstance(item, torch.Tensor)] if isinstance(results, (tuple, list)) else []
