"""Toy models as config.json files, with the sizes that a pencil gives for them.

Written out: `v` vocabulary, `h` hidden size, `f` inner size of the feed-forward, `d` size of a head.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# v 128, h 64, f 96, four layers, four heads of d 16, two of keys and values
_DECODER: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_ROPE_BYTES = 2 * 8 * 4  # inv_freq and original_inv_freq: d / 2 = 8 frequencies, float32


@dataclass(frozen=True)
class Toy:
    """A config.json and what follows from it.

    `kv_bytes` is what each layer keeps: (bytes per token, fixed bytes), summed over layers.
    """

    config: dict[str, Any]
    class_name: str
    num_parameters: int
    parameter_bytes: int
    buffer_bytes: int
    kv_bytes: tuple[int, int] | None
    ties: tuple[tuple[str, ...], ...] = ()
    no_split: frozenset[str] = field(default_factory=frozenset)


def write_toy(folder: Path, name: str, **changes: object) -> Path:
    """Write the config.json of toy `name` to `folder`, some fields changed or left out (None)."""
    config = {**TOYS[name].config, **changes}
    return write_config(folder, {key: value for key, value in config.items() if value is not None})


def write_config(folder: Path, config: object) -> Path:
    """Write `config` as the config.json of `folder`, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


TOYS = {
    # embedding v·h = 8,192; a layer: q h·h + h = 4,160, k and v each h·32 + 32 = 2,080, o h·h = 4,096,
    # feed-forward 3·h·f = 18,432, two norms 2·h = 128, together 30,976; last norm 64; head 8,192:
    # 8,192 + 4·30,976 + 64 + 8,192 = 140,352 parameters of 2 bytes.
    # Cache of a layer: keys and values of 2 heads of 16, 2 bytes: 2·2·16·2 = 128 bytes per token.
    "qwen2": Toy(
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "dtype": "bfloat16", **_DECODER},
        "Qwen2ForCausalLM",
        140_352,
        280_704,
        _ROPE_BYTES,
        (4 * 128, 0),
        no_split=frozenset({"Qwen2DecoderLayer"}),
    ),
    # embeddings (128 + 32 positions)·64 = 10,240; a layer: two norms 2·128 = 256, c_attn 64·192 + 192 = 12,480,
    # c_proj 64·64 + 64 = 4,160, feed-forward 64·256 + 256 + 256·64 + 64 = 33,088, together 49,984;
    # last norm 128; the head is the embedding: 10,240 + 3·49,984 + 128 = 160,320 parameters of 4 bytes.
    # Cache of a layer: 2·64·4 = 512 bytes per token.
    "gpt2": Toy(
        {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": 128,
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 3,
            "n_positions": 32,
        },
        "GPT2LMHeadModel",
        160_320,
        641_280,
        0,
        (3 * 512, 0),
        (("transformer.wte.weight", "lm_head.weight"),),
        frozenset({"GPT2Block"}),
    ),
    # embedding 128·32 = 4,096 (narrow), positions (32 + 2)·64 = 2,176, project_in and project_out 2·32·64 = 4,096;
    # a layer: q, k, v, o 4·(64·64 + 64) = 16,640, two norms 256, feed-forward 64·96 + 96 + 96·64 + 64 = 12,448,
    # together 29,344; last norm 128; tied head: 4,096 + 2,176 + 4,096 + 2·29,344 + 128 = 69,184 of 2 bytes.
    # Cache of a layer: 2·64·2 = 256 bytes per token.
    "opt": Toy(
        {
            "model_type": "opt",
            "architectures": ["OPTForCausalLM"],
            "vocab_size": 128,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 32,
            "dtype": "float16",
        },
        "OPTForCausalLM",
        69_184,
        138_368,
        0,
        (2 * 256, 0),
        (("model.decoder.embed_tokens.weight", "lm_head.weight"),),
        frozenset({"OPTDecoderLayer"}),
    ),
    # language model as qwen2: 140,352. Vision, h 32, f 64: patches 3·2·14·14·32 = 37,632; a block: qkv 32·96 + 96 =
    # 3,168, proj 32·32 + 32 = 1,056, gate and up 2·(32·64 + 64) = 4,224, down 64·32 + 32 = 2,080, two norms 64,
    # together 10,592; merger: norm 32, then (4·32)² + 128 = 16,512 and 128·64 + 64 = 8,256, together 24,800;
    # 37,632 + 2·10,592 + 24,800 = 83,616. Both: 223,968 of 2 bytes.
    # Buffers: 64 of the text, and 2·4 frequencies of 4 bytes (d 16 halved, and halved again) of the vision tower.
    "qwen2_5_vl": Toy(
        {
            "model_type": "qwen2_5_vl",
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "dtype": "bfloat16",
            "text_config": {
                **_DECODER,
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "out_hidden_size": 64,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            },
            "image_token_id": 120,
            "video_token_id": 121,
            "vision_start_token_id": 122,
            "vision_end_token_id": 123,
        },
        "Qwen2_5_VLForConditionalGeneration",
        223_968,
        447_936,
        _ROPE_BYTES + 2 * 4 * 4,
        (4 * 128, 0),
        no_split=frozenset({"Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"}),
    ),
    # shared embedding 8,192; attention 4·64·64 = 16,384, its norm 64, relative bias 32·4 = 128 once in each stack;
    # feed-forward 2·64·96 = 12,288, its norm 64. Encoder: 2·(16,384 + 64 + 12,288 + 64) + 128 + last norm 64 =
    # 57,792; decoder with cross-attention: 2·(2·16,448 + 12,352) + 128 + 64 = 90,688. 156,672 parameters;
    # the four `wo` of 6,144 stay float32, the rest float16: 4·6,144·4 + (156,672 - 24,576)·2 = 362,496 bytes.
    # Cache of a layer: self and cross attention, each 2·64·2 = 256 bytes per token.
    "t5": Toy(
        {
            "model_type": "t5",
            "architectures": ["T5ForConditionalGeneration"],
            "vocab_size": 128,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 96,
            "num_heads": 4,
            "num_layers": 2,
            "dtype": "float16",
        },
        "T5ForConditionalGeneration",
        156_672,
        362_496,
        0,
        (2 * 512, 0),
        (("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),),
        frozenset({"T5Block"}),
    ),
    # a layer: q and o 2·64·64 = 8,192, k and v 2·64·32 = 4,096, router 64·4 = 256, four experts of 3·64·96 = 18,432,
    # two norms 128, together 86,400; 2·8,192 + 4·86,400 + 64 = 362,048 of 2 bytes.
    "mixtral": Toy(
        {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "dtype": "bfloat16",
            "num_local_experts": 4,
            **_DECODER,
        },
        "MixtralForCausalLM",
        362_048,
        724_096,
        _ROPE_BYTES,
        (4 * 128, 0),
        no_split=frozenset({"MixtralDecoderLayer"}),
    ),
    # embeddings (128 + 32 + 2)·64 + norm 128 = 10,496; a layer: q, k, v, o 4·4,160 = 16,640, norm 128, feed-forward
    # 6,240 + 6,208 = 12,448, norm 128, together 29,344; head: dense 4,160, norm 128, bias 128, its matrix tied:
    # 10,496 + 2·29,344 + 4,416 = 73,600 of 4 bytes. Buffers: 32 position ids and 32 type ids of 8 bytes.
    "bert": Toy(
        {
            "model_type": "bert",
            "architectures": ["BertForMaskedLM"],
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
            "dtype": "float32",
        },
        "BertForMaskedLM",
        73_600,
        294_400,
        2 * 32 * 8,
        (0, 0),
        (
            ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
            ("cls.predictions.bias", "cls.predictions.decoder.bias"),
        ),
        frozenset({"BertEmbeddings", "BertLayer"}),
    ),
    # a layer: q and o 8,192, k and v 4,096, norms of q and k 2·16 = 32, feed-forward 18,432, four norms 256,
    # together 31,008; tied head: 8,192 + 4·31,008 + 64 = 132,288 of 2 bytes.
    # Buffers: the scale of the embedding 2 bytes, two tables of frequencies. Three layers keep 8 - 1 tokens.
    "gemma3": Toy(
        {
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            "dtype": "bfloat16",
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            **_DECODER,
        },
        "Gemma3ForCausalLM",
        132_288,
        264_576,
        2 + 2 * _ROPE_BYTES,
        (4 * 128, 0),
        (("model.embed_tokens.weight", "lm_head.weight"),),
        frozenset({"Gemma3DecoderLayer"}),
    ),
    # Feed-forward of each layer: router 64·4 = 256, four experts of 3·64·32 = 6,144, a shared one 6,144 and its gate
    # 64, together 31,040. Linear attention: qkvz 64·(2·32 + 2·64) = 12,288, ba 64·8 = 512, convolution 128·4 = 512,
    # A_log and dt_bias 4 + 4, norm 16, out 64·64 = 4,096, together 17,432. Full attention: q with gate 64·128 =
    # 8,192, k and v 4,096, o 4,096, two norms of 16, together 16,416. Two norms of 64 a layer:
    # 2·8,192 + 64 + 4·(31,040 + 128) + 3·17,432 + 16,416 = 209,832 of 2 bytes.
    # Cache of a linear layer: convolution 128·4·2 = 1,024 bytes, state 4·16·16·4 = 4,096 bytes, whatever the length.
    # Buffers: a quarter of d is rotated, 2·2 frequencies of 4 bytes.
    "qwen3_next": Toy(
        {
            "model_type": "qwen3_next",
            "architectures": ["Qwen3NextForCausalLM"],
            "dtype": "bfloat16",
            **_DECODER,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
        "Qwen3NextForCausalLM",
        209_832,
        419_664,
        2 * 2 * 4,
        (128, 3 * (1024 + 4096)),
        no_split=frozenset({"Qwen3NextDecoderLayer"}),
    ),
    # attention: q, v, o 3·4,160 and k without bias 4,096 = 16,576, norm 128; feed-forward 12,448, norm 128.
    # Encoder: convolutions 8·64·3 + 64 = 1,600 and 64·64·3 + 64 = 12,352, positions 30·64 = 1,920,
    # 2·(16,704 + 12,576), last norm 128, together 74,560. Decoder: embedding 8,192, positions 40·64 = 2,560,
    # 2·(2·16,704 + 12,576), last norm 128, together 102,848. 177,408 of 2 bytes, the head tied.
    # Cache of a layer: own 2·64·2 = 256 bytes per token; cross over 30 frames 30·256 = 7,680, whatever the length.
    "whisper": Toy(
        {
            "model_type": "whisper",
            "architectures": ["WhisperForConditionalGeneration"],
            "vocab_size": 128,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "num_mel_bins": 8,
            "max_source_positions": 30,
            "max_target_positions": 40,
            "dtype": "float16",
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 3,
        },
        "WhisperForConditionalGeneration",
        177_408,
        354_816,
        0,
        (2 * 256, 2 * 7_680),
        (("model.decoder.embed_tokens.weight", "proj_out.weight"),),
        frozenset({"WhisperDecoderLayer", "WhisperEncoderLayer"}),
    ),
}
