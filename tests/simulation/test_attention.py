"""Which attention kernel a GPU takes, and what it takes from memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from devmap_cli.simulation.attention import AttentionInputs, AttentionKernel, choose_kernel, scratch_sizes
from devmap_cli.simulation.backend import simulated_devices

MIB = 1 << 20
AMPERE, TURING = (8, 0), (7, 5)
PLAIN = AttentionInputs((1, 8, 100, 64), (1, 8, 100, 64), (1, 8, 100, 64), torch.bfloat16, is_causal=True)
MASKED = {"mask": (1, 1, 100, 100), "mask_dtype": torch.bool, "is_causal": False}
GROUPED = {"key": (1, 2, 100, 64), "value": (1, 2, 100, 64)}


def sized(head_size: int, value_size: int | None = None) -> dict[str, Any]:
    shape = (1, 8, 100, head_size)
    return {"query": shape, "key": shape, "value": (1, 8, 100, value_size or head_size)}


@pytest.mark.parametrize(
    ("change", "compute_capability", "expected"),
    [
        ({}, AMPERE, AttentionKernel.FLASH),
        ({"dtype": torch.float16}, AMPERE, AttentionKernel.FLASH),
        ({"dtype": torch.float32}, AMPERE, AttentionKernel.EFFICIENT),  # flash takes half precision only
        (MASKED, AMPERE, AttentionKernel.EFFICIENT),  # flash takes no mask
        ({"dtype": torch.float16}, TURING, AttentionKernel.EFFICIENT),  # flash needs compute capability 8.0
        ({"dtype": torch.bfloat16}, TURING, AttentionKernel.MATH),  # and bfloat16 too
        ({**GROUPED, "enable_gqa": True}, AMPERE, AttentionKernel.FLASH),
        ({**GROUPED, **MASKED, "enable_gqa": True}, AMPERE, AttentionKernel.MATH),  # efficient takes no groups
        (GROUPED, AMPERE, AttentionKernel.MATH),
        (sized(256), AMPERE, AttentionKernel.FLASH),
        (sized(264), AMPERE, AttentionKernel.EFFICIENT),  # flash ends at head size 256
        (sized(192, 128), AMPERE, AttentionKernel.EFFICIENT),  # flash wants equal head sizes
        (sized(60), AMPERE, AttentionKernel.FLASH),  # padded to 64
        ({**sized(60), **MASKED}, AMPERE, AttentionKernel.MATH),  # 60 bfloat16 are no multiple of 128 bits
        ({"query": (1, 8, 50, 64)}, AMPERE, AttentionKernel.EFFICIENT),  # causal, but not square
        ({"query": (1, 8, 1, 64), "is_causal": False}, AMPERE, AttentionKernel.FLASH),
        ({"query": (8, 100, 64)}, AMPERE, AttentionKernel.MATH),  # three dimensions
        ({"query": (1, 8, 0, 64)}, AMPERE, AttentionKernel.MATH),
        ({"dtype": torch.float64}, AMPERE, AttentionKernel.MATH),
    ],
)
def test_the_kernel_that_is_chosen(
    change: dict[str, Any], compute_capability: tuple[int, int], expected: AttentionKernel
) -> None:
    assert choose_kernel(replace(PLAIN, **change), compute_capability) is expected


def test_flash_keeps_a_log_sum_exp_per_query() -> None:
    assert scratch_sizes(PLAIN, AttentionKernel.FLASH) == [8 * 100 * 4]


def test_flash_pads_head_sizes_to_eight() -> None:
    padded = 8 * 100 * 64 * 2  # heads x tokens x 64 x bfloat16, for 60
    assert scratch_sizes(replace(PLAIN, **sized(60)), AttentionKernel.FLASH) == [8 * 100 * 4, *[padded] * 3]


def test_efficient_turns_a_boolean_mask_into_numbers_and_pads_it() -> None:
    inputs = replace(PLAIN, mask=(1, 1, 100, 100), mask_dtype=torch.bool, is_causal=False)
    # 100 keys as bfloat16, then padded to 112, the next multiple of 16
    assert scratch_sizes(inputs, AttentionKernel.EFFICIENT) == [100 * 100 * 2, 100 * 112 * 2]


def test_efficient_accumulates_large_heads_in_float32() -> None:
    inputs = replace(PLAIN, **sized(192, 128))
    assert scratch_sizes(inputs, AttentionKernel.EFFICIENT) == [8 * 100 * 128 * 4]
    assert scratch_sizes(replace(inputs, dtype=torch.float32), AttentionKernel.EFFICIENT) == []


def peak_of_attention(mask: bool, compute_capability: tuple[int, int]) -> int:
    with simulated_devices([256 * MIB], compute_capabilities=[compute_capability]) as machine:
        query = torch.zeros(1, 4, 256, 64, dtype=torch.bfloat16, device=0)
        masks = torch.ones(1, 1, 256, 256, dtype=torch.bool, device=0) if mask else None
        before = machine.devices[0].use.allocated_bytes
        machine.devices[0].reset_peak()
        scaled_dot_product_attention(query, query, query, attn_mask=masks)
        return machine.devices[0].peak.allocated_bytes - before


def test_flash_takes_its_output_and_little_more() -> None:
    # the output, 4 x 256 x 64 x bfloat16, and 4 x 256 float32
    assert peak_of_attention(False, AMPERE) == 131072 + 4096


def test_efficient_takes_the_mask_too() -> None:
    assert peak_of_attention(True, AMPERE) == 131072 + 256 * 256 * 2


def test_math_takes_all_scores_in_float32() -> None:
    scores = 4 * 256 * 256 * 4
    assert peak_of_attention(False, TURING) > 2 * scores  # before and after the softmax


@pytest.mark.parametrize("compute_capability", [AMPERE, TURING])
def test_the_numbers_are_the_cpus_and_the_layout_the_gpus(compute_capability: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 32, 16, generator=generator).bfloat16() for _ in range(3))
    expected = scaled_dot_product_attention(query, key, value, is_causal=True)
    with simulated_devices([256 * MIB], compute_capabilities=[compute_capability]):
        output = scaled_dot_product_attention(query.to(0), key.to(0), value.to(0), is_causal=True)
        assert torch.equal(output.cpu(), expected)
        # fused kernels write (batch, tokens, heads, size), the composite (batch, heads, tokens, size)
        assert output.transpose(1, 2).is_contiguous() == (compute_capability == AMPERE)


def test_devices_do_not_mix() -> None:
    with simulated_devices([4 * MIB] * 2):
        here, there = (torch.zeros(1, 1, 4, 8, device=index) for index in (0, 1))
        with pytest.raises(RuntimeError, match="argument key in method scaled_dot_product_attention"):
            scaled_dot_product_attention(here, there, here)
