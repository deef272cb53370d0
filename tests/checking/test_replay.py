"""Maps that people published or reported, and the answers that they should have had."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from devmap_cli.checking import weights_by_device
from devmap_cli.devices.device import Device
from devmap_cli.mapfile import MapWorkload
from tests.checking.rehearsing import Subject, codes, the

GB, GIB = 10**9, 1 << 30
WITH_IMAGE = MapWorkload(prompt_tokens=512, max_new_tokens=8, images=((448, 448),))
QWEN_TEXT = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "torch_dtype": "bfloat16",
    "vision_start_token_id": 151652,
    "image_token_id": 151655,
    "video_token_id": 151656,
}


def layers(prefix: str, *devices: int | str) -> dict[str, int | str]:
    return {f"{prefix}.{index}": device for index, device in enumerate(devices)}


def split_model(num_layers: int, world_size: int) -> dict[str, int | str]:
    """InternVL2's published formula, with today's names for the vision tower and the projector.

    Source: the model cards of OpenGVLab/InternVL2; the first GPU counts as half.
    """
    per_gpu = math.ceil(num_layers / (world_size - 0.5))
    counts = [math.ceil(per_gpu * 0.5)] + [per_gpu] * (world_size - 1)
    places = [gpu for gpu, count in enumerate(counts) for _ in range(count)]
    device_map = layers("language_model.model.layers", *places)
    names = ("tok_embeddings", "embed_tokens", "norm")
    device_map |= {"vision_tower": 0, "multi_modal_projector": 0}
    device_map |= {f"language_model.model.{name}": 0 for name in names}
    device_map |= {"language_model.output": 0, "language_model.lm_head": 0}
    return {**device_map, f"language_model.model.layers.{num_layers - 1}": 0}


@pytest.mark.slow
def test_internvl2_76b_by_its_published_formula(tmp_path: Path) -> None:
    vision = {
        "model_type": "internvl_vision",
        "hidden_size": 3200,
        "num_hidden_layers": 45,
        "num_attention_heads": 25,
        "intermediate_size": 12800,
        "image_size": [448, 448],
        "patch_size": [14, 14],
        "use_qk_norm": True,
        "norm_type": "rms_norm",
    }
    text = {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128_265,
        "max_position_embeddings": 8192,
    }
    subject = Subject(
        tmp_path,
        {
            "model_type": "internvl",
            "architectures": ["InternVLForConditionalGeneration"],
            "dtype": "bfloat16",
            "vision_config": vision,
            "text_config": text,
        },
    )
    report = subject.check(split_model(80, 2), {0: 80 * GB, 1: 80 * GB})
    assert the("uncovered-buffer", report).module == "model.language_model.rotary_emb"
    harmless = [finding for finding in report.findings if finding.code == "unmatched-key"]
    assert {finding.severity for finding in harmless} == {"warning"}
    # the formula makes 27 + 54 = 81 layers of 80
    assert {finding.module.rpartition("model.")[2] for finding in harmless} == {"layers.80", "tok_embeddings", "output"}
    # a layer: 2·8192² + 2·8192·1024 + 3·8192·28672 + 2·8192 = 855,654,400 parameters of 2 bytes, 1.59 GiB;
    # GPU 1 has 27 to 78, 79 being on GPU 0: 52 of them, 82.9 GiB, and may take 74.5
    gpu_1 = report.forecast.devices[1]
    assert gpu_1.highest.weights_bytes == pytest.approx(52 * 1_711_308_800, rel=1e-4)
    short = the("out-of-memory", report)
    assert short.module == "1"
    assert short.consequence == "the run ends in load, out of memory on GPU 1"
    assert the("back-and-forth", report).message.endswith("go GPU 0 → GPU 1 → GPU 0")
    assert not report.passed


def test_gemma_3_with_the_names_of_an_older_release(tmp_path: Path) -> None:
    text = {
        "model_type": "gemma3_text",
        "vocab_size": 262_208,
        "hidden_size": 640,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "sliding_window": 16,
    }
    vision = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    subject = Subject(
        tmp_path,
        {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "dtype": "bfloat16",
            "text_config": text,
            "vision_config": {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14, **vision},
            "mm_tokens_per_image": 4,
        },
    )
    old = {
        "vision_tower": 0,
        "multi_modal_projector": 0,
        "language_model.model.embed_tokens": 0,
        **layers("language_model.model.layers", 0, 0, 0, 1, 1, 1),
        "language_model.model.norm": 1,
        "language_model.model.rotary_emb": 0,
        "language_model.lm_head": 0,
    }
    report = subject.check(old)
    assert set(codes(report)) == {"old-name"}
    assert len(report.findings) == len(old)
    assert not report.passed  # transformers itself translates no key, and `devmap run` refuses the map as it is
    assert subject.repair(old).report.findings == ()
    assert report.device_map["model.language_model.layers.3"] == Device.parse(1)
    # 262,208 rows of 640, 2 bytes, once: as embedding, and not again as lm_head, which shares it
    embedding_bytes = 262_208 * 640 * 2
    held = weights_by_device(report.device_map, subject.spec)
    assert embedding_bytes < held[Device.parse(0)] < 1.2 * embedding_bytes
    assert report.forecast.devices[0].highest.weights_bytes == pytest.approx(held[Device.parse(0)], rel=0.01)
    apart = subject.check({**old, "language_model.lm_head": 1})
    assert the("split-tie", apart).fix == 'put them on one device: "lm_head": 0'


def test_a_gpt_bigcode_block_cut_in_two(tmp_path: Path) -> None:
    subject = Subject(
        tmp_path,
        {
            "model_type": "gpt_bigcode",
            "architectures": ["GPTBigCodeForCausalLM"],
            "dtype": "float16",
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 40,
            "n_positions": 128,
            "vocab_size": 128,
        },
    )
    whole = layers("transformer.h", *[0] * 26, *[1] * 14)
    del whole["transformer.h.26"]
    report = subject.check(
        {
            "transformer.wte": 0,
            "transformer.wpe": 0,
            **whole,
            "transformer.h.26.ln_1": 0,
            "transformer.h.26.attn": 0,
            "transformer.h.26.ln_2": 0,
            "transformer.h.26.mlp.c_fc": 0,
            "transformer.h.26.mlp.act": 1,
            "transformer.h.26.mlp.c_proj": 1,
            "transformer.h.26.mlp.dropout": 1,
            "transformer.ln_f": 1,
            "transformer.bias": 0,
            "lm_head": 0,
        }
    )
    assert codes(report) == ["split-block", "mixed-devices"]
    mixed = the("mixed-devices", report)
    assert mixed.module == "transformer.h.26"
    assert mixed.consequence.endswith(": hidden_states = residual + feed_forward_hidden_states")
    assert mixed.fix == 'put it on one device: "transformer.h.26": 0'


def test_opt_350m_with_its_tied_weights_apart_and_projections_left_out(tmp_path: Path) -> None:
    subject = Subject(
        tmp_path,
        {
            "model_type": "opt",
            "architectures": ["OPTForCausalLM"],
            "dtype": "float16",
            "hidden_size": 1024,
            "word_embed_proj_dim": 512,
            "ffn_dim": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "vocab_size": 50272,
            "do_layer_norm_before": False,
        },
    )
    device_map = {
        "model.decoder.embed_tokens": "cpu",
        "model.decoder.embed_positions": "cpu",
        **layers("model.decoder.layers", *["cpu"] * 24),
        "lm_head": "disk",
    }
    report = subject.check(device_map)
    left_out = [finding.module for finding in report.findings if finding.code == "uncovered-parameter"]
    assert sorted(left_out) == ["model.decoder.project_in", "model.decoder.project_out"]
    assert "are on cpu and disk" in the("split-tie", report).message
    repaired = subject.repair(device_map)
    assert repaired.report.findings == ()
    assert set(repaired.document.device_map.values()) == {Device.parse("cpu")}


@pytest.fixture(scope="module")
def qwen2_vl(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    vision = {"depth": 4, "embed_dim": 64, "mlp_ratio": 4, "num_heads": 4, "hidden_size": 128}
    small = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Subject(
        tmp_path_factory.mktemp("qwen2_vl"),
        {
            **QWEN_TEXT,
            **small,
            "model_type": "qwen2_vl",
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "num_hidden_layers": 4,
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
            "vision_config": {**vision, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
        },
    )


def embeddings_on_gpu_1(**more: int) -> dict[str, int | str]:
    language_model = "model.language_model"
    return {
        "model.visual": 0,
        f"{language_model}.embed_tokens": 1,
        **layers(f"{language_model}.layers", 0, 0, 1, 1),
        f"{language_model}.norm": 1,
        "lm_head": 1,
        **{f"{language_model}.{name}": device for name, device in more.items()},
    }


def test_qwen2_vl_with_its_embeddings_on_gpu_1(qwen2_vl: Subject) -> None:
    report = qwen2_vl.check(embeddings_on_gpu_1(), workload=WITH_IMAGE)
    assert codes(report) == ["uncovered-buffer", "mixed-devices"]
    mixed = the("mixed-devices", report)
    assert mixed.module == "model.language_model.rotary_emb"
    assert "computes with tensors on GPU 0 and GPU 1" in mixed.message
    assert "modeling_qwen2_vl.py:" in mixed.consequence
    assert mixed.fix == 'put "model.language_model.rotary_emb": 0, with which a rehearsal gets through'


@pytest.mark.parametrize("rotary_emb", [0, 1])
def test_qwen2_vl_with_everything_named_runs(qwen2_vl: Subject, rotary_emb: int) -> None:
    assert qwen2_vl.check(embeddings_on_gpu_1(rotary_emb=rotary_emb), workload=WITH_IMAGE).findings == ()


def test_qwen2_vl_with_a_video_needs_more_where_its_vision_tower_is(qwen2_vl: Subject) -> None:
    need = []
    for num_frames in (2, 16):
        workload = MapWorkload(prompt_tokens=1024, max_new_tokens=8, videos=((224, 224, num_frames),))
        report = qwen2_vl.check(embeddings_on_gpu_1(rotary_emb=0), workload=workload)
        assert report.findings == ()
        need.append(report.forecast.devices[0].phases[1].activation_bytes)
    assert need[1] > need[0]


def guide_map() -> Mapping[str, int | str]:
    """A map for Qwen2.5-VL-7B as a guide gives it, written by hand for an older transformers."""
    return {
        "model.embed_tokens": 0,
        **layers("model.layers", *[0] * 10, *[1] * 18),
        "model.norm": 1,
        "visual.patch_embed": 0,
        **layers("visual.blocks", *[0] * 10, *[1] * 22),
        "visual.merger": 0,
        "lm_head": 1,
    }


def test_a_hand_written_qwen2_5_vl_map(tmp_path: Path) -> None:
    vision: dict[str, Any] = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }
    subject = Subject(
        tmp_path,
        {
            **QWEN_TEXT,
            "model_type": "qwen2_5_vl",
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "num_hidden_layers": 28,
            "vision_config": vision,
        },
    )
    repaired = subject.repair(guide_map(), WITH_IMAGE)
    assert repaired.report.findings == ()
    changes = {change.module: (change.device, change.reason) for change in repaired.changes}
    gpu_0, gpu_1 = Device.parse(0), Device.parse(1)
    assert changes["model.language_model.layers.10"] == (gpu_1, "was model.layers.10")
    assert changes["model.visual.blocks.9"] == (gpu_0, "was visual.blocks.9")
    assert changes["model.language_model.rotary_emb"] == (gpu_0, "no key named it")
    assert changes["model.visual.rotary_pos_emb"] == (gpu_0, "no key named it")
    assert len(changes) == len(guide_map()) - 1 + 2  # lm_head is called so to this day
    # GPU 0: 10 of 28 layers of 233,057,792 parameters, the embedding of 152,064·3,584, and part of the tower
    weights = [item.highest.weights_bytes for item in repaired.report.forecast.devices]
    assert weights[0] == pytest.approx(5.81 * GIB, rel=0.005)
    assert weights[1] == pytest.approx(9.64 * GIB, rel=0.005)
    assert sum(weights) == pytest.approx(8_292_166_656 * 2, rel=0.001)
