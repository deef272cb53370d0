"""Scaled dot-product attention as a GPU runs it: which kernel is chosen, and what it takes from memory.

Sources: the conditions of `use_flash_attention` and `use_mem_efficient_attention` in
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, the preparation of arguments in
aten/src/ATen/native/transformers/attention.cpp, the buffers in cuda/flash_attn/flash_api.cpp and
cuda/attention.cu (`_efficient_attention_forward`), all of PyTorch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from devmap_cli.simulation.counting import add_work, attention_work
from devmap_cli.simulation.machine import Allocation
from devmap_cli.simulation.operators import Call, kernel
from devmap_cli.simulation.repetition import arguments_of, keep, known_outcome
from devmap_cli.simulation.tensor import DeviceTensor

if TYPE_CHECKING:
    from collections.abc import Hashable
    from typing import Any

    from devmap_cli.simulation.repetition import Arguments

aten = torch.ops.aten

_HALF_PRECISION = (torch.float16, torch.bfloat16)
_FLOAT32_BYTES = 4


class AttentionKernel(enum.Enum):
    """The implementations that PyTorch chooses among."""

    FLASH = "flash"
    EFFICIENT = "memory-efficient"
    MATH = "math"


@dataclass(frozen=True)
class AttentionInputs:
    """What the choice depends on; shapes are (batch, heads, tokens, head size)."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    mask: tuple[int, ...] | None = None
    mask_dtype: torch.dtype | None = None
    is_causal: bool = False
    enable_gqa: bool = False


def choose_kernel(inputs: AttentionInputs, compute_capability: tuple[int, int]) -> AttentionKernel:
    """The first of flash, memory-efficient and math whose conditions hold, PyTorch's default order."""
    shapes = (inputs.query, inputs.key, inputs.value)
    if any(len(shape) != 4 or 0 in shape for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
        return AttentionKernel.MATH
    if _flash_runs(inputs, compute_capability):
        return AttentionKernel.FLASH
    if _efficient_runs(inputs, compute_capability):
        return AttentionKernel.EFFICIENT
    return AttentionKernel.MATH


def _flash_runs(inputs: AttentionInputs, compute_capability: tuple[int, int]) -> bool:
    heads, key_heads = inputs.query[1], inputs.key[1]
    same_heads = heads == key_heads == inputs.value[1]
    grouped = inputs.enable_gqa and key_heads == inputs.value[1] and heads % key_heads == 0
    head_sizes = {inputs.query[3], inputs.key[3], inputs.value[3]}
    return (
        compute_capability >= (8, 0)
        and inputs.dtype in _HALF_PRECISION
        and inputs.mask is None
        and (same_heads or grouped)
        and len(head_sizes) == 1
        and max(head_sizes) <= 256
        and not (inputs.is_causal and inputs.query[2] != inputs.key[2])
    )


def _efficient_runs(inputs: AttentionInputs, compute_capability: tuple[int, int]) -> bool:
    dtypes = (torch.float16, torch.float32) if compute_capability < (8, 0) else (*_HALF_PRECISION, torch.float32)
    same_heads = inputs.query[1] == inputs.key[1] == inputs.value[1]
    alignment = _efficient_alignment(inputs.dtype, compute_capability)
    return (
        compute_capability >= (5, 0)
        and inputs.dtype in dtypes
        and same_heads
        and inputs.query[3] == inputs.key[3]
        and inputs.query[3] % alignment == 0
        and inputs.value[3] % alignment == 0
    )


def _efficient_alignment(dtype: torch.dtype, compute_capability: tuple[int, int]) -> int:
    """Elements that head sizes must be a multiple of (`minimum_gemm_alignment`): 128 bits for tensor cores."""
    if dtype in _HALF_PRECISION:
        return 8 if compute_capability >= (7, 0) else 1
    return 4 if compute_capability >= (8, 0) else 1


def scratch_sizes(inputs: AttentionInputs, kernel: AttentionKernel) -> list[int]:
    """Bytes of each buffer that a fused kernel takes besides its output."""
    if kernel is AttentionKernel.FLASH:
        return _flash_scratch(inputs)
    return _efficient_scratch(inputs)


def _flash_scratch(inputs: AttentionInputs) -> list[int]:
    """Log-sum-exp per query in float32; copies padded to a head size that 8 divides, if it does not."""
    batch, heads, tokens, head_size = inputs.query
    buffers = [batch * heads * tokens * _FLOAT32_BYTES]
    if head_size % 8:
        for shape in (inputs.query, inputs.key, inputs.value):
            buffers.append(shape[0] * shape[1] * shape[2] * _round_up(head_size, 8) * inputs.dtype.itemsize)
    return buffers


def _efficient_scratch(inputs: AttentionInputs) -> list[int]:
    """The mask as floats, padded to 16 keys; a float32 accumulator for heads too large for registers."""
    batch, heads, tokens, _ = inputs.query
    buffers = []
    if inputs.mask is not None:
        keys = inputs.mask[-1]
        rows = torch.Size(inputs.mask[:-1]).numel()
        if inputs.mask_dtype == torch.bool:
            buffers.append(rows * keys * inputs.dtype.itemsize)
        if keys % 16:
            buffers.append(rows * _round_up(keys, 16) * inputs.dtype.itemsize)
    head_size, value_size = inputs.query[3], inputs.value[3]
    if max(head_size, value_size) > 128 and inputs.dtype in _HALF_PRECISION:
        buffers.append(batch * tokens * heads * value_size * _FLOAT32_BYTES)
    return buffers


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# ---------------------------------------------------------------- on simulated tensors


@kernel(aten.scaled_dot_product_attention.default)
def _scaled_dot_product_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DeviceTensor:
    arguments = arguments_of(func, args, kwargs)
    if arguments is None or not arguments.device.machine.numbers.repeats(func):
        return _attend(func, args, kwargs, None, None)
    key = (arguments.device.compute_capability, arguments.key)
    outcome = known_outcome(key)
    if outcome is None:
        return _attend(func, args, kwargs, key, arguments)
    output: DeviceTensor = outcome.again(arguments)
    return output


def _attend(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: Hashable, arguments: Arguments | None
) -> DeviceTensor:
    """Attention by the kernel chosen for it; a fused one is kept for calls with equal `arguments`."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    call = Call(func, args, kwargs)
    assert call.device is not None
    inputs = _inputs(given)
    chosen = choose_kernel(inputs, call.device.compute_capability)
    if chosen is AttentionKernel.MATH:
        output = _math(given)
    else:
        output = _fused(call, inputs, chosen)
        work = attention_work(call, inputs.query, inputs.key, inputs.value, output.numbers)
        add_work(call.device, *work)
        if arguments is not None:
            keep(key, arguments, output, work, scratch=_sizes(inputs, chosen))
    computed = call.device.machine.numbers.attend(call)
    if computed is not None:
        numbers = output.numbers
        known = torch.empty_strided(numbers.size(), numbers.stride(), dtype=numbers.dtype)
        output.numbers = known.copy_(computed)
    return output


def _fused(call: Call, inputs: AttentionInputs, chosen: AttentionKernel) -> DeviceTensor:
    """The result of a fused kernel, its numbers unknown, after what the kernel takes besides."""
    assert call.device is not None
    batch, heads, tokens, _ = inputs.query
    value_size = inputs.value[3]
    stored_size = _round_up(value_size, 8) if chosen is AttentionKernel.FLASH else value_size
    # Both kernels write (batch, tokens, heads, head size), returned as a view with heads first.
    stored = torch.empty((batch, tokens, heads, stored_size), dtype=inputs.dtype, device="meta")
    scratch = [Allocation(call.device, size) for size in _sizes(inputs, chosen)]
    allocation = Allocation(call.device, stored.untyped_storage().nbytes())
    del scratch
    return DeviceTensor.on_device(stored[..., :value_size].transpose(1, 2), allocation)


def _sizes(inputs: AttentionInputs, chosen: AttentionKernel) -> tuple[int, ...]:
    return tuple(size for size in scratch_sizes(inputs, chosen) if size)


def _inputs(given: dict[str, Any]) -> AttentionInputs:
    query, mask = given["query"], given.get("attn_mask")
    return AttentionInputs(
        query=tuple(query.shape),
        key=tuple(given["key"].shape),
        value=tuple(given["value"].shape),
        dtype=query.dtype,
        mask=None if mask is None else tuple(mask.shape),
        mask_dtype=None if mask is None else mask.dtype,
        is_causal=bool(given.get("is_causal")),
        enable_gqa=bool(given.get("enable_gqa")),
    )


def _math(given: dict[str, Any]) -> DeviceTensor:
    """Run PyTorch's composite of matrix products and softmax on shapes, for the memory each step takes."""
    given = {name: _unknown(value) for name, value in given.items()}
    output: DeviceTensor = aten._scaled_dot_product_attention_math.default(
        given.pop("query"), given.pop("key"), given.pop("value"), **given
    )[0]
    return output


def _unknown(value: Any) -> Any:
    if not isinstance(value, DeviceTensor):
        return value
    shape = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return DeviceTensor.on_device(shape, value.allocation)
