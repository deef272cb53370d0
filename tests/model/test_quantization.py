"""Quantized models: bytes worked out by hand, published sizes, and forwards that allocate what the kernels do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from devmap_cli.errors import RequestError
from devmap_cli.model.empty import EmptyModel, build_quantized
from devmap_cli.model.load import load_spec
from devmap_cli.model.quantization.scheme import modelopt_text, quantization_in_map, quantization_of
from devmap_cli.model.quantization.targets import Globs, Skips
from devmap_cli.model.quiet import quiet_libraries
from devmap_cli.model.reference import resolve
from devmap_cli.model.sizes import Sizes, bytes_by_dtype
from tests.support.processes import Outcome
from tests.support.toys import TOYS, write_config

MakeToy = Callable[..., Path]
GIB = 2**30

# The toy qwen2 has seven linear layers (m outputs of n inputs) in each of its four layers: q and o 64 of 64, k and v
# 32 of 64, gate and up 96 of 64, down 64 of 96: 30,720 weights and 448 outputs, 122,880 and 1,792 in all.
# In bfloat16 stay: embedding and head 2·16,384, norms (4·128 + 64)·2 = 1,152, biases of q, k and v 4·128·2 = 1,024,
# and the rotary buffers of 64 bytes: 35,008.
STAYS = 35_008
FLOAT32_BIASES = 1_024  # what the biases take more in float32
FP8_CHANNEL = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "targets": ["Linear"]}
INT4_GROUP = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, "targets": ["Linear"]}
STORED: dict[str, tuple[dict[str, Any], int]] = {
    # a byte each, and a float32 scale for each output: 122,880 + 1,792·4
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, STAYS + 122_880 + 7_168),
    # half a byte each, a float32 scale for 64 of them, and a table of 16 for each of 28 layers:
    # 61,440 + 1,920·4 + 28·64
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        STAYS + 61_440 + 7_680 + 1_792,
    ),
    # the scales a byte each, with a scale (at most 256 of them), a table of 256 and an offset for each layer:
    # 61,440 + 1,792 + 1,920 + 28·(4 + 1,024 + 4)
    "nf4-double": (
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        },
        STAYS + 61_440 + 1_792 + 1_920 + 28_896,
    ),
    # groups of 32: two for 64 inputs, three for 96; a layer has 384·2 + 64·3 = 960 of them. Scales 2 bytes, zeros half
    # a byte, and 4 bytes for each of the 480 inputs of a layer: 61,440 + 4·(1,920 + 480 + 1,920)
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, STAYS + 61_440 + 17_280),
    # the same without the order of inputs
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32}, STAYS + 61_440 + 9_600),
    # every layer is one block of up to 128 by 128: 28 scales of 4 bytes
    "fp8": ({"quant_method": "fp8"}, STAYS + FLOAT32_BIASES + 122_880 + 112),
    # a scale for each output, and a bound for each layer
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8"}, STAYS + FLOAT32_BIASES + 122_880 + 7_168 + 112),
    # a scale of 2 bytes for each output
    "compressed-fp8": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": FP8_CHANNEL},
        },
        STAYS + 122_880 + 3_584,
    ),
    # 960 scales of 2 bytes in a layer, and a shape of two int64 for each of 28
    "compressed-int4": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": ["re:.*head"],
            "config_groups": {"group_0": INT4_GROUP},
        },
        STAYS + 61_440 + 7_680 + 448,
    ),
    # two scales for each of 28 layers
    "modelopt-fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, STAYS + 122_880 + 224),
    # a byte for 16 weights besides
    "modelopt-nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, STAYS + 61_440 + 7_680 + 224),
}


def build(folder: Path, scheme: str | None = None, *, dtype: str | None = None, kernels: bool = False) -> EmptyModel:
    reference = resolve(str(folder))
    asked = quantization_of(reference.config, modelopt_text(folder), scheme, kernels=(9, 0) if kernels else None)
    with quiet_libraries():
        return build_quantized(reference, dtype, asked, trust_remote_code=False)


def num_bytes(module: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])


@pytest.mark.parametrize("name", STORED)
def test_bytes_are_those_computed_by_hand(toy: MakeToy, name: str) -> None:
    settings, expected = STORED[name]
    spec = load_spec(str(toy("qwen2", quantization_config=settings)))
    assert Sizes.of(spec).total.num_bytes == expected
    assert any(f"quantized ({settings['quant_method']})" in note for note in spec.notes)
    assert spec.quantization == settings


@pytest.mark.parametrize("name", STORED)
def test_order_and_cache_are_those_of_the_plain_model(toy: MakeToy, name: str) -> None:
    plain = load_spec(str(toy("qwen2")))
    spec = load_spec(str(toy("qwen2", quantization_config=STORED[name][0])))
    assert spec.execution_order == plain.execution_order
    assert spec.kv_cache == plain.kv_cache
    assert spec.ties == plain.ties


@pytest.mark.parametrize(("scheme", "name"), [("int8", "int8"), ("nf4", "nf4"), ("fp4", "nf4")])
def test_quantized_on_the_fly_it_takes_as_much_as_stored(toy: MakeToy, scheme: str, name: str) -> None:
    spec = load_spec(str(toy("qwen2")), quantize=scheme)
    assert Sizes.of(spec).total.num_bytes == STORED[name][1]
    assert spec.quantization == {"scheme": scheme}
    assert spec.notes == ()


def test_tied_heads_and_conv1d(toy: MakeToy) -> None:
    # gpt2, 4 bytes: a layer has 12,288 + 4,096 + 2·16,384 = 49,152 weights, 192 + 64 + 256 + 64 = 576 outputs;
    # 160,320 - 3·49,152 parameters stay, and the head is still the embedding
    spec = load_spec(str(toy("gpt2")), quantize="int8")
    assert Sizes.of(spec).total.num_bytes == (160_320 - 147_456) * 4 + 147_456 + 3 * 576 * 4
    assert spec.ties == TOYS["gpt2"].ties


def test_what_stays_in_float32_is_not_quantized(toy: MakeToy) -> None:
    names = {name for name, tensor in load_spec(str(toy("t5")), quantize="nf4").tensors() if tensor.dtype == "uint8"}
    assert names
    assert not any(".wo." in name for name in names)


def test_awq_loads_the_rest_in_float16(toy: MakeToy) -> None:
    spec = load_spec(str(toy("qwen2", quantization_config=STORED["awq"][0])))
    assert spec.dtype == "float16"
    assert "bfloat16" not in bytes_by_dtype(spec)


def test_an_unknown_method_is_counted_unpacked_and_said(toy: MakeToy) -> None:
    spec = load_spec(str(toy("qwen2", quantization_config={"quant_method": "spqr"})))
    assert Sizes.of(spec).total.num_bytes == TOYS["qwen2"].parameter_bytes + TOYS["qwen2"].buffer_bytes
    assert any("quantized (spqr), which is not counted" in note for note in spec.notes)


def test_a_quantized_checkpoint_is_not_quantized_again(toy: MakeToy) -> None:
    with pytest.raises(RequestError, match="quantized already") as caught:
        load_spec(str(toy("qwen2", quantization_config=STORED["gptq"][0])), quantize="nf4")
    assert caught.value.hint


def test_modelopts_own_file_decides_and_is_remembered_apart(toy: MakeToy) -> None:
    folder = toy("qwen2")
    plain = Sizes.of(load_spec(str(folder))).total.num_bytes
    excluded = ["lm_head", "model.layers.0*", "*.mlp.gate_proj"]
    own = {"quant_algo": "FP8", "exclude_modules": excluded}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    spec = load_spec(str(folder))
    # three layers of 30,720 - 6,144 weights are 8 bit, with two scales for each of six
    assert plain - Sizes.of(spec).total.num_bytes == 3 * 24_576 - 3 * 6 * 8
    assert spec.quantization == {"quant_method": "modelopt", **own}
    assert any("cannot load ModelOpt's FP8" in note for note in spec.notes)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"quantization": 3}', '{"quantization": {}}'])
def test_a_file_that_says_nothing_is_no_quantization(text: str) -> None:
    assert quantization_of({}, text, None) is None


def test_a_map_gives_back_what_was_kept(toy: MakeToy) -> None:
    for settings, _ in STORED.values():
        kept = quantization_of({"quantization_config": settings}, None, None)
        assert kept is not None
        assert quantization_in_map(kept.as_in_map) == kept
    asked = quantization_of({}, None, "nf4")
    assert asked is not None
    assert quantization_in_map(asked.as_in_map) == asked
    assert quantization_in_map(None) is None
    assert toy("qwen2").is_dir()


@pytest.mark.parametrize(
    ("key", "name", "is_left"),
    [
        ("layer.1", "layer.1.attn", True),
        ("layer.1", "layer.11.attn", False),
        ("layer.*", "layer.11.attn", True),
        ("mlp.gate", "mlp.gate_proj", False),
        ("fc1", "model.decoder.layers.23.fc1", True),
        ("*.[", "model.*.[", True),
    ],
)
def test_names_to_leave(key: str, name: str, is_left: bool) -> None:
    assert (name in Skips([key])) is is_left
    assert name not in Skips([])


def test_names_that_globs_match() -> None:
    globs = Globs(["model.layers.1.*", "*.gate", "lm_head"])
    assert "model.layers.1.mlp.up_proj" in globs
    assert "model.layers.2.mlp.gate" in globs
    assert "lm_head" in globs
    assert "model.layers.11.mlp" not in globs


# ---------------------------------------------------------------------- experts that are one parameter

_MOE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}
QWEN3_MOE = {
    **_MOE,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
GPT_OSS = {
    **_MOE,
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}


def experts_bytes(built: EmptyModel) -> int:
    return num_bytes(built.model.get_submodule("model.layers.0.mlp.experts"))


def test_bitsandbytes_leaves_experts_and_says_so(tmp_path: Path) -> None:
    built = build(write_config(tmp_path, QWEN3_MOE), "nf4")
    # 4 experts: gate and up 64·64, down 64·32, of 2 bytes
    assert experts_bytes(built) == 4 * (4_096 + 2_048) * 2
    assert any("bitsandbytes does not quantize experts" in note for note in built.notes)


def test_nvfp4_experts(tmp_path: Path) -> None:
    config = {**QWEN3_MOE, "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    # 24,576 weights: half a byte each, a byte for 16, two scales for each of three projections
    built = build(write_config(tmp_path, config))
    assert experts_bytes(built) == 12_288 + 1_536 + 4 * 3 * 8


@pytest.mark.parametrize(
    "settings", [{}, {"weight_block_size": [32, 32]}, {"weight_block_size": None, "activation_scheme": "static"}]
)
def test_fp8_tensors_are_those_of_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils.quantization_config import FineGrainedFP8Config

    plain = build(write_config(tmp_path / "plain", QWEN3_MOE)).model
    make_config: Any = FineGrainedFP8Config
    quantizer: Any = FineGrainedFP8HfQuantizer(make_config(**settings), pre_quantized=True)
    quantizer._process_model_before_weight_loading(plain)
    config = {**QWEN3_MOE, "quantization_config": {"quant_method": "fp8", **settings}}
    ours = build(write_config(tmp_path / "ours", config)).model
    assert [(n, p.shape, p.dtype) for n, p in ours.named_parameters()] == [
        (n, p.shape, p.dtype) for n, p in plain.named_parameters()
    ]


def test_mxfp4_is_unpacked_without_kernels(tmp_path: Path) -> None:
    folder = write_config(tmp_path, GPT_OSS)
    # gate and up 4·64·64 with 4·64 biases, down 4·32·64 with 4·64 biases, 2 bytes each
    dense = build(folder)
    assert experts_bytes(dense) == (16_384 + 256 + 8_192 + 256) * 2
    assert any("without the kernels for MXFP4" in note for note in dense.notes)
    # half a byte for each, a byte for 32, biases 4 bytes
    packed = build(folder, kernels=True)
    assert experts_bytes(packed) == 12_288 + 768 + 512 * 4


# ---------------------------------------------------------------------- published sizes


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32_000,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "dtype": "float16",
    }


LLAMA_2_7B = llama(4096, 11_008, 32, 32, 32)
LLAMA_2_13B = llama(5120, 13_824, 40, 40, 40)
LLAMA_2_70B = llama(8192, 28_672, 80, 64, 8)
BLOOM = {
    "model_type": "bloom",
    "architectures": ["BloomForCausalLM"],
    "vocab_size": 250_880,
    "hidden_size": 14_336,
    "n_layer": 70,
    "n_head": 112,
    "dtype": "bfloat16",
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}


@pytest.mark.parametrize(
    ("config", "scheme", "gib"),
    [
        # 32·202.4 M weights a byte each with 32·43,520 scales, 0.53 GB of embedding and head, norms
        (LLAMA_2_7B, "int8", 6.53),
        # 80·855.6 M weights half a byte each and 4 bytes for 64, 1.05 GB of embedding and head
        (LLAMA_2_70B, "nf4", 36.84),
        (LLAMA_2_13B, None, 24.24),
        (LLAMA_2_13B, "int8", 12.44),
        (LLAMA_2_13B, "nf4", 7.26),
        (GPT_OSS_20B, None, 38.96),
    ],
)
def test_published_models(tmp_path: Path, config: dict[str, Any], scheme: str | None, gib: float) -> None:
    assert num_bytes(build(write_config(tmp_path, config), scheme).model) / GIB == pytest.approx(gib, abs=0.01)


def test_gpt_oss_with_kernels(tmp_path: Path) -> None:
    built = build(write_config(tmp_path, GPT_OSS_20B), kernels=True)
    assert num_bytes(built.model) / GIB == pytest.approx(12.83, abs=0.01)


def test_bloom_in_int8(tmp_path: Path) -> None:
    model = build(write_config(tmp_path, BLOOM), "int8").model
    # 12·14,336² weights a byte each, 11·14,336 scales of 4 bytes, and norms and biases
    assert num_bytes(model.get_submodule("transformer.h.0")) / GIB == pytest.approx(2.30, abs=0.005)
    assert num_bytes(model.get_submodule("transformer.word_embeddings")) / GIB == pytest.approx(6.70, abs=0.005)
    # all of it: 70 blocks and the embedding, which the head shares
    assert num_bytes(model) / GIB == pytest.approx(167.6, abs=0.1)


# ---------------------------------------------------------------------- what a forward allocates


class _Made(TorchDispatchMode):
    """Collects (shape, dtype) of every tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.tensors: list[tuple[tuple[int, ...], torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple) else (result,)
        self.tensors += [(tuple(item.shape), item.dtype) for item in made if isinstance(item, torch.Tensor)]
        return result


def made_by(folder: Path, scheme: str | None, rows: int) -> set[tuple[tuple[int, ...], torch.dtype]]:
    """What the first layer's gate_proj, 96 outputs of 64 inputs, makes of a prompt of `rows`."""
    layer = build(folder, scheme).model.get_submodule("model.layers.0.mlp.gate_proj")
    with _Made() as made, torch.no_grad():
        output = layer(torch.empty(1, rows, 64, dtype=torch.bfloat16, device="meta"))
    assert (output.shape, output.dtype) == ((1, rows, 96), torch.bfloat16)
    return set(made.tensors)


def test_4_bit_weights_are_unpacked_for_a_prompt_only(toy: MakeToy) -> None:
    unpacked = ((96, 64), torch.bfloat16)
    assert unpacked in made_by(toy("qwen2"), "nf4", 2)
    assert unpacked not in made_by(toy("qwen2"), "nf4", 1)


def test_int8_quantizes_inputs_and_accumulates_in_int32(toy: MakeToy) -> None:
    made = made_by(toy("qwen2"), "int8", 5)
    assert {((5, 64), torch.float16), ((5, 64), torch.int8), ((5, 96), torch.int32), ((5, 96), torch.float16)} <= made
    assert ((96, 64), torch.float16) not in made


@pytest.mark.parametrize(("name", "rows", "is_unpacked"), [("gptq", 8, False), ("gptq", 9, True), ("awq", 1024, True)])
def test_integers_are_unpacked_for_many_rows(toy: MakeToy, name: str, rows: int, is_unpacked: bool) -> None:
    made = made_by(toy("qwen2", quantization_config=STORED[name][0]), None, rows)
    assert (((96, 64), torch.float16) in made) is is_unpacked


def test_awq_adds_partial_products_for_few_rows(toy: MakeToy) -> None:
    made = made_by(toy("qwen2", quantization_config=STORED["awq"][0]), None, 3)
    assert ((8, 3, 96), torch.float16) in made


@pytest.mark.parametrize("name", ["fp8", "fbgemm_fp8", "modelopt-fp8"])
def test_fp8_quantizes_its_inputs(toy: MakeToy, name: str) -> None:
    made = made_by(toy("qwen2", quantization_config=STORED[name][0]), None, 5)
    assert ((5, 64), torch.float8_e4m3fn) in made


@pytest.mark.parametrize("name", STORED)
def test_a_rehearsal_gets_through(toy: MakeToy, name: str) -> None:
    from devmap_cli.simulation.rehearsal import rehearse
    from devmap_cli.simulation.workload import Workload

    model = build(toy("qwen2", quantization_config=STORED[name][0])).model
    halves = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    halves |= {f"model.layers.{index}": index // 2 for index in range(4)}
    for _ in range(2):  # the second run finds nothing of the first
        with quiet_libraries():
            rehearsal = rehearse(model, halves, Workload(prompt_tokens=12, max_new_tokens=4), [GIB, GIB])
        assert rehearsal.failure is None
        loaded = [device.phases["load"].weights_bytes for device in rehearsal.devices]
        assert sum(loaded) == pytest.approx(STORED[name][1], abs=200 * 512)  # each tensor is rounded up to 512
        assert all("decode" in device.phases for device in rehearsal.devices)


@pytest.mark.parametrize(
    ("scheme", "settings", "bytes_per_weight"),
    [
        ("nf4", None, 2),  # the 16-bit weight that it is made of
        ("int8", None, 4),  # and a copy of it in float16
        # the packed weight, a copy of it in float32, and the product of that with the scales
        (None, {"quant_method": "fp8", "weight_block_size": [128, 128], "dequantize": True}, 9),
    ],
)
def test_what_making_a_weight_takes_beside_it_while_loading(
    toy: MakeToy, scheme: str | None, settings: dict[str, Any] | None, bytes_per_weight: int
) -> None:
    from devmap_cli.simulation.rehearsal import rehearse
    from devmap_cli.simulation.workload import Workload

    largest = 512 * 2048
    folder = toy(
        "qwen2", hidden_size=512, intermediate_size=2048, **({"quantization_config": settings} if settings else {})
    )
    model = build(folder, scheme).model
    with quiet_libraries():
        (device,) = rehearse(model, {"": 0}, Workload(prompt_tokens=4, max_new_tokens=2), [GIB]).devices
    assert device.phases["load"].activation_bytes == bytes_per_weight * largest


# ---------------------------------------------------------------------- the command line


def test_inspect_shows_quantized_sizes(toy: MakeToy, devmap: Callable[..., Outcome]) -> None:
    outcome = devmap("inspect", toy("qwen2"), "--quantize", "nf4", "--json")
    document = json.loads(outcome.stdout)
    assert outcome.exit_code == 0
    assert document["total"]["num_bytes"] == STORED["nf4"][1]
    assert document["model"]["quantization"] == {"scheme": "nf4"}


def test_plan_writes_the_scheme(toy: MakeToy, devmap: Callable[..., Outcome]) -> None:
    outcome = devmap("plan", toy("qwen2"), "--quantize", "int8", "--max-memory", "0:8GiB", "-o", "-")
    assert outcome.exit_code == 0, outcome.stderr
    assert json.loads(outcome.stdout)["model"]["quantization"] == {"scheme": "int8"}


def test_a_refusal_offers_to_quantize(toy: MakeToy, devmap: Callable[..., Outcome]) -> None:
    outcome = devmap("plan", toy("qwen2"), "--max-memory", "0:200kB", "--weights-only")
    assert outcome.exit_code == 1
    assert "--quantize nf4" in outcome.stderr
