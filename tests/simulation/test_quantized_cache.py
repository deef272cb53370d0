"""Quantized KV caches: their bytes by hand, their growth, and that real numbers come back nearly as they were.

The model: 2 layers, 2 heads of keys and values of 64 in bfloat16, so that keys or values of one layer are 128 numbers
a token, 256 bytes. Groups have 64 numbers, each with a scale and an offset of 2 bytes: 8 bytes a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.cache_utils import QuantizedCache

from devmap_cli.errors import RequestError
from devmap_cli.model.kv_dtypes import AUTO, KV_DTYPES, QUANTIZED, check_kv_dtype_for, generation_options
from devmap_cli.simulation.backend import simulated_devices
from devmap_cli.simulation.cache_growth import grow, tensors_of
from devmap_cli.simulation.memory import UNLIMITED_BYTES, DeviceRehearsal
from devmap_cli.simulation.quantized_cache import GroupedLayer, quantized_layers
from devmap_cli.simulation.recording import record
from devmap_cli.simulation.rehearsal import rehearse
from devmap_cli.simulation.replay import Seat, replay
from devmap_cli.simulation.shapes import Shapes
from devmap_cli.simulation.tensor import DeviceTensor
from devmap_cli.simulation.workload import Workload
from tests.simulation.tiny_models import TINY_MODELS

LAYERS, HEADS, SIZE = 2, 2, 64
GROUPED = ("int8", "int4", "int2")
BYTES_PER_TOKEN = {  # of keys or values of one layer
    "fp8": 128,
    "int8": 128 + 8,
    "int4": 128 * 4 // 8 + 8,
    "int2": 128 * 2 // 8 + 8,
    AUTO: 256,
}


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128,
        hidden_size=HEADS * SIZE,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=1 << 17,
    )


def empty_model() -> Any:
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config())
    return model.to(torch.bfloat16).eval()


def rehearsed(kv_dtype: str, prompt_tokens: int, max_new_tokens: int, batch_size: int = 1) -> DeviceRehearsal:
    workload = Workload(batch_size, prompt_tokens, max_new_tokens, kv_dtype=kv_dtype)
    rehearsal = rehearse(empty_model(), {"": 0}, workload, [UNLIMITED_BYTES])
    rehearsal.raise_failure()
    (device,) = rehearsal.devices
    return device


@dataclass
class Fed:
    """A cache on a simulated device, and the states that its first layer gave back last."""

    cache: Any
    states: tuple[torch.Tensor, torch.Tensor]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(tensor.shape) for tensor in tensors_of(self.cache)]


def made(kv_dtype: str) -> Any:
    if kv_dtype == AUTO:
        return DynamicCache(config=config())
    options = generation_options(kv_dtype)["cache_config"]
    with quantized_layers():
        return QuantizedCache(config=config(), **options)


def fed(kv_dtype: str, steps: list[int]) -> Fed:
    generator = torch.Generator().manual_seed(0)
    cache, states = made(kv_dtype), None
    for num_tokens in steps:
        for layer in range(LAYERS):
            size = (1, HEADS, num_tokens, SIZE)
            keys, values = (torch.randn(size, generator=generator).bfloat16().to("sim:0") for _ in range(2))
            returned = cache.update(keys, values, layer)
            states = returned if layer == 0 else states
    assert states is not None
    return Fed(cache, states)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_bytes_after_the_prompt_by_hand(kv_dtype: str) -> None:
    # 1,024 tokens, each tensor a whole number of 512 bytes; fp8 has a scale of 4 bytes per tensor, in a block of 512
    scales = 2 * LAYERS * 512 if kv_dtype == "fp8" else 0
    expected = 2 * LAYERS * 1024 * BYTES_PER_TOKEN[kv_dtype] + scales
    assert rehearsed(kv_dtype, 1024, 1).phases["prefill"].kv_cache_bytes == expected


@pytest.mark.parametrize("kv_dtype", GROUPED)
def test_bytes_at_the_end_by_hand(kv_dtype: str) -> None:
    # 1,024 + 193 tokens, the last is never fed: 192 come one by one, 128 of them are quantized and 64 are not yet
    seen = rehearsed(kv_dtype, 1024, 193)
    quantized, plain = 1024 + 128, 64
    expected = 2 * LAYERS * (quantized * BYTES_PER_TOKEN[kv_dtype] + plain * 256)
    assert seen.phases["decode"].kv_cache_bytes == expected


def test_a_batch_has_all_of_it_as_often() -> None:
    one, three = (rehearsed("int4", 1024, 1, batch).phases["prefill"].kv_cache_bytes for batch in (1, 3))
    assert three == 3 * one


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_a_long_prompt_takes_less(kv_dtype: str) -> None:
    plain, quantized = (rehearsed(name, 16384, 64) for name in (AUTO, kv_dtype))
    share = BYTES_PER_TOKEN[kv_dtype] / BYTES_PER_TOKEN[AUTO]
    for phase in ("prefill", "decode"):
        caches = [seen.phases[phase].kv_cache_bytes for seen in (quantized, plain)]
        assert caches[0] / caches[1] == pytest.approx(share, abs=0.02)
    if kv_dtype != "int8":  # which hqq makes in float32, of both layers here more than they save
        assert quantized.allocated_bytes["prefill"] < plain.allocated_bytes["prefill"]


@pytest.mark.parametrize(
    ("num_steps", "kv_dtype"),
    # 260 steps quantize anew twice, in either package's layer
    [*((num_steps, name) for num_steps in (5, 127, 128, 130) for name in QUANTIZED), (260, "int8"), (260, "int4")],
)
def test_grown_at_once_it_is_as_after_as_many_steps(num_steps: int, kv_dtype: str) -> None:
    with simulated_devices([UNLIMITED_BYTES], numbers=Shapes(lambda _: None)):
        stepped = fed(kv_dtype, [40, *[1] * num_steps])
        grown = fed(kv_dtype, [40])
        grow(grown.cache, num_steps)
        assert grown.shapes == stepped.shapes
        assert grown.cache.get_seq_length() == stepped.cache.get_seq_length() == 40 + num_steps


@pytest.mark.parametrize("kv_dtype", GROUPED)
@pytest.mark.parametrize(("num_steps", "requantizes"), [(126, False), (127, True), (128, True), (300, True)])
def test_the_last_step_needs_the_memory_to_quantize_anew(kv_dtype: str, num_steps: int, requantizes: bool) -> None:
    with simulated_devices([UNLIMITED_BYTES], numbers=Shapes(lambda _: None)) as machine:
        grown = fed(kv_dtype, [400])
        grow(grown.cache, num_steps)
        layer: Any = grown.cache.layers[0]
        assert isinstance(grown.cache.layers[0], GroupedLayer)
        assert layer.requantizes == requantizes
        states = torch.zeros(1, HEADS, 1, SIZE, dtype=torch.bfloat16, device="sim:0")
        machine.devices[0].reset_peak()
        before = machine.devices[0].use.allocated_bytes
        keys, _ = layer.update(states, states)
        assert keys.shape[-2] == 400 + num_steps + 1
        # dequantized and in one piece, keys and values are 4 × 256 bytes a token; more is for quantizing them
        needed = machine.devices[0].peak.allocated_bytes - before
        assert (needed > 5 * 256 * keys.shape[-2]) == requantizes
        del keys
        num_plain = (num_steps + 1) % 128
        assert tuple(layer.keys.shape) == ((1, HEADS, num_plain, SIZE) if num_plain else (0,))
        assert layer._quantized_keys.shape[-2] == 400 + num_steps + 1 - num_plain


def test_what_a_step_does_in_passing_is_not_its_work() -> None:
    few, many = (rehearsed("int4", 1024, num_tokens).work["decode"].num_kernels for num_tokens in (64, 193))
    assert many == few - 2 * LAYERS  # the new token is not appended to those that are not quantized yet


@pytest.mark.parametrize(("kv_dtype", "error"), [("fp8", 0.15), ("int8", 0.02), ("int4", 0.3), ("int2", 1.3)])
def test_real_numbers_come_back_nearly_as_they_were(kv_dtype: str, error: float) -> None:
    with simulated_devices([UNLIMITED_BYTES]):
        plain, quantized = fed(AUTO, [64, *[1] * 130]), fed(kv_dtype, [64, *[1] * 130])
        for exact, near in zip(plain.states, quantized.states, strict=True):
            assert isinstance(exact, DeviceTensor)
            assert isinstance(near, DeviceTensor)
            furthest = (exact.numbers - near.numbers).abs().max().item()
            assert 0 < furthest < error * exact.numbers.abs().max().item()


@pytest.mark.parametrize("kv_dtype", GROUPED)
def test_tokens_that_are_not_quantized_yet_need_no_whole_group(kv_dtype: str) -> None:
    with torch.device("meta"):
        model: Any = TINY_MODELS["llama"].build().eval()  # 2 heads of 16: two tokens are a group
    for num_tokens in (24, 200, 201):
        workload = Workload(1, 32, num_tokens, kv_dtype=kv_dtype)
        rehearse(model, {"": 0}, workload, [UNLIMITED_BYTES]).raise_failure()


def test_groups_that_do_not_divide_are_refused() -> None:
    states = torch.zeros(1, 1, 3, 16, device="cpu")
    layer = made("int4").layers[0]
    with pytest.raises(ValueError, match=r"Group size \(64\) must be a divisor of \(48\)"):
        layer.update(states, states)


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_a_replay_is_what_a_rehearsal_is(kv_dtype: str) -> None:
    model, workload = empty_model(), Workload(2, 300, 200, kv_dtype=kv_dtype)
    blocks = [["model.embed_tokens"], ["model.layers.0"], ["model.layers.1"], ["model.norm"], ["model.rotary_emb"]]
    blocks += [["lm_head"]]
    trace = record(model, blocks, workload).trace
    places = [0, 0, 1, 1, 0, 1]
    device_map: dict[str, int | str] = {name: place for (name,), place in zip(blocks, places, strict=True)}
    expected = rehearse(model, device_map, workload, [UNLIMITED_BYTES] * 2)
    expected.raise_failure()
    found = replay(trace, [Seat(place) for place in places], [UNLIMITED_BYTES] * 2, min(places))
    for played, seen in zip(found.devices, expected.devices, strict=True):
        for phase, memory in seen.phases.items():
            assert played.phases[phase].kv_cache_bytes == memory.kv_cache_bytes
            assert played.phases[phase].reserved_bytes == pytest.approx(memory.reserved_bytes, rel=1e-4)
            assert played.allocated_bytes[phase] == pytest.approx(seen.allocated_bytes[phase], rel=1e-4, abs=8192)


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2_5_vl"])
def test_models_of_full_attention_have_one(name: str, kv_dtype: str) -> None:
    tiny = TINY_MODELS[name]
    with torch.device("meta"):
        model: Any = tiny.build().eval()
    check_kv_dtype_for("it", type(model), model.config, kv_dtype)
    rehearsal = rehearse(model, {"": 0}, Workload(1, 24, 4, kv_dtype=kv_dtype), [UNLIMITED_BYTES])
    rehearsal.raise_failure()


@pytest.mark.parametrize("name", ["t5", "gemma3"])
def test_others_are_refused(name: str) -> None:
    with torch.device("meta"):
        model = TINY_MODELS[name].build()
    check_kv_dtype_for("it", type(model), model.config, AUTO)
    with pytest.raises(RequestError, match="it cannot keep its KV cache in int4") as caught:
        check_kv_dtype_for("it", type(model), model.config, "int4")
    assert caught.value.hint == "--kv-dtype auto"


def test_a_sliding_window_is_named() -> None:
    with pytest.raises(RequestError, match="it has sliding_attention layers"):
        check_kv_dtype_for("it", MistralForCausalLM, MistralConfig(sliding_window=32), "fp8")
