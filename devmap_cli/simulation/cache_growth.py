"""Makes the cache of a model as long as it is at the end of a generation, without generating the tokens between."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from devmap_cli.simulation.quantized_cache import Float8Layer, GroupedLayer
from devmap_cli.simulation.tensor import DeviceTensor

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from typing import Any


_MAX_STEPS = 8


def tensors_of(cache: Any) -> Iterator[torch.Tensor]:
    """Every tensor that `cache` keeps."""
    for layer in _layers(cache):
        yield from _tensors(vars(layer))


def grow(cache: Any, num_tokens: int, cross_attention_layers: Collection[int] = ()) -> None:
    """Let `cache` hold `num_tokens` more, where it grows with them; sliding windows no longer than they get.

    `cross_attention_layers` are places of layers that keep images, not tokens, and don't grow.

    Layers change one after the other, each with the old and the new tensor in memory for a moment, as when a
    generated token is appended. A few larger steps leave the allocator with nearly the same holes as one for each
    token: for 100 + 2,000 tokens of a 7B without grouped heads it then needs 175 MiB more than tensors have, 175 MiB
    with eight steps, and 106 MiB with a single one.
    """
    num_steps = min(_MAX_STEPS, num_tokens)
    for step in range(num_steps):
        _grow_once(cache, num_tokens * (step + 1) // num_steps - num_tokens * step // num_steps, cross_attention_layers)


def _grow_once(cache: Any, num_tokens: int, cross_attention_layers: Collection[int]) -> None:
    own = getattr(cache, "self_attention_cache", cache)  # the cross attention of an encoder-decoder does not grow
    for index, layer in enumerate(_layers(own)):
        if isinstance(layer, (GroupedLayer, Float8Layer)):
            _work_for(next(_tensors(layer._quantized_keys)))
            layer.grow(num_tokens)
            continue
        is_fixed = index in cross_attention_layers
        if is_fixed or not getattr(layer, "is_initialized", True) or _length(layer) == 0:
            continue
        length = _length(layer)
        # Names only: whoever holds the old tensors here keeps them in memory.
        for name in [name for name, value in vars(layer).items() if isinstance(value, torch.Tensor)]:
            _grow_tensor(layer, name, length, num_tokens)
        if hasattr(layer, "cumulative_length") and isinstance(layer.cumulative_length, int):
            layer.cumulative_length += num_tokens


def _grow_tensor(layer: Any, name: str, length: int, num_tokens: int) -> None:
    """Keys, values, and what else has a row per token in its last dimension but one."""
    tensor = getattr(layer, name)
    if tensor.dim() < 3 or tensor.shape[-2] != length:
        return
    window = getattr(layer, "sliding_window", None)
    kept = length + num_tokens if window is None else min(length + num_tokens, window)
    _work_for(tensor)
    grown = torch.empty([*tensor.shape[:-2], kept, tensor.shape[-1]], dtype=tensor.dtype, device=tensor.device)
    if kept == window:
        grown = grown[..., 1:, :]  # a full window keeps a view of all but its oldest token
    setattr(layer, name, grown)


def _work_for(tensor: torch.Tensor) -> None:
    """Let what is allocated next be for the block that has `tensor`."""
    if isinstance(tensor, DeviceTensor) and (recorder := tensor.allocation.device.machine.recorder) is not None:
        recorder.working_for(tensor.allocation.number)


def _length(layer: Any) -> int:
    keys = getattr(layer, "keys", None)
    return int(keys.shape[-2]) if isinstance(keys, torch.Tensor) and keys.dim() >= 3 else 0


def _layers(cache: Any) -> Iterator[Any]:
    for part in ("self_attention_cache", "cross_attention_cache"):
        if hasattr(cache, part):
            yield from _layers(getattr(cache, part))
    yield from getattr(cache, "layers", ())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
