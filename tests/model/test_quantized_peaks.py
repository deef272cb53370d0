"""Quantized models against what others measured and stored; skipped without the collection of both."""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from devmap_cli.errors import DevmapError
from devmap_cli.model.empty import build_quantized
from devmap_cli.model.quantization.scheme import modelopt_text, quantization_of
from devmap_cli.model.quiet import quiet_libraries
from devmap_cli.model.reference import resolve
from devmap_cli.simulation.memory import UNLIMITED_BYTES
from devmap_cli.simulation.rehearsal import rehearse
from devmap_cli.simulation.workload import Workload
from tests.support.toys import write_config

SHARED = Path(__file__).parents[3] / "shared"
CONFIGS = SHARED / "corpus" / "configs"
MEASURED = SHARED / "cases" / "measured_memory.tsv"
GIB = 2**30
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def gptq_rows() -> list[Any]:
    """The measured runs; those of the largest model are slow."""
    if not MEASURED.is_file():
        return []
    with MEASURED.open() as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row["quant"] == "GPTQ-Int4"]
    return [
        pytest.param(
            row,
            id=f"{row['model']}-{row['context']}",
            marks=[pytest.mark.slow] if "32B" in row["model"] else [],
        )
        for row in rows
    ]


@cache
def gptq_model(name: str, folder: Path) -> Any:
    config = json.loads((CONFIGS / f"Qwen__{name.removesuffix('-Instruct')}" / "config.json").read_text())
    config.pop("torch_dtype", None)
    return build(write_config(folder, {**config, "dtype": "float16", "quantization_config": GPTQ}))


def build(folder: Path) -> Any:
    with quiet_libraries():
        reference = resolve(str(folder))
        quantization = quantization_of(reference.config, modelopt_text(folder), None, (9, 0))
        return build_quantized(reference, None, quantization, trust_remote_code=False).model


@pytest.mark.skipif(not gptq_rows(), reason=f"no measured figures at {MEASURED}")
@pytest.mark.parametrize("row", gptq_rows())
def test_measured_gptq_peaks(row: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    model = gptq_model(row["model"], tmp_path_factory.getbasetemp() / row["model"])
    workload = Workload(prompt_tokens=int(row["context"]), max_new_tokens=int(row["new_tokens"]))
    with quiet_libraries():
        device = rehearse(model, {"": 0}, workload, [UNLIMITED_BYTES]).devices[0]
    measured = float(row["measured"])
    predicted = max(device.allocated_bytes.values()) / GIB
    assert abs(predicted - measured) <= max(0.04 * measured, 0.05)


def stored() -> list[Path]:
    """Quantized models whose index says how large their weights are."""
    found = []
    for index in sorted(CONFIGS.glob("*/model.safetensors.index.json")):
        config = (
            json.loads((index.parent / "config.json").read_text()) if (index.parent / "config.json").exists() else {}
        )
        if config.get("quantization_config") and not config.get("auto_map"):
            found.append(index.parent)
    return found


@pytest.mark.skipif(not stored(), reason=f"no collection of configs at {CONFIGS}")
@pytest.mark.parametrize("folder", stored(), ids=lambda folder: folder.name)
def test_stored_bytes(folder: Path) -> None:
    model = build(folder)
    size = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    counted = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    assert counted == pytest.approx(size, rel=0.01)


# Experts in 8 and in 4 bit; all of the collection takes minutes.
SAMPLE = [
    pytest.param("Qwen__Qwen3-30B-A3B-FP8", marks=pytest.mark.slow),
    "nvidia__Qwen3.6-35B-A3B-NVFP4",
]


@pytest.mark.skipif(not CONFIGS.is_dir(), reason=f"no collection of configs at {CONFIGS}")
@pytest.mark.parametrize("name", SAMPLE)
def test_a_rehearsal_gets_through(name: str) -> None:
    try:
        model = build(CONFIGS / name)
    except DevmapError as error:
        pytest.skip(str(error))
    with quiet_libraries():
        rehearsal = rehearse(model, {"": 0}, Workload(prompt_tokens=64, max_new_tokens=2), [UNLIMITED_BYTES])
    assert rehearsal.failure is None
    assert {phase for device in rehearsal.devices for phase in device.phases} >= {"load", "prefill", "decode"}
