"""Config.json files of models that people reported on and that transformers knows, where no file of theirs is at hand.

Only what sizes, shapes and names follow from is in them.
"""

from __future__ import annotations

from typing import Any


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: object) -> Any:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        **more,
    }


def _internvl(vision: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """InternVL as transformers has it, which names the language model's parts as Llama does."""
    images = {"model_type": "internvl_vision", "image_size": [448, 448], "patch_size": [14, 14]}
    return {
        "model_type": "internvl",
        "architectures": ["InternVLForConditionalGeneration"],
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "vision_config": {**images, **vision},
        "text_config": {**text, "max_position_embeddings": 8192, "tie_word_embeddings": False},
    }


def _opt(hidden: int, inner: int, layers: int, heads: int, **more: object) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "dtype": "float16",
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "ffn_dim": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        **more,
    }


_VIT_6B = {
    "hidden_size": 3200,
    "num_hidden_layers": 45,
    "num_attention_heads": 25,
    "intermediate_size": 12800,
    "use_qk_norm": True,
    "norm_type": "rms_norm",
}
_VIT_300M = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "norm_type": "layer_norm",
}
_CAUSAL = {"architectures": ["LlamaForCausalLM"]}

REPORTED: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "dtype": "float32"},
    "gpt-neo-2.7B": {
        "model_type": "gpt_neo",
        "architectures": ["GPTNeoForCausalLM"],
        "hidden_size": 2560,
        "num_layers": 32,
        "num_heads": 20,
        "attention_types": [[["global", "local"], 16]],
        "vocab_size": 50257,
        "max_position_embeddings": 2048,
    },
    "opt-350m": _opt(1024, 4096, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-30b": _opt(7168, 28672, 48, 56),
    "opt-66b": _opt(9216, 36864, 64, 72),
    "bloom-7b1": {
        "model_type": "bloom",
        "architectures": ["BloomForCausalLM"],
        "dtype": "float16",
        "hidden_size": 4096,
        "n_layer": 30,
        "n_head": 32,
        "vocab_size": 250880,
    },
    "starcoder": {
        "model_type": "gpt_bigcode",
        "architectures": ["GPTBigCodeForCausalLM"],
        "dtype": "float16",
        "n_embd": 6144,
        "n_head": 48,
        "n_layer": 40,
        "n_positions": 8192,
        "vocab_size": 49152,
    },
    "vicuna-13b": _llama(5120, 13824, 40, 40, 40, 32000, dtype="float16", **_CAUSAL),
    "llama-9.6b": _llama(4096, 14336, 40, 32, 8, 107520, dtype="bfloat16", **_CAUSAL),
    "internvl2-8b": _internvl(_VIT_300M, _llama(4096, 14336, 32, 32, 8, 92553)),
    "internvl2-26b": _internvl(_VIT_6B, _llama(6144, 16384, 48, 48, 8, 92553)),
    "internvl2-76b": _internvl(_VIT_6B, _llama(8192, 28672, 80, 64, 8, 128265)),
}
