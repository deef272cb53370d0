"""Inputs of the right shape for a model, as its processor would make them of prompts and images."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from devmap_cli.simulation.workload import Workload

_PLAIN_TOKEN = 5
"""Neither padding nor the end of a text nor an image in any vocabulary looked at."""

_QWEN2_PIXELS = (56 * 56, 28 * 28 * 16384)
"""Least and most pixels of an image: preprocessor_config.json of Qwen2-VL and Qwen2.5-VL."""
_QWEN3_PIXELS = (256 * 256, 4096 * 4096)
"""Likewise of Qwen3-VL and after."""


@dataclass(frozen=True)
class ImageInputs:
    """The tokens of the images of one prompt, and the tensors that go with them, for one prompt as well."""

    tokens: list[int]
    tensors: dict[str, torch.Tensor]
    image_token: int
    marks: list[str] = field(default_factory=list)
    """Arguments that are 1 at image tokens and 0 elsewhere."""


def make_inputs(config: Any, workload: Workload) -> dict[str, torch.Tensor]:
    """Arguments for the model's `generate`, on the CPU.

    Raises ValueError for images that the model cannot take, or that take more tokens than the prompt has.
    """
    if config.model_type == "whisper" and config.is_encoder_decoder:  # its decoder alone takes text
        frames = 2 * config.max_source_positions  # the encoder halves them
        return {"input_features": torch.zeros(workload.batch_size, config.num_mel_bins, frames)}
    if not workload.images:
        return _text(workload, [])
    images = _images(config, workload.images)
    inputs = _text(workload, images.tokens)
    is_image = (inputs["input_ids"] == images.image_token).long()
    batch = workload.batch_size
    return {
        **inputs,
        **dict.fromkeys(images.marks, is_image),
        **{name: value.repeat(batch, *[1] * (value.dim() - 1)) for name, value in images.tensors.items()},
    }


def _text(workload: Workload, first_tokens: list[int]) -> dict[str, torch.Tensor]:
    num_plain = workload.prompt_tokens - len(first_tokens)
    if num_plain < 1:
        raise ValueError(f"the images take {len(first_tokens)} tokens, the prompt has {workload.prompt_tokens}")
    prompt = torch.tensor([*first_tokens, *[_PLAIN_TOKEN] * num_plain])
    ids = prompt.repeat(workload.batch_size, 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _images(config: Any, sizes: Sequence[tuple[int, int]]) -> ImageInputs:
    for prefix, make in _FAMILIES.items():
        if config.model_type in (prefix, f"{prefix}_moe"):
            return make(config, sizes)
    raise ValueError(f"how {config.model_type} takes images is not known here")


def _qwen_vl(config: Any, sizes: Sequence[tuple[int, int]]) -> ImageInputs:
    """Patches of each image at about its own size, merged by squares: Qwen2VLImageProcessor."""
    vision = config.vision_config
    pixels = _QWEN2_PIXELS if config.model_type.startswith("qwen2") else _QWEN3_PIXELS
    merge = vision.spatial_merge_size
    factor = vision.patch_size * merge
    tokens: list[int] = []
    grids: list[list[int]] = []
    for width, height in sizes:
        rows, columns = (side // vision.patch_size for side in fit_pixels(height, width, factor, *pixels))
        grids.append([1, rows, columns])
        num_tokens = rows * columns // merge**2
        tokens += [config.vision_start_token_id, *[config.image_token_id] * num_tokens, config.vision_end_token_id]
    num_patches = sum(rows * columns for _, rows, columns in grids)
    values_per_patch = 3 * vision.temporal_patch_size * vision.patch_size**2
    tensors = {"pixel_values": torch.zeros(num_patches, values_per_patch), "image_grid_thw": torch.tensor(grids)}
    return ImageInputs(tokens, tensors, config.image_token_id, ["mm_token_type_ids"])


def fit_pixels(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Sides rounded to `factor`, scaled so that the pixels lie between `least` and `most`.

    Source: `smart_resize` of transformers' image_processing_qwen2_vl.py.
    """
    rounded = round(height / factor) * factor, round(width / factor) * factor
    area = rounded[0] * rounded[1]
    if area > most:
        scale = (height * width / most) ** 0.5
        return max(factor, int(height / scale / factor) * factor), max(factor, int(width / scale / factor) * factor)
    if area < least:
        scale = (least / (height * width)) ** 0.5
        return math.ceil(height * scale / factor) * factor, math.ceil(width * scale / factor) * factor
    return rounded


def _fixed_size(config: Any, sizes: Sequence[tuple[int, int]], num_tokens: int) -> ImageInputs:
    side = config.vision_config.image_size
    token = config.image_token_id
    pixels = torch.zeros(len(sizes), 3, side, side)
    return ImageInputs([token] * num_tokens * len(sizes), {"pixel_values": pixels}, token)


def _gemma3(config: Any, sizes: Sequence[tuple[int, int]]) -> ImageInputs:
    """Every image at one size, as a fixed number of tokens: Gemma3Processor."""
    images = _fixed_size(config, sizes, config.mm_tokens_per_image)
    return ImageInputs(images.tokens, images.tensors, images.image_token, ["token_type_ids"])


def _llava(config: Any, sizes: Sequence[tuple[int, int]]) -> ImageInputs:
    """Every image at one size, a token per patch: LlavaProcessor."""
    patches = config.vision_config.image_size // config.vision_config.patch_size
    return _fixed_size(config, sizes, patches**2)


_FAMILIES: dict[str, Callable[[Any, Sequence[tuple[int, int]]], ImageInputs]] = {
    "qwen2_vl": _qwen_vl,
    "qwen2_5_vl": _qwen_vl,
    "qwen3_vl": _qwen_vl,
    "qwen3_5": _qwen_vl,
    "gemma3": _gemma3,
    "llava": _llava,
}
"""By model type, `<type>_moe` included."""
