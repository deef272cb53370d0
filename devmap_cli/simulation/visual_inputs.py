"""Images and videos as the processors of vision-language models make them: tokens in the prompt, and tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from devmap_cli.simulation.resizing import (
    closest_grid,
    cropped_grid,
    fit_pixels,
    fit_video,
    pad_patches,
    sliding_windows,
    tiled_canvas,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from devmap_cli.simulation.workload import Workload

PLAIN_TOKEN = 5
"""Neither padding nor the end of a text nor an image in any vocabulary looked at."""

_QWEN2_PIXELS = (56 * 56, 28 * 28 * 16384)
"""Least and most pixels of an image, and of a frame: preprocessor_config.json of Qwen2-VL and Qwen2.5-VL."""
_QWEN3_PIXELS = (256 * 256, 4096 * 4096)
"""Likewise of an image in Qwen3-VL and after."""
_QWEN3_VIDEO_PIXELS = (4 * 32 * 32, 24576 * 32 * 32)
"""Likewise of all frames of a video: video_preprocessor_config.json of Qwen3-VL."""
_QWEN3_FRAMES_PER_SECOND = 2
"""At which Qwen3-VL's processor takes frames: only the digits of its time stamps depend on it."""

_INTERNVL_TILES = 12
"""Most tiles of an image: `max_patches` of GotOcr2ImageProcessor, which InternVL's processor has."""
_LLAMA4_TILES = 16
"""Most tiles of an image: `max_patches` of Llama4ImageProcessor."""
_KIMI_PATCHES = (16384, 512)
"""Most patches of an image, and on one side of it: Kimi_K25ImageProcessor."""
_MUSE_TOKENS = 4096
"""Most tokens of an image: MuseGlimmerImageProcessor."""
_STEP_WINDOW, _STEP_LONGEST = 504, 3024
"""Side of a window cut out of an image, and the longest side that is not shrunk first: Step3p7ImageProcessor."""
_STEP_STRIDE = 4
"""How many patches on a side make one token: `downsampler_stride` of Step3p7ImageProcessor."""


@dataclass(frozen=True)
class VisualInputs:
    """The tokens of all pictures of one prompt, and the tensors that go with them, for one prompt as well."""

    tokens: list[int]
    tensors: dict[str, torch.Tensor]
    types: dict[int, int]
    """What tokens that stand for a picture count as in `type_arguments`, where all others count as 0."""
    type_arguments: list[str] = field(default_factory=list)


def visual_inputs(config: Any, workload: Workload) -> VisualInputs:
    """Those of the workload's images and videos. Raises ValueError for what the model is not known to take."""
    family = next((name for name in _FAMILIES if config.model_type in (name, f"{name}_moe")), None)
    if (workload.images or workload.videos) and family is None and not hasattr(config, "vision_config"):
        raise ValueError(f"{config.model_type} takes no images or videos, as far as its config tells")
    if workload.images and family is None:
        raise ValueError(f"how {config.model_type} takes images is not known here")
    if workload.videos and family not in _TAKING_VIDEOS:
        raise ValueError(f"how {config.model_type} takes videos is not known here")
    return _FAMILIES[str(family)](config, workload)


def _pixels(*shape: int) -> torch.Tensor:
    """Pixels of that shape; one number in memory, for what they show does not matter."""
    return torch.zeros(()).expand(shape)


def _qwen_vl(config: Any, workload: Workload) -> VisualInputs:
    """Patches of each picture at about its own size, merged by squares: the processors of Qwen2-VL and after."""
    patch, merge = config.vision_config.patch_size, config.vision_config.spatial_merge_size
    temporal = config.vision_config.temporal_patch_size
    is_old = config.model_type.startswith("qwen2")
    images: list[list[int]] = []
    for width, height in workload.images:
        size = fit_pixels(height, width, patch * merge, *(_QWEN2_PIXELS if is_old else _QWEN3_PIXELS))
        images.append([1, *(side // patch for side in size)])
    videos: list[list[int]] = []
    for width, height, num_frames in workload.videos:
        if is_old:
            size = fit_pixels(height, width, patch * merge, *_QWEN2_PIXELS)
        else:
            size = fit_video(num_frames, height, width, patch * merge, temporal, *_QWEN3_VIDEO_PIXELS)
        videos.append([-(-num_frames // temporal), *(side // patch for side in size)])
    tokens: list[int] = []
    for grid in images:
        tokens += _qwen_tokens(config, config.image_token_id, grid, merge)
    for grid in videos:
        tokens += _qwen_tokens(config, config.video_token_id, grid, merge) if is_old else _timed(config, grid, merge)
    values = 3 * temporal * patch**2
    return VisualInputs(
        tokens,
        {**_grids("pixel_values", "image", images, values), **_grids("pixel_values_videos", "video", videos, values)},
        {config.image_token_id: 1, config.video_token_id: 2},
        ["mm_token_type_ids"],
    )


def _qwen_tokens(config: Any, token: int, grid: list[int], merge: int) -> list[int]:
    num_tokens = grid[0] * grid[1] * grid[2] // merge**2
    return [config.vision_start_token_id, *[token] * num_tokens, config.vision_end_token_id]


def _timed(config: Any, grid: list[int], merge: int) -> list[int]:
    """A video with the time before each pair of frames, digits apart: `<`, `1`, `.`, `2`, ` seconds`, `>`."""
    tokens: list[int] = []
    for index in range(grid[0]):
        seconds = f"{(2 * index + 0.5) / _QWEN3_FRAMES_PER_SECOND:.1f}"
        tokens += [PLAIN_TOKEN] * (len(seconds) + 3)
        tokens += _qwen_tokens(config, config.video_token_id, [1, *grid[1:]], merge)
    return tokens


def _grids(name: str, kind: str, grids: list[list[int]], *values: int) -> dict[str, torch.Tensor]:
    """Patches of `values` numbers one after the other, and how many frames, rows and columns they make."""
    if not grids:
        return {}
    num_patches = sum(frames * rows * columns for frames, rows, columns in grids)
    return {name: _pixels(num_patches, *values), f"{kind}_grid_thw": torch.tensor(grids)}


def _kimi(config: Any, workload: Workload) -> VisualInputs:
    """As Qwen, with other sizes, patches that stay squares, and nothing around the tokens: Kimi_K25Processor."""
    patch, merge = config.vision_config.patch_size, config.vision_config.merge_kernel_size[0]
    grids = []
    for width, height in workload.images:
        rows, columns = pad_patches(height, width, patch, merge, *_KIMI_PATCHES)
        grids.append([1, rows // patch, columns // patch])
    num_tokens = sum(rows * columns for _, rows, columns in grids) // merge**2
    token = config.image_token_id
    return VisualInputs([token] * num_tokens, _grids("pixel_values", "image", grids, 3, patch, patch), {token: 1})


def _muse(config: Any, workload: Workload) -> VisualInputs:
    """Patches of each image in the grid closest to its shape, merged by squares: MuseGlimmerProcessor."""
    vision = config.vision_config
    patch, merge = vision.patch_size, vision.merge_size
    grids, tokens, token = [], [], config.image_token_id
    for width, height in workload.images:
        rows, columns = closest_grid(height, width, patch * merge, _MUSE_TOKENS)
        grids.append([1, rows * merge, columns * merge])
        tokens += [PLAIN_TOKEN, *[token] * (rows * columns), PLAIN_TOKEN]
    values = 3 * vision.patch_temporal * patch**2
    return VisualInputs(tokens, _grids("pixel_values", "image", grids, values), {token: 1})


def _gemma4(config: Any, workload: Workload) -> VisualInputs:
    """Room for the patches of `vision_soft_tokens_per_image` tokens for every image: Gemma4Processor.

    A picture fills most of it, the more the larger its grid; here all of it, for the model's code tells what is filled
    by numbers that are unknown here.
    """
    vision, token, num_images = config.vision_config, config.image_token_id, len(workload.images)
    pool, num_tokens = vision.pooling_kernel_size, config.vision_soft_tokens_per_image
    places = torch.cartesian_prod(torch.arange(pool), torch.arange(num_tokens * pool)).flip(1)
    return VisualInputs(
        [config.boi_token_id, *[token] * num_tokens, config.eoi_token_id] * num_images,
        {
            "pixel_values": _pixels(num_images, len(places), 3 * vision.patch_size**2),
            "image_position_ids": places.repeat(num_images, 1, 1),
        },
        {token: 1},
        ["mm_token_type_ids"],
    )


def _internvl(config: Any, workload: Workload) -> VisualInputs:
    """Tiles of one size, the whole picture after them where they are several: InternVLProcessor."""
    side, token = config.vision_config.image_size[0], config.image_token_id
    tokens: list[int] = []
    num_tiles = 0
    for width, height in workload.images:
        rows, columns = cropped_grid(height, width, side, _INTERNVL_TILES)
        cut = rows * columns + (rows * columns > 1)
        num_tiles += cut
        tokens += [PLAIN_TOKEN, *[token] * (config.image_seq_length * cut), PLAIN_TOKEN]
    return VisualInputs(tokens, {"pixel_values": _pixels(num_tiles, 3, side, side)}, {token: 1})


def _llama4(config: Any, workload: Workload) -> VisualInputs:
    """Tiles of one size, a mark after each but the whole picture's, which follows where they are several."""
    vision, token = config.vision_config, config.image_token_id
    shuffled = int(vision.hidden_size / vision.pixel_shuffle_ratio**2)
    if shuffled != vision.intermediate_size:  # as transformers' defaults don't
        raise ValueError(
            f"the vision_config does not fit together: it gives {shuffled} features where its adapter takes "
            f"{vision.intermediate_size}, as without one in config.json"
        )
    side = vision.image_size
    per_tile = int((side // vision.patch_size) ** 2 * vision.pixel_shuffle_ratio**2)
    tokens: list[int] = []
    num_tiles = 0
    for width, height in workload.images:
        rows, columns = tiled_canvas(height, width, side, _LLAMA4_TILES)
        cut = rows * columns if rows * columns > 1 else 0
        num_tiles += cut + 1
        tokens += [config.boi_token_index, *([*[token] * per_tile, PLAIN_TOKEN] * cut)]
        tokens += [PLAIN_TOKEN, *[token] * per_tile, config.eoi_token_index]
    return VisualInputs(tokens, {"pixel_values": _pixels(num_tiles, 3, side, side)}, {token: 1})


def _mllama(config: Any, workload: Workload) -> VisualInputs:
    """Room for the most tiles for every image, one token each, and a mask of who may look at which: MllamaProcessor."""
    vision, token = config.vision_config, config.image_token_index
    num_images, most = len(workload.images), vision.max_num_tiles
    ids = torch.zeros(1, num_images, dtype=torch.long)
    tiles = torch.zeros(1, num_images, most, dtype=torch.long)
    for index, (width, height) in enumerate(workload.images):
        rows, columns = tiled_canvas(height, width, vision.image_size, most)
        ids[0, index] = 1 + [tuple(ratio) for ratio in vision.supported_aspect_ratios].index((rows, columns))
        tiles[0, index, : rows * columns] = 1
    tensors = {
        "pixel_values": _pixels(1, num_images, most, 3, vision.image_size, vision.image_size),
        "aspect_ratio_ids": ids,
        "aspect_ratio_mask": tiles,
        "cross_attention_mask": tiles[:, None].repeat(1, workload.prompt_tokens, 1, 1),
    }
    return VisualInputs([token] * num_images, tensors, {token: 1})


def _step(config: Any, workload: Workload) -> VisualInputs:
    """Every image as a whole at one size, after windows cut out of it: Step3p7Processor."""
    vision, token = config.vision_config, config.image_token_id
    stride = vision.patch_size * _STEP_STRIDE
    window = [PLAIN_TOKEN, *[token] * (_STEP_WINDOW // stride) ** 2, PLAIN_TOKEN]
    tokens: list[int] = []
    num_windows = []
    for width, height in workload.images:
        rows, columns = sliding_windows(height, width, vision.image_size, _STEP_WINDOW, _STEP_LONGEST)
        num_windows.append(rows * columns)
        tokens += window * (rows * columns) + [PLAIN_TOKEN] * max(0, rows - 1)  # a mark after each row but the last
        tokens += [PLAIN_TOKEN, *[token] * (vision.image_size // stride) ** 2, PLAIN_TOKEN]
    tensors = {
        "pixel_values": _pixels(len(num_windows), 3, vision.image_size, vision.image_size),
        "num_local_patches": torch.tensor(num_windows),
    }
    if any(num_windows):
        tensors["pixel_values_local"] = _pixels(sum(num_windows), 3, _STEP_WINDOW, _STEP_WINDOW)
    return VisualInputs(tokens, tensors, {token: 1})


def _fixed_size(config: Any, workload: Workload, num_tokens: int, type_arguments: list[str]) -> VisualInputs:
    side, token = config.vision_config.image_size, config.image_token_id
    num_images = len(workload.images)
    pixels = _pixels(num_images, 3, side, side)
    return VisualInputs([token] * num_tokens * num_images, {"pixel_values": pixels}, {token: 1}, type_arguments)


def _gemma3(config: Any, workload: Workload) -> VisualInputs:
    """Every image at one size, as a fixed number of tokens: Gemma3Processor."""
    return _fixed_size(config, workload, config.mm_tokens_per_image, ["token_type_ids"])


def _llava(config: Any, workload: Workload) -> VisualInputs:
    """Every image at one size, a token per patch: LlavaProcessor."""
    patches = config.vision_config.image_size // config.vision_config.patch_size
    return _fixed_size(config, workload, patches**2, [])


_TAKING_VIDEOS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
_FAMILIES: dict[str, Callable[[Any, Workload], VisualInputs]] = {
    **dict.fromkeys(_TAKING_VIDEOS, _qwen_vl),
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "internvl": _internvl,
    "kimi_k25": _kimi,
    "llama4": _llama4,
    "llava": _llava,
    "mllama": _mllama,
    "muse_glimmer": _muse,
    "step3p7": _step,
}
"""By model type, `<type>_moe` included."""
