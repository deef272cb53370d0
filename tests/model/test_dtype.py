"""The dtype that a model is counted in, and parameters that keep their own."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from devmap_cli.model.checkpoint import first_float_dtype, read_header
from devmap_cli.model.load import load_spec
from devmap_cli.model.sizes import Sizes
from tests.support.toys import TOYS

MakeToy = Callable[..., Path]


def write_header(path: Path, *tensors: tuple[str, str]) -> None:
    """A safetensors file of empty tensors: 8 bytes of length, a JSON header, no data."""
    header = {name: {"dtype": dtype, "shape": [0], "data_offsets": [0, 0]} for name, dtype in tensors}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def test_what_is_asked_for_wins(toy: MakeToy) -> None:
    folder = toy("qwen2", dtype="bfloat16")
    write_header(folder / "model.safetensors", ("w", "F16"))
    spec = load_spec(str(folder), dtype="float32")
    assert spec.dtype == "float32"
    assert Sizes.of(spec).total.parameter_bytes == 4 * TOYS["qwen2"].num_parameters


def test_then_what_the_config_states(toy: MakeToy) -> None:
    folder = toy("qwen2", dtype="bfloat16")
    write_header(folder / "model.safetensors", ("w", "F16"))
    spec = load_spec(str(folder))
    assert (spec.dtype, spec.notes) == ("bfloat16", ())


def test_the_older_spelling_counts_too(toy: MakeToy) -> None:
    assert load_spec(str(toy("qwen2", dtype=None, torch_dtype="float16"))).dtype == "float16"


def test_the_text_part_of_a_config_may_state_it(toy: MakeToy) -> None:
    text_config = {**TOYS["qwen2_5_vl"].config["text_config"], "dtype": "float16"}
    assert load_spec(str(toy("qwen2_5_vl", dtype=None, text_config=text_config))).dtype == "float16"


def test_then_that_of_the_weights(toy: MakeToy) -> None:
    folder = toy("qwen2", dtype=None)
    write_header(folder / "model-00001-of-00002.safetensors", ("ids", "I64"), ("w", "F16"))
    write_header(folder / "model-00002-of-00002.safetensors", ("w", "BF16"))
    spec = load_spec(str(folder))
    assert (spec.dtype, spec.notes) == ("float16", ())


@pytest.mark.parametrize(
    ("bytes_each", "dtype", "told"), [(2, "bfloat16", "2 bytes for each parameter"), (4, "float32", "states no dtype")]
)
def test_then_what_their_index_lets_suppose(toy: MakeToy, bytes_each: int, dtype: str, told: str) -> None:
    folder = toy("qwen2", dtype=None)
    metadata = {"total_size": bytes_each * TOYS["qwen2"].num_parameters}
    index = {"metadata": metadata, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    spec = load_spec(str(folder))
    assert spec.dtype == dtype
    assert told in spec.notes[0]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"metadata": {"total_size": "much"}}', '{"metadata": null}'])
def test_a_damaged_index_says_nothing(toy: MakeToy, text: str) -> None:
    folder = toy("qwen2", dtype=None)
    (folder / "model.safetensors.index.json").write_text(text)
    assert load_spec(str(folder)).dtype == "float32"


def test_else_float32_with_a_note(toy: MakeToy) -> None:
    spec = load_spec(str(toy("qwen2", dtype=None)))
    assert spec.dtype == "float32"
    assert len(spec.notes) == 1
    assert "states no dtype" in spec.notes[0]


def test_a_quantized_model_is_not_counted_in_float32(toy: MakeToy) -> None:
    spec = load_spec(str(toy("qwen2", dtype=None, quantization_config={"quant_method": "fp8"})))
    assert spec.dtype == "bfloat16"
    assert any("states no dtype" in note for note in spec.notes)


def test_new_weights_change_a_remembered_description(toy: MakeToy) -> None:
    folder = toy("qwen2", dtype=None)
    assert load_spec(str(folder)).dtype == "float32"
    write_header(folder / "model.safetensors", ("w", "BF16"))
    assert load_spec(str(folder)).dtype == "bfloat16"


def test_some_parameters_stay_in_float32(toy: MakeToy) -> None:
    kept = {name: tensor.num_bytes for name, tensor in load_spec(str(toy("t5"))).tensors() if tensor.dtype == "float32"}
    # `wo` of each block: 64 x 96 of 4 bytes
    assert kept == {
        f"{stack}.block.{block}.layer.{layer}.DenseReluDense.wo.weight": 64 * 96 * 4
        for stack, layer in (("encoder", 1), ("decoder", 2))
        for block in (0, 1)
    }


def test_in_float32_all_parameters_are(toy: MakeToy) -> None:
    spec = load_spec(str(toy("t5")), dtype="float32")
    assert {tensor.dtype for _, tensor in spec.tensors()} == {"float32"}
    assert Sizes.of(spec).total.parameter_bytes == 4 * TOYS["t5"].num_parameters


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        struct.pack("<Q", 10) + b"{}",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 9) + b'{"w": 17}',
        b"version https://git-lfs.github.com/spec/v1\n",
    ],
    ids=["empty", "short", "cut", "huge", "binary", "list", "no-entry", "lfs-pointer"],
)
def test_a_damaged_weight_file_says_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert first_float_dtype(tmp_path) is None


def test_a_header_is_read_without_the_data(tmp_path: Path) -> None:
    write_header(tmp_path / "a.safetensors", ("w", "BF16"))
    header = read_header(tmp_path / "a.safetensors")
    assert header is not None
    assert header["w"]["dtype"] == "BF16"
    assert first_float_dtype(tmp_path) == "bfloat16"


def test_no_weights_say_nothing(tmp_path: Path) -> None:
    assert first_float_dtype(tmp_path) is None
