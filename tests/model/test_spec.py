"""Toy models of many kinds, described and compared with sizes computed by hand (see tests/support/toys.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from devmap_cli.model.load import load_spec
from devmap_cli.model.sizes import Sizes, bytes_by_dtype, kv_bytes
from devmap_cli.model.spec import KvCacheSpec, ModelSpec
from tests.support.toys import TOYS

MakeToy = Callable[..., Path]


def describe(folder: Path, dtype: str | None = None) -> ModelSpec:
    return load_spec(str(folder), dtype=dtype)


@pytest.mark.parametrize("name", TOYS)
def test_sizes_are_those_computed_by_hand(toy: MakeToy, name: str) -> None:
    expected, spec = TOYS[name], describe(toy(name))
    total = Sizes.of(spec).total
    assert spec.class_name == expected.class_name
    assert total.num_parameters == expected.num_parameters
    assert total.parameter_bytes == expected.parameter_bytes
    assert total.buffer_bytes == expected.buffer_bytes
    assert total.num_bytes == expected.parameter_bytes + expected.buffer_bytes


@pytest.mark.parametrize("name", TOYS)
def test_ties_and_what_may_not_be_split(toy: MakeToy, name: str) -> None:
    expected, spec = TOYS[name], describe(toy(name))
    assert spec.ties == expected.ties
    assert {module.class_name for _, module in spec.modules() if module.no_split} == expected.no_split


@pytest.mark.parametrize("name", TOYS)
def test_cache_is_that_computed_by_hand(toy: MakeToy, name: str) -> None:
    expected, spec = TOYS[name], describe(toy(name))
    assert spec.kv_cache is not None, spec.notes
    per_token = sum(layer.bytes_per_token for layer in spec.kv_cache)
    fixed = sum(layer.fixed_bytes for layer in spec.kv_cache)
    assert (per_token, fixed) == expected.kv_bytes


@pytest.mark.parametrize("name", TOYS)
def test_the_cache_is_charged_to_layers_that_hold_weights(toy: MakeToy, name: str) -> None:
    spec = describe(toy(name))
    no_split = {fqn for fqn, module in spec.modules() if module.no_split}
    assert {layer.fqn for layer in spec.kv_cache or ()} <= no_split


@pytest.mark.parametrize("name", TOYS)
def test_dtypes_add_up_and_ties_count_once(toy: MakeToy, name: str) -> None:
    spec = describe(toy(name))
    total = Sizes.of(spec).total
    assert sum(bytes_by_dtype(spec).values()) == total.num_bytes
    tied = sum(tensor.num_bytes for key, tensor in spec.tensors() if key in spec.tied_to_another())
    assert sum(tensor.num_bytes for _, tensor in spec.tensors()) == total.num_bytes + tied
    assert (tied > 0) == bool(spec.ties)


@pytest.mark.parametrize("name", TOYS)
def test_children_add_up_to_their_parents(toy: MakeToy, name: str) -> None:
    spec = describe(toy(name))
    sizes, tied = Sizes.of(spec), spec.tied_to_another()
    for fqn, module in spec.modules():
        children = sum(sizes[f"{fqn}.{child.name}".lstrip(".")].num_bytes for child in module.children)
        own = sum(t.num_bytes for t in module.tensors if f"{fqn}.{t.name}".lstrip(".") not in tied)
        assert sizes[fqn].num_bytes == children + own


def positions(spec: ModelSpec, *names: str) -> list[int]:
    return [spec.execution_order.index(name) for name in names]


def test_decoders_run_from_embedding_to_head(toy: MakeToy) -> None:
    spec = describe(toy("qwen2"))
    layers = [f"model.layers.{index}" for index in range(4)]
    found = positions(spec, "model.embed_tokens", "model.rotary_emb", *layers, "model.norm", "lm_head")
    assert found == sorted(found)


def test_the_order_is_that_of_execution_where_the_definition_has_another(toy: MakeToy) -> None:
    spec = describe(toy("opt"))
    decoder = dict(spec.modules())["model.decoder"]
    defined = [child.name for child in decoder.children]
    assert defined.index("project_out") < defined.index("layers")
    assert defined.index("final_layer_norm") < defined.index("layers")
    found = positions(
        spec,
        "model.decoder.embed_tokens",
        "model.decoder.embed_positions",
        "model.decoder.project_in",
        "model.decoder.layers.0",
        "model.decoder.layers.1",
        "model.decoder.final_layer_norm",
        "model.decoder.project_out",
        "lm_head",
    )
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [("t5", "encoder.block.1", "decoder.block.0"), ("whisper", "model.encoder.layers.1", "model.decoder.layers.0")],
)
def test_the_encoder_runs_before_the_decoder(toy: MakeToy, name: str, first: str, then: str) -> None:
    spec = describe(toy(name))
    assert spec.execution_order.index(first) < spec.execution_order.index(then)


def test_what_modules_hand_on(toy: MakeToy) -> None:
    spec = describe(toy("qwen2"))
    # a row of h = 64 in bfloat16, and of the vocabulary of 128
    assert spec.output_bytes_per_token["model.embed_tokens"] == 128
    assert spec.output_bytes_per_token["model.layers.2"] == 128
    assert spec.output_bytes_per_token["lm_head"] == 256


def test_buffers(toy: MakeToy) -> None:
    buffers = {
        name: (tensor.dtype, tensor.num_bytes) for name, tensor in describe(toy("bert")).tensors() if tensor.is_buffer
    }
    assert buffers == {
        "bert.embeddings.position_ids": ("int64", 256),
        "bert.embeddings.token_type_ids": ("int64", 256),
    }


def test_sliding_windows_limit_the_cache(toy: MakeToy) -> None:
    spec = describe(toy("gemma3"))
    # three layers keep 7 tokens, the fourth all, 128 bytes each
    assert [layer.max_tokens for layer in spec.kv_cache or ()] == [7, 7, 7, None]
    assert kv_bytes(spec, 5) == 4 * 5 * 128
    assert kv_bytes(spec, 100) == 3 * 7 * 128 + 100 * 128


def test_a_wide_window_is_measured_too(toy: MakeToy) -> None:
    spec = describe(toy("gemma3", sliding_window=64))
    assert [(layer.bytes_per_token, layer.max_tokens) for layer in spec.kv_cache or ()][:1] == [(128, 63)]


def test_linear_attention_keeps_the_same_at_any_length(toy: MakeToy) -> None:
    spec = describe(toy("qwen3_next"))
    assert spec.kv_cache == (
        KvCacheSpec("model.layers.0", 0, 5120),
        KvCacheSpec("model.layers.1", 0, 5120),
        KvCacheSpec("model.layers.2", 0, 5120),
        KvCacheSpec("model.layers.3", 128),
    )
    assert kv_bytes(spec, 10, batch_size=2) == 2 * (3 * 5120 + 10 * 128)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_experts_are_probed_in_every_dtype(toy: MakeToy, dtype: str) -> None:
    spec = describe(toy("mixtral"), dtype)
    size = {"float32": 4, "float16": 2}[dtype]
    assert spec.notes == ()
    assert sum(layer.bytes_per_token for layer in spec.kv_cache or ()) == 4 * 2 * 2 * 16 * size
    assert spec.execution_order.index("model.layers.3") < spec.execution_order.index("lm_head")


def test_models_that_generate_nothing_keep_no_cache(toy: MakeToy) -> None:
    assert describe(toy("bert")).kv_cache == ()
