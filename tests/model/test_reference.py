"""What MODEL may be, and what is said where it is nothing of the kind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from devmap_cli.errors import DevmapError, RequestError
from devmap_cli.model.load import load_spec
from devmap_cli.model.reference import resolve
from tests.support.toys import TOYS, write_config

MakeToy = Callable[..., Path]


def refusal(call: Callable[[], object]) -> DevmapError:
    with pytest.raises(DevmapError) as caught:
        call()
    assert "\n" not in caught.value.message
    return caught.value


def test_a_folder_with_a_config(toy: MakeToy) -> None:
    folder = toy("qwen2")
    reference = resolve(str(folder))
    assert (reference.location, reference.folder, reference.revision) == (str(folder), folder, None)
    assert reference.config["model_type"] == "qwen2"
    assert reference.is_local
    assert not reference.has_remote_code


def test_a_folder_may_be_named_from_home_or_from_here(toy: MakeToy, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = toy("qwen2")
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.chdir(folder.parent)
    assert resolve("~/qwen2").folder == folder
    assert resolve("./qwen2").config == resolve("qwen2").config


@pytest.mark.parametrize("name", ["./missing", "/no/such/folder", "a/b/c", "..", "", "-x", "a b", "org/", "modèle"])
def test_neither_a_folder_nor_a_hub_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    error = refusal(lambda: resolve(name))
    assert error.exit_code == 2
    assert error.hint


def test_a_file_instead_of_its_folder(toy: MakeToy) -> None:
    folder = toy("qwen2")
    error = refusal(lambda: resolve(str(folder / "config.json")))
    assert error.exit_code == 2
    assert "is a file" in error.message
    assert error.hint == f"give its folder: {folder}"


def test_some_other_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    error = refusal(lambda: resolve(str(tmp_path / "model.gguf")))
    assert error.exit_code == 2
    assert "is a file" in error.message


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    error = refusal(lambda: resolve(str(tmp_path)))
    assert isinstance(error, RequestError)
    assert error.message == f"{tmp_path} has no config.json"
    assert error.hint


def test_a_config_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    error = refusal(lambda: resolve(str(tmp_path)))
    assert isinstance(error, RequestError)
    assert "is no regular file" in error.message


def test_a_config_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    error = refusal(lambda: resolve(str(tmp_path)))
    assert (error.exit_code, error.message) == (2, f"{tmp_path / 'config.json'} is no regular file")


def test_an_empty_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(lambda: resolve("")).message == "MODEL is empty"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"hidden_size": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ('{"num_hidden_layers": 10001}', "num_hidden_layers in"),
        ('{"vision_config": {"depth": 10001}}', "vision_config.depth in"),
        ('{"num_local_experts": 1000000}', "num_local_experts in"),
        ('{"dtype": "complex"}', "'complex', which is no floating-point dtype"),
        ('{"text_config": {"torch_dtype": 16}}', "text_config.torch_dtype in"),
    ],
    ids=["digits", "layers", "depth", "experts", "dtype", "part"],
)
def test_fields_that_no_model_has(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "config.json").write_text(content)
    error = refusal(lambda: resolve(str(tmp_path)))
    assert error.exit_code == 2
    assert said in error.message
    assert error.hint


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "nope"}, "hidden_act is 'nope', which transformers does not know"),
        ({"num_attention_heads": 0}, "num_attention_heads in config.json must be above 0"),
        ({"vocab_size": -5}, "vocab_size in config.json must be above 0"),
        ({"hidden_size": "x"}, "expected int, got str (value: 'x')"),
    ],
)
def test_a_field_that_the_class_refuses_is_named(toy: Callable[..., Path], changes: dict[str, Any], said: str) -> None:
    error = refusal(lambda: load_spec(str(toy("qwen2", **changes))))
    assert error.exit_code == 2
    assert said in error.message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no JSON: Expecting value at line 1 column 1"),
        (b'{"model_type": "qwen2",\n', "is no JSON: "),
        (b"{'model_type': 'qwen2'}", "line 1 column 2"),
        (b"[1, 2]", "is no JSON object"),
        (b'"qwen2"', "is no JSON object"),
        (b"null", "is no JSON object"),
        (b"\x80\x81\xff\xfe", "is no text file"),
        (b"[" * 100_000, "is no JSON"),
        (b"\xef\xbb\xbf{}", "is no JSON"),  # transformers does not read it either
    ],
    ids=["empty", "cut", "quotes", "list", "text", "null", "binary", "deep", "byte-order-mark"],
)
def test_a_config_that_is_no_json_object(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    error = refusal(lambda: resolve(str(tmp_path)))
    assert error.exit_code == 2
    assert str(tmp_path / "config.json") in error.message
    assert said in error.message


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "no_such_model"}, "does not know the architecture"),
        ({"model_type": "no_such_model", "architectures": ["NoSuchForCausalLM"]}, "no_such_model"),
        ({"architectures": ["NoSuchForCausalLM"]}, "NoSuchForCausalLM"),
        ({}, "names neither model_type nor architectures"),
        ({"peft_type": "LORA", "r": 8}, "names neither model_type nor architectures"),
        ({"model_type": None, "architectures": []}, "names neither model_type nor architectures"),
        ({"model_type": ["qwen2"]}, "model_type"),
        ({"model_type": {"a": 1}}, "model_type"),
        ({"architectures": "Qwen2ForCausalLM"}, "architectures"),
        ({"architectures": [7]}, "architectures"),
        ({**TOYS["qwen2"].config, "architectures": 7}, "architectures"),
        ({**TOYS["qwen2"].config, "quantization_config": "int4"}, "not valid for qwen2"),
        ({**TOYS["qwen2"].config, "hidden_size": "many"}, "not valid for qwen2"),
        ({**TOYS["qwen2"].config, "hidden_size": -64}, "cannot be built"),
        ({**TOYS["qwen2"].config, "hidden_act": "no_such_function"}, "no_such_function"),
        ({**TOYS["qwen2"].config, "num_hidden_layers": None}, "qwen2"),
        ({**TOYS["qwen2"].config, "layer_types": ["full_attention"]}, "qwen2"),
        ({**TOYS["qwen2"].config, "dtype": "int3"}, "dtype"),
        ({**TOYS["qwen2"].config, "dtype": "int64"}, "dtype"),
        ({**TOYS["qwen2_5_vl"].config, "text_config": "none"}, "qwen2_5_vl"),
    ],
)
def test_a_config_that_makes_no_model(tmp_path: Path, config: dict[str, object], said: str) -> None:
    write_config(tmp_path, config)
    error = refusal(lambda: load_spec(str(tmp_path)))
    assert error.exit_code == 2
    assert said in error.message
    assert error.hint


def test_a_class_under_another_name_is_noted(toy: MakeToy) -> None:
    spec = load_spec(str(toy("qwen2", architectures=["OtherForCausalLM"])))
    assert spec.class_name == "Qwen2ForCausalLM"
    assert spec.notes == ("config.json names OtherForCausalLM, and transformers loads it as Qwen2ForCausalLM",)


@pytest.mark.parametrize("name", ["qwen2", "t5", "qwen2_5_vl", "whisper"])
def test_without_architectures_the_model_type_decides(toy: MakeToy, name: str) -> None:
    spec = load_spec(str(toy(name, architectures=None)))
    assert (spec.class_name, spec.notes) == (TOYS[name].class_name, ())


def test_a_quantized_checkpoint_says_so(toy: MakeToy) -> None:
    spec = load_spec(str(toy("qwen2", quantization_config={"quant_method": "fp8"})))
    assert spec.quantization == {"quant_method": "fp8"}
    assert any("quantized (fp8)" in note for note in spec.notes)
