"""Weights that are missing, damaged or of another model: one clear line each, before or while loading."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devmap_cli.devices.device import CPU, Device
from devmap_cli.errors import DevmapError, RequestError, SurroundingsError
from devmap_cli.mapfile import MapModel
from devmap_cli.running.failures import Phase, explain
from devmap_cli.running.placing import on_this_machine, transformers_map
from devmap_cli.running.request import RunRequest
from devmap_cli.running.run import run_map
from tests.running.conftest import build, save_tokenizer, spec_of, spread

REQUEST = RunRequest("hello", max_new_tokens=2)
WEIGHTS = "model.safetensors"


def failure(folder: Path, kind: type[DevmapError] = RequestError) -> DevmapError:
    spec = spec_of(folder)
    with pytest.raises(kind) as caught:
        run_map(spread(spec, "cpu", "disk"), spec, REQUEST)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    build("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    save_tokenizer(tmp_path)
    return tmp_path


def test_no_weights(broken: Path) -> None:
    (broken / WEIGHTS).unlink()
    assert "has no weights" in failure(broken).message


def test_weights_only_as_pickles_are_never_loaded(broken: Path) -> None:
    (broken / WEIGHTS).unlink()
    (broken / "pytorch_model.bin").write_bytes(b"anything")
    error = failure(broken)
    assert "only as pickle files" in error.message
    assert "safetensors" in (error.hint or "")


@pytest.mark.parametrize("kept", [0, 4, 1000, -1])
def test_a_truncated_file_is_named(broken: Path, kept: int) -> None:
    path = broken / WEIGHTS
    path.write_bytes(path.read_bytes()[:kept])
    assert f"{path} is damaged or cut off" in failure(broken).message


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    last = sorted(sharded.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-8])
    assert f"{last} is damaged or cut off" in failure(sharded).message


def test_missing_shards_are_counted_and_named(sharded: Path) -> None:
    shards = sorted(sharded.glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    assert failure(sharded).message == f"1 of {len(shards)} weight files are missing, the first is {shards[1]}"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index(sharded: Path, text: str) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text(text)
    assert str(index) in failure(sharded).message


def test_weights_that_lack_parameters(broken: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(broken / WEIGHTS)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, broken / WEIGHTS, metadata={"format": "pt"})
    assert "lack 1 parameters of LlamaForCausalLM" in failure(broken).message
    assert "model.layers.2.mlp.up_proj.weight" in failure(broken).message


def test_weights_of_other_sizes(broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    assert "cannot be loaded" in failure(broken).message


def test_no_tokenizer(broken: Path) -> None:
    for path in broken.glob("*token*"):
        path.unlink()
    assert "has no tokenizer" in failure(broken).message


def test_a_damaged_tokenizer(broken: Path) -> None:
    (broken / "tokenizer.json").write_text("{")
    assert "has no tokenizer" in failure(broken).message


def test_an_unknown_attention(models: dict[str, Path]) -> None:
    spec = spec_of(models["llama"])
    with pytest.raises(RequestError, match="cannot be loaded"):
        run_map(spread(spec, "cpu"), spec, replace(REQUEST, attention="magic"))


@pytest.mark.parametrize(
    ("quantization", "kind", "told"),
    [
        ({"scheme": "nf4"}, SurroundingsError, "need bitsandbytes"),
        ({"scheme": "int8"}, SurroundingsError, "need bitsandbytes"),
        ({"scheme": "int3"}, RequestError, "'int3' is unknown"),
    ],
)
def test_quantization_without_its_package(
    models: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    quantization: dict[str, str],
    kind: type[DevmapError],
    told: str,
) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else real(name, *rest)
    )
    spec = spec_of(models["llama"])
    model = MapModel(spec.model_id, None, spec.class_name, spec.dtype, quantization)
    with pytest.raises(kind, match=told):
        run_map(replace(spread(spec, "cpu"), model=model), spec, REQUEST)


def test_a_full_disk_while_offloading(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.integrations.accelerate as integration

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(integration, "accelerate_dispatch", full)
    monkeypatch.setattr("transformers.modeling_utils.accelerate_dispatch", full)
    error = failure(models["llama"], SurroundingsError)
    assert error.message == "the disk is full while loading the weights"


class TestExplain:
    """Failures of devices and packages that are not here, by the words of those who raise them."""

    @pytest.mark.parametrize(
        ("raised", "phase", "told"),
        [
            (
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.64 GiB",
                "prefill",
                "GPU 1 ran out of memory while reading the prompt (prefill)",
            ),
            (
                "MPS backend out of memory (MPS allocated: 17 GB)",
                "decode",
                "mps ran out of memory while generating (decode)",
            ),
            ("NPU out of memory. npu:3 has 60 GiB", "load", "npu:3 ran out of memory while loading the weights"),
            (
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
                "load",
                "cpu ran out of memory while loading the weights",
            ),
            ("CUDA error: out of memory", "load", "a device ran out of memory while loading the weights"),
        ],
    )
    def test_out_of_memory(self, raised: str, phase: Phase, told: str) -> None:
        found = explain(RuntimeError(raised), phase, "org/model")
        assert found is not None
        assert (found.exit_code, found.message) == (4, told)

    def test_a_missing_package_can_be_installed(self) -> None:
        found = explain(ImportError("FlashAttention2: the package flash_attn seems to be not installed"), "load", "m")
        assert found is not None
        assert (found.exit_code, found.hint) == (3, "pip install flash-attn")

    def test_the_hub_out_of_reach(self) -> None:
        from huggingface_hub.errors import LocalEntryNotFoundError

        wrapped = OSError("We couldn't connect to 'https://huggingface.co'")
        wrapped.__cause__ = LocalEntryNotFoundError("no connection")
        found = explain(wrapped, "load", "org/model")
        assert found is not None
        assert found.exit_code == 3

    @pytest.mark.parametrize("error", [RuntimeError("Expected all tensors to be on the same device"), TypeError("x")])
    def test_what_only_a_bug_raises_passes(self, error: Exception) -> None:
        assert explain(error, "decode", "m") is None


@pytest.mark.parametrize(
    ("device", "kind", "here", "value"),
    [
        ("0", "cuda", "cuda:0", 0),
        ("1", "xpu", "xpu:1", 1),
        ("1", "npu", "npu:1", "npu:1"),
        ("0", "mps", "mps", "mps"),
        ("npu:2", "npu", "npu:2", "npu:2"),
        ("cpu", "cuda", "cpu", "cpu"),
        ("disk", None, "disk", "disk"),
    ],
)
def test_numbers_mean_the_machines_own_accelerators(device: str, kind: str | None, here: str, value: Any) -> None:
    found = on_this_machine(Device.parse(device), kind)
    assert str(found) == here
    assert transformers_map({"lm_head": found, "x": CPU}) == {"lm_head": value, "x": "cpu"}
