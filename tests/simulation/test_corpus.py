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

SHORTENED = {"deepseek-ai__DeepSeek-V3.2": 5, "Qwen__Qwen3-Next-80B-A3B-Thinking": 8}
"""Layers that are enough to see each of a model's kinds of layer, for models that take long."""


SEEING = {
    "Qwen__Qwen2-VL-2B-Instruct": "videos",
    "Qwen__Qwen3-VL-2B-Instruct": "videos",
    "google__gemma-4-26B-A4B": "images",
    "meta-llama__Llama-3.2-11B-Vision-Instruct": "images",
    "meta-models__Muse-Glimmer-30B": "images",
    "moonshotai__Kimi-K2.5": "images",
}
NUM_LAYERS = 5
"""Layers of the text that are enough to see images go through it: one of cross attention in Llama 3.2 among them."""


def shortened(config: Any) -> None:
    """Let the text have few layers, in whichever form its configuration names them."""
    text = config.get_text_config()
    text.num_hidden_layers = NUM_LAYERS
    for per_layer in ("layer_types", "mlp_layer_types"):
        if getattr(text, per_layer, None):
            setattr(text, per_layer, getattr(text, per_layer)[:NUM_LAYERS])
    if getattr(text, "cross_attention_layers", None):
        text.cross_attention_layers = [index for index in text.cross_attention_layers if index < NUM_LAYERS]


def empty_model(name: str) -> Any:
    if not (CONFIGS / name).exists():
        pytest.skip("the published configurations are not here")
    config: Any = AutoConfig.from_pretrained(CONFIGS / name)
    if name in SHORTENED:
        config.num_hidden_layers = SHORTENED[name]
        for per_layer in ("layer_types", "mlp_layer_types"):
            if getattr(config, per_layer, None):
                setattr(config, per_layer, getattr(config, per_layer)[: SHORTENED[name]])
    if name in SEEING:
        shortened(config)
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
    assert phases["load"].weights_bytes == pytest.approx(weights, rel=0.001)
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
