"""Inputs as processors make them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import WhisperConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from devmap_cli.simulation.inputs import fit_pixels, make_inputs
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
    with pytest.raises(ValueError, match="how llama takes images is not known"):
        make_inputs(config_of("llama"), Workload(images=((10, 10),)))


@pytest.mark.parametrize("size", [(56, 56), (480, 640), (1036, 1036), (30, 2000), (9000, 7000), (29, 43)])
def test_sizes_are_fitted_as_the_processor_does(size: tuple[int, int]) -> None:
    limits = 56 * 56, 28 * 28 * 1280
    assert fit_pixels(*size, 28, *limits) == smart_resize(*size, 28, *limits)
