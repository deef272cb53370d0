"""`devmap run --kv-dtype`: generate gets it, and what is missing for it is said before weights are loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from devmap_cli.devices.device import CPU, Device
from devmap_cli.errors import RequestError, SurroundingsError
from devmap_cli.mapfile import MapFile, MapModel, MapWorkload
from devmap_cli.running import kv_cache
from devmap_cli.running.generating import generate
from devmap_cli.running.kv_cache import check_kv_backend
from devmap_cli.running.request import RunRequest
from devmap_cli.running.run import run_map
from tests.running.conftest import spec_of, spread

REQUEST = RunRequest("hello world!", raw=True, max_new_tokens=6)  # 12 tokens, of 2 heads of 8: three groups of 64
GPU_0 = Device.parse("0")


def map_of(folder: Path, kv_dtype: str) -> MapFile:
    spec = spec_of(folder)
    model = MapModel(spec.model_id, None, spec.class_name, spec.dtype)
    return MapFile({"": CPU}, model, "balanced", MapWorkload(kv_dtype=kv_dtype))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `generate` was asked to keep the cache in."""
    asked = []

    def generating(*args: Any, **options: Any) -> Any:
        asked.append(options["kv_dtype"])
        return generate(*args, **options)

    monkeypatch.setattr("devmap_cli.running.run.generate", generating)
    return asked


@pytest.mark.parametrize(
    ("planned", "asked", "expected"),
    [("auto", None, "auto"), ("fp8", None, "fp8"), ("fp8", "auto", "auto"), ("auto", "fp8", "fp8")],
)
def test_the_requests_comes_before_the_maps(
    models: dict[str, Path], seen: list[str], planned: str, asked: str | None, expected: str
) -> None:
    spec = spec_of(models["llama"])
    report = run_map(map_of(models["llama"], planned), spec, replace(REQUEST, kv_dtype=asked))
    assert seen == [expected]
    assert report.generation.num_new_tokens == 6


def test_the_cache_is_quantized(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.cache_utils import Fp8QuantizedLayer

    quantized: list[torch.Tensor] = []
    own: Any = Fp8QuantizedLayer._quantize

    def quantize(layer: Any, tensor: torch.Tensor, **options: Any) -> Any:
        quantized.append(tensor)
        return own(layer, tensor, **options)

    monkeypatch.setattr(Fp8QuantizedLayer, "_quantize", quantize)
    spec = spec_of(models["llama"])
    run_map(spread(spec, "cpu"), spec, replace(REQUEST, kv_dtype="fp8"))
    assert len(quantized) == 3 * 2 * 6  # layers, keys and values, steps


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8", "int4", "int2"])
def test_simulated_gpus_need_no_package(models: dict[str, Path], kv_dtype: str) -> None:
    spec = spec_of(models["llama"])
    request = replace(REQUEST, kv_dtype=kv_dtype)
    report = run_map(spread(spec, "0", "1"), spec, request, simulate=True)
    assert report.generation.num_new_tokens == 6


@pytest.mark.parametrize(
    ("kv_dtype", "package"), [("int8", "hqq"), ("int4", "optimum-quanto"), ("int2", "optimum-quanto")]
)
def test_a_missing_package(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kv_dtype: str, package: str
) -> None:
    monkeypatch.setattr(kv_cache, "_is_here", lambda _: False)
    with pytest.raises(SurroundingsError, match=f"needs the package {package}") as caught:
        run_map(map_of(models["llama"], kv_dtype), spec_of(models["llama"]), REQUEST)
    assert caught.value.hint == f"pip install --upgrade {package}"


def test_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "_is_here", lambda _: True)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    with pytest.raises(SurroundingsError, match="nvcc"):
        check_kv_backend("int4", [Device("cuda", 0)])
    check_kv_backend("int4", [CPU])
    check_kv_backend("int8", [Device("cuda", 0)])
    check_kv_backend("fp8", [Device("cuda", 0)])


def test_a_model_that_cannot_have_it(models: dict[str, Path]) -> None:
    spec = spec_of(models["t5"])
    with pytest.raises(RequestError, match="cannot keep its KV cache in fp8") as caught:
        run_map(spread(spec, "cpu"), spec, replace(REQUEST, kv_dtype="fp8"))
    assert caught.value.hint == "--kv-dtype auto"


def test_a_prompt_that_groups_do_not_divide(models: dict[str, Path]) -> None:
    spec = spec_of(models["llama"])
    request = replace(REQUEST, prompt="hello", kv_dtype="int4")
    with pytest.raises(RequestError, match=r"for a prompt of that length: Group size \(64\)"):
        run_map(spread(spec, "0"), spec, request, simulate=True)


def test_a_simulated_run_takes_less(models: dict[str, Path]) -> None:
    spec, request = (
        spec_of(models["llama"]),
        replace(REQUEST, prompt="hello world!" * 8, max_new_tokens=2, batch_size=64),
    )
    plain, small = (
        run_map(spread(spec, "0"), spec, replace(request, kv_dtype=name), simulate=True) for name in ("auto", "int2")
    )
    taken = [report.devices[0].memory.peak_allocated_bytes for report in (small, plain)]
    assert all(peak is not None for peak in taken)
    assert torch.tensor(taken).diff().item() > 0
