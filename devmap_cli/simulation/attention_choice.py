"""Lets a model use one of transformers' attention implementations, whether or not its package is installed here."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from devmap_cli.simulation.machine import Allocation
from devmap_cli.simulation.tensor import DeviceTensor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_FLASH = "flash_attention_2"
_FLOAT32_BYTES = 4


@contextmanager
def attention_of(model: Any, attention: str) -> Iterator[None]:
    """Let every part of `model` use `attention`, or "eager" where its class supports nothing else."""
    chosen: dict[int, tuple[Any, str]] = {}
    for module in model.modules():
        if hasattr(module, "_supports_sdpa") and hasattr(module, "config"):
            chosen.setdefault(id(module.config), (module.config, _supported(module, attention)))
    before = {key: getattr(config, "_attn_implementation", None) for key, (config, _) in chosen.items()}
    with ExitStack() as stack:
        if attention == _FLASH:
            stack.enter_context(_simulated_flash_attention())
        try:
            for config, implementation in chosen.values():
                config._attn_implementation = implementation
            yield
        finally:
            for key, (config, _) in chosen.items():
                config._attn_implementation = before[key]


def _supported(module: Any, attention: str) -> str:
    supports = {"sdpa": module._supports_sdpa, _FLASH: getattr(module, "_supports_flash_attn", False)}
    return attention if supports.get(attention, True) else "eager"


@contextmanager
def _simulated_flash_attention() -> Iterator[None]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with_package = ALL_ATTENTION_FUNCTIONS[_FLASH]
    ALL_ATTENTION_FUNCTIONS[_FLASH] = _flash_attention_2
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[_FLASH] = with_package


def _flash_attention_2(
    _module: Any, query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor, *_args: Any, **_kwargs: Any
) -> tuple[torch.Tensor, None]:
    """The memory of `flash_attn_func`: the output (batch, tokens, heads, head size) and a log-sum-exp per query.

    Source: mha_fwd in csrc/flash_attn/flash_api.cpp of flash-attention.
    """
    assert isinstance(query, DeviceTensor)
    batch, heads, tokens, _ = query.shape
    log_sum_exp = Allocation(query.allocation.device, batch * heads * tokens * _FLOAT32_BYTES)
    output = torch.empty((batch, tokens, heads, value.shape[-1]), dtype=query.dtype, device=query.device)
    del log_sum_exp
    return output, None
