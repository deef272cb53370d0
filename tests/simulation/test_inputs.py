"""Inputs as processors make them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import InternVLConfig, InternVLForConditionalGeneration, Llama4Config, WhisperConfig
from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as got_ocr2
from transformers.models.mllama.image_processing_pil_mllama import get_optimal_tiled_canvas
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from devmap_cli.simulation.inputs import make_inputs
from devmap_cli.simulation.memory import UNLIMITED_BYTES
from devmap_cli.simulation.rehearsal import rehearse
from devmap_cli.simulation.resizing import (
    closest_grid,
    cropped_grid,
    fit_pixels,
    fit_video,
    pad_patches,
    sliding_windows,
    tiled_canvas,
)
from devmap_cli.simulation.visual_inputs import PLAIN_TOKEN
from devmap_cli.simulation.workload import Workload
from tests.simulation.tiny_models import TINY_MODELS


def config_of(name: str) -> Any:
    with torch.device("meta"):
        return TINY_MODELS[name].build().config


def test_prompts_are_of_the_length_asked_for() -> None:
    inputs = make_inputs(config_of("llama"), Workload(batch_size=3, prompt_tokens=7))
    assert {name: tuple(value.shape) for name, value in inputs.items()} == {
        "input_ids": (3, 7),
        "attention_mask": (3, 7),
    }
    assert inputs["attention_mask"].all()


def test_qwen_images_become_patches_and_a_quarter_as_many_tokens() -> None:
    inputs = make_inputs(config_of("qwen2_5_vl"), Workload(2, 40, images=((112, 56), (56, 56))))
    # patches of 14 x 14: 4 rows of 8, and 4 of 4; merged by squares of two into 8 and 4 tokens
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 8], [1, 4, 4]] * 2
    assert inputs["pixel_values"].shape == (2 * (32 + 16), 3 * 2 * 14 * 14)
    assert (inputs["input_ids"] == 250).sum(dim=1).tolist() == [12, 12]
    assert torch.equal(inputs["mm_token_type_ids"], (inputs["input_ids"] == 250).long())


def test_gemma_images_are_of_one_size() -> None:
    inputs = make_inputs(config_of("gemma3"), Workload(1, 20, images=((900, 30), (10, 10))))
    assert inputs["pixel_values"].shape == (2, 3, 56, 56)
    assert inputs["token_type_ids"].sum() == 2 * 4


def test_qwen_videos_are_patches_of_pairs_of_frames() -> None:
    inputs = make_inputs(config_of("qwen2_5_vl"), Workload(2, 60, images=((56, 56),), videos=((112, 56, 5),)))
    # 5 frames make 3 pairs of 4 rows of 8 patches, a quarter as many tokens
    assert inputs["video_grid_thw"].tolist() == [[3, 4, 8]] * 2
    assert inputs["pixel_values_videos"].shape == (2 * 3 * 32, 3 * 2 * 14 * 14)
    assert (inputs["input_ids"] == 251).sum(dim=1).tolist() == [24, 24]
    types = (inputs["input_ids"] == 250).long() + 2 * (inputs["input_ids"] == 251).long()
    assert torch.equal(inputs["mm_token_type_ids"], types)


def test_later_qwen_videos_tell_the_time_before_each_pair_of_frames() -> None:
    vision = SimpleNamespace(patch_size=16, spatial_merge_size=2, temporal_patch_size=2)
    tokens = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    config = SimpleNamespace(model_type="qwen3_vl", vision_config=vision, **tokens)
    inputs = make_inputs(config, Workload(1, 40, videos=((64, 64, 4),)))
    # 4 frames of 64 x 64 are more than the least: 2 pairs of 4 x 4 patches, 4 tokens each, after "<0.2 seconds>" or so
    assert inputs["video_grid_thw"].tolist() == [[2, 4, 4]]
    pair = [PLAIN_TOKEN] * 6 + [92, 91, 91, 91, 91, 93]
    assert inputs["input_ids"][0].tolist() == [*pair, *pair, *[PLAIN_TOKEN] * 16]


def test_a_long_video_has_smaller_frames() -> None:
    most = 24576 * 32 * 32
    rows, columns = fit_video(768, 1080, 1920, 32, 2, 4096, most)
    assert 768 * rows * columns <= most < 768 * (rows + 32) * (columns + 32)


def test_gemma4_images_are_of_a_fixed_number_of_tokens() -> None:
    vision = SimpleNamespace(patch_size=16, pooling_kernel_size=3)
    tokens = {"image_token_id": 90, "boi_token_id": 91, "eoi_token_id": 92}
    config = SimpleNamespace(model_type="gemma4", vision_config=vision, vision_soft_tokens_per_image=280, **tokens)
    inputs = make_inputs(config, Workload(1, 300, images=((640, 480),)))
    assert inputs["pixel_values"].shape == (1, 280 * 9, 3 * 16 * 16)
    assert (inputs["image_position_ids"] >= 0).all()
    assert len(set(map(tuple, inputs["image_position_ids"][0].tolist()))) == 280 * 9
    assert inputs["mm_token_type_ids"].sum() == 280


def test_llama4_images_are_tiles_and_the_whole_picture() -> None:
    sizes = {"hidden_size": 1408, "intermediate_size": 5632}  # four patches make one
    vision = SimpleNamespace(image_size=336, patch_size=14, pixel_shuffle_ratio=0.5, **sizes)
    tokens = {"image_token_id": 90, "boi_token_index": 91, "eoi_token_index": 92}
    config = SimpleNamespace(model_type="llama4", vision_config=vision, **tokens)
    # 672 x 336 is a row of two tiles, 336 x 336 one tile alone: 144 tokens each, and 144 of the first as a whole
    inputs = make_inputs(config, Workload(1, 700, images=((672, 336), (336, 336))))
    assert inputs["pixel_values"].shape == (4, 3, 336, 336)
    assert (inputs["input_ids"] == 90).sum() == 4 * 144
    assert (inputs["input_ids"] != PLAIN_TOKEN).sum() == 4 * 144 + 2 * 2


def test_a_llama4_without_a_vision_config_takes_no_images() -> None:
    config = Llama4Config()  # transformers' defaults: 768 features, times four, for an adapter of 5632
    with pytest.raises(ValueError, match="it gives 3072 features where its adapter takes 5632"):
        make_inputs(config, Workload(1, 700, images=((336, 336),)))


def test_internvl_images_are_tiles_and_the_whole_picture_where_they_are_several() -> None:
    inputs = make_inputs(InternVLConfig(), Workload(2, 5000, images=((1024, 768), (448, 448))))
    # 1024 x 768 is four to three: 4 x 3 tiles, and the whole; 448 x 448 is one tile. 256 tokens each.
    assert inputs["pixel_values"].shape == (2 * (13 + 1), 3, 448, 448)
    assert (inputs["input_ids"] == 151667).sum(dim=1).tolist() == [14 * 256, 14 * 256]
    assert (inputs["input_ids"][0, : 14 * 256 + 4] == PLAIN_TOKEN).sum() == 2 * 2


def test_internvl_tokens_are_as_many_as_its_tower_makes() -> None:
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    text = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 256}
    with torch.device("meta"):
        config = InternVLConfig(vision_config=vision, text_config=text, image_token_id=250)
        model = InternVLForConditionalGeneration(config).eval()
    rehearse(model, {"": 0}, Workload(1, 1500, 2, images=((500, 900),)), [UNLIMITED_BYTES]).raise_failure()


@pytest.mark.parametrize("pictures", [{"images": ((3000, 2000),)}, {"videos": ((640, 480, 8),)}])
def test_pixels_are_one_number_in_memory(pictures: dict[str, Any]) -> None:
    inputs = make_inputs(config_of("qwen2_5_vl"), Workload(2, 1 << 14, **pictures))
    (pixels,) = (value for name, value in inputs.items() if name.startswith("pixel_values"))
    assert pixels.numel() > 1 << 20
    assert pixels.untyped_storage().nbytes() == 4


def test_mllama_images_are_a_token_each_and_seen_from_all_of_the_prompt() -> None:
    ratios = [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]
    vision = SimpleNamespace(image_size=560, max_num_tiles=4, supported_aspect_ratios=ratios)
    config = SimpleNamespace(model_type="mllama", vision_config=vision, image_token_index=90)
    inputs = make_inputs(config, Workload(1, 10, images=((1120, 560), (100, 100))))
    assert inputs["pixel_values"].shape == (1, 2, 4, 3, 560, 560)
    assert inputs["aspect_ratio_ids"].tolist() == [[2, 1]]
    assert inputs["aspect_ratio_mask"].tolist() == [[[1, 1, 0, 0], [1, 0, 0, 0]]]
    assert inputs["cross_attention_mask"].shape == (1, 10, 2, 4)
    assert (inputs["input_ids"] == 90).sum() == 2


def test_muse_images_are_a_grid_of_nearly_their_shape() -> None:
    vision = SimpleNamespace(patch_size=14, merge_size=2, patch_temporal=2)
    config = SimpleNamespace(model_type="muse_glimmer", vision_config=vision, image_token_id=90)
    inputs = make_inputs(config, Workload(1, 20, images=((112, 56),)))
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 8]]
    assert inputs["pixel_values"].shape == (32, 2 * 3 * 14 * 14)
    assert inputs["input_ids"][0].tolist() == [PLAIN_TOKEN, *[90] * 8, *[PLAIN_TOKEN] * 11]


def test_kimi_images_are_filled_up_to_whole_squares() -> None:
    vision = SimpleNamespace(patch_size=14, merge_kernel_size=(2, 2))
    config = SimpleNamespace(model_type="kimi_k25", vision_config=vision, image_token_id=90)
    inputs = make_inputs(config, Workload(1, 20, images=((57, 56),)))
    # 57 pixels are filled up to three squares of 28
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert inputs["pixel_values"].shape == (24, 3, 14, 14)
    assert (inputs["input_ids"] == 90).sum() == 6


def test_step_images_are_windows_and_the_whole_picture() -> None:
    vision = SimpleNamespace(image_size=728, patch_size=14)
    config = SimpleNamespace(model_type="step3p7", vision_config=vision, image_token_id=90)
    inputs = make_inputs(config, Workload(1, 900, images=((1008, 1008), (300, 300))))
    # two by two windows of 504, 81 tokens each, a mark after the first row; 169 tokens for each picture as a whole
    assert inputs["num_local_patches"].tolist() == [4, 0]
    assert inputs["pixel_values_local"].shape == (4, 3, 504, 504)
    assert inputs["pixel_values"].shape == (2, 3, 728, 728)
    ids = inputs["input_ids"][0].tolist()
    assert ids.count(90) == 4 * 81 + 2 * 169
    assert ids[: 4 * 83 + 1].count(PLAIN_TOKEN) == 4 * 2 + 1


def test_llava_images_are_a_token_per_patch() -> None:
    vision = SimpleNamespace(image_size=336, patch_size=14)
    config = SimpleNamespace(model_type="llava", image_token_id=9, vision_config=vision)
    inputs = make_inputs(config, Workload(1, 600, images=((640, 480),)))
    assert (inputs["input_ids"] == 9).sum() == 576  # 24 x 24
    assert inputs["pixel_values"].shape == (1, 3, 336, 336)


def test_speech_is_half_a_minute_whatever_the_prompt() -> None:
    inputs = make_inputs(WhisperConfig(num_mel_bins=80, max_source_positions=1500), Workload(2, 1))
    assert inputs["input_features"].shape == (2, 80, 3000)


def test_the_decoder_of_a_speech_model_alone_takes_text() -> None:
    config = WhisperConfig(is_encoder_decoder=False)
    assert "input_features" not in make_inputs(config, Workload(1, 4))


def test_images_for_a_model_without_eyes_are_refused() -> None:
    with pytest.raises(ValueError, match="llama takes no images or videos"):
        make_inputs(config_of("llama"), Workload(images=((10, 10),)))


def test_videos_for_a_model_that_takes_images_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="how gemma3 takes videos is not known"):
        make_inputs(config_of("gemma3"), Workload(videos=((10, 10, 2),)))


@pytest.mark.parametrize("size", [(100, 100), (560, 1120), (2000, 300), (600, 600), (1119, 561), (50, 4000)])
def test_tiles_are_chosen_as_the_processor_does(size: tuple[int, int]) -> None:
    rows, columns = tiled_canvas(*size, 560, 4)
    assert (rows * 560, columns * 560) == get_optimal_tiled_canvas(*size, 4, 560)


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((300, 300), (0, 0)),  # the whole picture shows all
        ((300, 500), (1, 2)),  # long, by its short side: 200 left are two thirds of 300
        ((504, 1000), (1, 2)),  # 496 left are nearly a window
        ((600, 1100), (1, 2)),  # 96 left, and 92, are less than a fifth of a window
        ((100, 800), (1, 8)),  # very long, by its short side
        ((6048, 6048), (6, 6)),  # shrunk to 3024
        ((10, 100), (0, 0)),  # a line, filled up to a square
    ],
)
def test_windows_are_cut_by_the_published_rules(size: tuple[int, int], grid: tuple[int, int]) -> None:
    assert sliding_windows(*size, 728, 504, 3024) == grid


@pytest.mark.parametrize(
    ("size", "grid"),
    [((56, 112), (2, 4)), ((10, 10), (1, 1)), ((100, 100), (4, 4)), ((28 * 200, 28 * 100), (90, 45))],
)
def test_grids_are_closest_in_shape(size: tuple[int, int], grid: tuple[int, int]) -> None:
    assert closest_grid(*size, 28, 4096) == grid


@pytest.mark.parametrize(
    ("size", "padded"),
    [
        ((1, 1), (28, 28)),
        ((280, 281), (280, 308)),
        ((2800, 2800), (1792, 1792)),  # 40,000 patches are too many: 128 by 128
        ((14000, 100), (7168, 56)),  # 512 patches on a side
    ],
)
def test_sides_are_filled_up(size: tuple[int, int], padded: tuple[int, int]) -> None:
    assert pad_patches(*size, 14, 2, 16384, 512) == padded


@pytest.mark.parametrize("height", [100, 448, 600, 896, 1200, 3999])
@pytest.mark.parametrize("width", [1, 448, 768, 896, 1792, 4000])
def test_pictures_are_cropped_as_the_processor_does(height: int, width: int) -> None:
    columns, rows = got_ocr2.get_optimal_tiled_canvas((height, width), (448, 448), 1, 12)
    assert cropped_grid(height, width, 448, 12) == (rows, columns)


@pytest.mark.parametrize("size", [(56, 56), (480, 640), (1036, 1036), (30, 2000), (9000, 7000), (29, 43)])
def test_sizes_are_fitted_as_the_processor_does(size: tuple[int, int]) -> None:
    limits = 56 * 56, 28 * 28 * 1280
    assert fit_pixels(*size, 28, *limits) == smart_resize(*size, 28, *limits)
