"""Inputs of the right shape for a model, as its processor would make them of prompts, images and videos."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from devmap_cli.simulation.visual_inputs import PLAIN_TOKEN, visual_inputs

if TYPE_CHECKING:
    from typing import Any

    from devmap_cli.simulation.workload import Workload


_UNCAST_PIXELS = ("llama4", "kimi_k25")
"""Models that don't bring `pixel_values` to their own dtype."""


def cast_by_people(config: Any) -> tuple[str, ...]:
    """Arguments that the model takes in its own dtype and does not cast."""
    return ("input_features", "pixel_values") if config.model_type in _UNCAST_PIXELS else ("input_features",)


def make_inputs(config: Any, workload: Workload) -> dict[str, torch.Tensor]:
    """Arguments for the model's `generate`, on the CPU.

    Raises ValueError for images and videos that the model cannot take, or that take more tokens than the prompt has.
    """
    if config.model_type == "whisper" and config.is_encoder_decoder:  # its decoder alone takes text
        frames = 2 * config.max_source_positions  # the encoder halves them
        return {"input_features": torch.zeros(workload.batch_size, config.num_mel_bins, frames)}
    if not workload.images and not workload.videos:
        return _text(workload, [])
    visual = visual_inputs(config, workload)
    inputs = _text(workload, visual.tokens)
    types = torch.zeros_like(inputs["input_ids"])
    for token, kind in visual.types.items():
        types[inputs["input_ids"] == token] = kind
    batch = workload.batch_size
    return {
        **inputs,
        **dict.fromkeys(visual.type_arguments, types),
        **{name: _repeated(value, batch) for name, value in visual.tensors.items()},
    }


def _repeated(tensor: torch.Tensor, batch_size: int) -> torch.Tensor:
    """`tensor` for every prompt; where it is one number in memory, it stays that."""
    if any(tensor.stride()):
        return tensor.repeat(batch_size, *[1] * (tensor.dim() - 1))
    return tensor[:1].expand(batch_size * tensor.shape[0], *tensor.shape[1:])


def _text(workload: Workload, first_tokens: list[int]) -> dict[str, torch.Tensor]:
    num_plain = workload.prompt_tokens - len(first_tokens)
    if num_plain < 1:
        kinds = " and ".join(kind for kind in ("images", "videos") if getattr(workload, kind))
        raise ValueError(f"the {kinds} take {len(first_tokens)} tokens, the prompt has {workload.prompt_tokens}")
    prompt = torch.tensor([*first_tokens, *[PLAIN_TOKEN] * num_plain])
    ids = prompt.repeat(workload.batch_size, 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
