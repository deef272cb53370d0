"""Tiny models of the architectures that device maps are written for, with random weights and inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedModel

GENERATION: dict[str, Any] = {
    "max_new_tokens": 6,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
}
NUM_LAYERS = 4
_T5: Any = T5Config  # its signature lacks what every configuration takes
_DECODER: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


@dataclass(frozen=True)
class TinyModel:
    """How to make one, its inputs, and where its parts go given a device for each quarter of it."""

    build: Callable[[], PreTrainedModel]
    inputs: Callable[[], dict[str, Any]]
    device_map: Callable[[list[int | str]], dict[str, int | str]]

    def save(self, folder: Path) -> None:
        """Save it with the same random weights every time, in several shards."""
        torch.manual_seed(0)
        self.build().save_pretrained(folder, max_shard_size="100KB")


def token_ids(*, extra: list[int] | None = None) -> torch.Tensor:
    """Two prompts of a dozen tokens, the same every time; with `extra`, one that holds them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 200, (2, 12), generator=generator)
    return ids if extra is None else torch.cat([ids[:1, :4], torch.tensor([extra]), ids[:1, 4:]], dim=1)


def _decoder_map(devices: list[int | str], prefix: str = "model.", *, tied: bool = False) -> dict[str, int | str]:
    layers = {f"{prefix}layers.{index}": devices[index] for index in range(NUM_LAYERS)}
    return {
        f"{prefix}embed_tokens": devices[0],
        f"{prefix}rotary_emb": devices[0],
        **layers,
        f"{prefix}norm": devices[-1],
        "lm_head": devices[0] if tied else devices[-1],
    }


def _gpt2_map(devices: list[int | str]) -> dict[str, int | str]:
    blocks = {f"transformer.h.{index}": devices[index] for index in range(NUM_LAYERS)}
    return {
        "transformer.wte": devices[0],
        "transformer.wpe": devices[0],
        **blocks,
        "transformer.ln_f": devices[-1],
        "lm_head": devices[0],
    }


def _t5_map(devices: list[int | str]) -> dict[str, int | str]:
    stacks = {
        f"{stack}.{part}": device
        for stack, first, second in (("encoder", devices[0], devices[1]), ("decoder", devices[2], devices[3]))
        for part, device in (("block.0", first), ("block.1", second), ("final_layer_norm", second))
    }
    return {
        "shared": devices[0],
        "encoder.embed_tokens": devices[0],
        "decoder.embed_tokens": devices[0],
        **stacks,
        "lm_head": devices[0],  # tied to the embeddings
    }


def _gemma3_map(devices: list[int | str]) -> dict[str, int | str]:
    return {
        "model.vision_tower": devices[1],
        "model.multi_modal_projector": devices[0],
        **_decoder_map(devices, "model.language_model.", tied=True),
    }


def _qwen2_5_vl_map(devices: list[int | str]) -> dict[str, int | str]:
    return {"model.visual": devices[0], **_decoder_map(devices, "model.language_model.")}


def _gemma3() -> PreTrainedModel:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
        "vision_use_head": False,
    }
    text = {
        **_DECODER,
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=text,
            vision_config=vision,
            mm_tokens_per_image=4,
            image_token_index=250,
            boi_token_index=251,
            eoi_token_index=252,
        )
    )


def _gemma3_inputs() -> dict[str, Any]:
    ids = token_ids(extra=[251, *[250] * 4, 252])
    pixels = torch.randn(1, 3, 56, 56, generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "pixel_values": pixels, "token_type_ids": (ids == 250).long()}


def _qwen2_5_vl() -> PreTrainedModel:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.2,
    }
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={**_DECODER, "rope_parameters": rope},
            vision_config=vision,
            image_token_id=250,
            video_token_id=251,
            vision_start_token_id=252,
            vision_end_token_id=253,
        )
    )


def _qwen2_5_vl_inputs() -> dict[str, Any]:
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    pixels = torch.randint(0, 255, (112, 140, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    image = Image.fromarray(pixels.numpy())
    processed = Qwen2VLImageProcessorPil(min_pixels=56 * 56)(images=[image], return_tensors="pt")
    num_tokens = int(processed["image_grid_thw"].prod()) // 4  # 2 x 2 patches make a token
    ids = token_ids(extra=[252, *[250] * num_tokens, 253])
    return {"input_ids": ids, "mm_token_type_ids": (ids == 250).long(), **processed}


def _text() -> dict[str, Any]:
    return {"input_ids": token_ids()}


TINY_MODELS = {
    "llama": TinyModel(lambda: LlamaForCausalLM(LlamaConfig(**_DECODER)), _text, _decoder_map),
    "qwen2": TinyModel(lambda: Qwen2ForCausalLM(Qwen2Config(**_DECODER)), _text, _decoder_map),
    "mixtral": TinyModel(
        lambda: MixtralForCausalLM(MixtralConfig(**_DECODER, num_local_experts=4)), _text, _decoder_map
    ),
    "gpt2": TinyModel(
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=64, n_head=4, n_layer=NUM_LAYERS, n_positions=256)),
        _text,
        _gpt2_map,
    ),
    "t5": TinyModel(
        lambda: T5ForConditionalGeneration(
            _T5(
                vocab_size=256,
                d_model=64,
                d_kv=16,
                d_ff=96,
                num_heads=4,
                num_layers=2,
                decoder_start_token_id=0,
            )
        ),
        _text,
        _t5_map,
    ),
    "gemma3": TinyModel(_gemma3, _gemma3_inputs, _gemma3_map),
    "qwen2_5_vl": TinyModel(_qwen2_5_vl, _qwen2_5_vl_inputs, _qwen2_5_vl_map),
}
