"""Known mistakes of transformers, mended for a rehearsal."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, Llama4ForConditionalGeneration
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from devmap_cli.simulation.memory import UNLIMITED_BYTES
from devmap_cli.simulation.rehearsal import rehearse
from devmap_cli.simulation.workload import Workload

TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "image_size": 28,
    "vision_output_dim": 64,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
}


def test_llama_4_gets_past_its_forward_and_the_report_says_so() -> None:
    config = AutoConfig.for_model("llama4", text_config=TEXT, vision_config=VISION)
    with torch.device("meta"):
        model = Llama4ForConditionalGeneration._from_config(config, dtype=torch.bfloat16).eval()
    seen = rehearse(model, {"": 0}, Workload(1, 16, 4), [UNLIMITED_BYTES])
    seen.raise_failure()
    assert list(seen.devices[0].phases) == ["load", "prefill", "decode"]
    assert any("image_outputs" in text for text in seen.assumptions)
    assert not hasattr(MoeCausalLMOutputWithPast, "image_outputs")
