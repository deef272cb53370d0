"""Published configurations of every kind of model are rehearsed as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from devmap_cli.simulation.memory import UNLIMITED_BYTES
from devmap_cli.simulation.rehearsal import rehearse
from devmap_cli.simulation.workload import Workload

CONFIGS = Path(__file__).parents[2].parent / "shared" / "corpus" / "configs"

KINDS = {
    "meta-llama__Llama-3.2-1B": "grouped-query attention",
    "google__gemma-3-1b-it": "sliding windows",
    "google__gemma-2-2b": "soft-capped scores, which only eager attention has",
    "bigscience__bloom": "position biases",
    "openai__gpt-oss-20b": "mixture of experts with biases and attention sinks",
    "mistralai__Mixtral-8x7B-v0.1": "mixture of experts",
    "deepseek-ai__DeepSeek-V3.2": "latent attention with an indexer",
    "Qwen__Qwen3-Next-80B-A3B-Thinking": "linear attention",
    "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "Mamba",
    "google__t5-v1_1-xxl": "encoder-decoder",
    "openai__whisper-large-v3": "speech",
    "google-bert__bert-base-uncased": "encoder",
}

ENOUGH_LAYERS = {
    "google__gemma-3-1b-it": 6,
    "deepseek-ai__DeepSeek-V3.2": 5,
    "nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 8,
}
"""Layers that show each of a model's kinds of layer, where `NUM_LAYERS` do not."""


SEEING = {
    "Qwen__Qwen2-VL-2B-Instruct": "videos",
    "Qwen__Qwen3-VL-2B-Instruct": "videos",
    "google__gemma-4-26B-A4B": "images",
    "meta-llama__Llama-3.2-11B-Vision-Instruct": "images",
    "meta-models__Muse-Glimmer-30B": "images",
    "moonshotai__Kimi-K2.5": "images",
}
NUM_LAYERS = 4
"""Layers of the text that are enough to see each kind of layer, one of cross attention in Llama 3.2 among them."""
_COUNTS = ("num_hidden_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
_BY_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type")


def shortened(config: Any, num_layers: int = NUM_LAYERS) -> None:
    """Let the text have few layers, in whichever form its configuration names them."""
    text = config.get_text_config()
    for per_layer in _BY_LAYER:
        if getattr(text, per_layer, None):
            setattr(text, per_layer, getattr(text, per_layer)[:num_layers])
    for count in _COUNTS:
        if getattr(text, count, num_layers) != num_layers:
            setattr(text, count, num_layers)
    if getattr(text, "cross_attention_layers", None):
        text.cross_attention_layers = [index for index in text.cross_attention_layers if index < num_layers]


def empty_model(name: str) -> Any:
    if not (CONFIGS / name).exists():
        pytest.skip("the published configurations are not here")
    config: Any = AutoConfig.from_pretrained(CONFIGS / name)
    shortened(config, ENOUGH_LAYERS.get(name, NUM_LAYERS))
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    kind: Any = getattr(transformers, config.architectures[0].replace("KimiK25", "Kimi_K25"))
    with torch.device("meta"):
        model = kind._from_config(config, dtype=torch.bfloat16).eval()
    model.tie_weights()
    return model


@pytest.mark.parametrize("name", KINDS)
def test_a_model_of_each_kind_is_rehearsed(name: str) -> None:
    model = empty_model(name)
    rehearsal = rehearse(model, {"": 0}, Workload(1, 64, 16), [UNLIMITED_BYTES])
    rehearsal.raise_failure()
    phases = rehearsal.devices[0].phases
    weights = sum(-(-tensor.nbytes // 512) * 512 for tensor in [*model.parameters(), *model.buffers()])
    # the allocator leaves up to 1 MiB behind the last weight unsplit
    assert phases["load"].weights_bytes == pytest.approx(weights, rel=0.001, abs=1 << 20)
    assert phases["prefill"].activation_bytes > 0
    if model.can_generate():
        assert phases["decode"].kv_cache_bytes > 0


@pytest.mark.parametrize("name", SEEING)
def test_models_that_see_are_rehearsed_with_what_they_see(name: str) -> None:
    model = empty_model(name)
    picture = {"images": ((900, 700),)} if SEEING[name] == "images" else {"videos": ((448, 336, 8),)}
    pictures: tuple[dict[str, Any], ...] = ({}, picture)
    activations = []
    for seen in pictures:
        rehearsal = rehearse(model, {"": 0}, Workload(1, 2048, 16, **seen), [UNLIMITED_BYTES])
        rehearsal.raise_failure()
        activations.append(rehearsal.devices[0].phases["prefill"].activation_bytes)
    assert activations[1] > activations[0]
