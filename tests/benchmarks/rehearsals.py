"""Rehearsals against published measurements, over a corpus of real configs, and against the clock.

`python -m tests.benchmarks.rehearsals`. Each model is rehearsed in a process of its own, so that its memory can be
told; times are those of building the empty model and rehearsing it, without imports. No result fails the run.
"""

from __future__ import annotations

import csv
import json
import resource
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

SHARED = Path(__file__).parents[2].parent / "shared"
CONFIGS = SHARED / "corpus" / "configs"
MEASURED = SHARED / "cases" / "measured_memory.tsv"
TIMED = {
    "Qwen__Qwen2.5-7B": 1.5,
    "Qwen__Qwen2.5-72B": 3.0,
    "Qwen__Qwen3-235B-A22B": 6.0,
    "deepseek-ai__DeepSeek-R1": 10.0,
    "moonshotai__Kimi-K2.5": 10.0,
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
ONE_GPU: dict[str, int | str] = {"": 0}


def main() -> None:
    """Print all three tables; says so where the corpus is not here."""
    if not CONFIGS.is_dir():
        print(f"skipped: {SHARED} is not here")
        return
    console = Console(width=140)
    for table in (published(), timed(), covered()):
        console.print(table)


def published() -> Table:
    """Predicted peaks beside measured ones, GiB."""
    table = Table("model", "quant", "prompt", "measured", "predicted", "error", title="published peaks (GiB)")
    errors: dict[str, list[float]] = defaultdict(list)
    for (model, quant), rows in _measurements().items():
        config = CONFIGS / f"Qwen__{model.removesuffix('-Instruct')}"
        if not config.is_dir():
            table.add_row(model, quant, "", "", "", "no config here")
            continue
        for row, predicted in zip(rows, _in_a_process("peaks", config, quant, rows), strict=True):
            # Qwen's pages measure the peak for 2.5, and what is allocated at the end for 3
            value = predicted["end"] if row["source"] == "q3" else predicted["peak"]
            gib = value / 2**30
            measured = float(row["measured"]) / (1024 if row["unit"] == "MB" else 1)
            error = gib / measured - 1
            errors[f"{quant} {row['source']}"].append(abs(error))
            table.add_row(model, quant, row["context"], f"{measured:.2f}", f"{gib:.2f}", f"{100 * error:+.2f} %")
    for name, values in errors.items():
        table.add_row(name, "", "", "", "median", f"{100 * median(values):.2f} %")
        table.add_row(name, "", "", "", "worst", f"{100 * max(values):.2f} %")
    return table


def timed() -> Table:
    """Seconds and memory of rehearsing models of several sizes."""
    table = Table("model", "seconds", "target", "peak RAM, GiB", title="rehearsals against the clock")
    for name, target in TIMED.items():
        seen = _in_a_process("timed", CONFIGS / name)
        table.add_row(name, f"{seen['seconds']:.2f}", f"{target}", f"{seen['ram_bytes'] / 2**30:.2f}")
    return table


def covered() -> Table:
    """How many natively known configs of the corpus are rehearsed, and why the others are not."""
    table = Table("config", "why not", title="corpus")
    folders = [path.parent for path in sorted(CONFIGS.glob("*/config.json"))]
    seen = [_in_a_process("covers", folder) for folder in folders]
    native = [outcome for outcome in seen if outcome["native"]]
    failed = [(folder.name, outcome) for folder, outcome in zip(folders, seen, strict=True) if outcome["reason"]]
    for name, outcome in failed:
        table.add_row(name, ("" if outcome["native"] else "not native: ") + outcome["reason"])
    done = sum(not outcome["reason"] for outcome in native)
    table.add_row("rehearsed", f"{done} of {len(native)} natively known ({100 * done / max(1, len(native)):.1f} %)")
    return table


def _measurements() -> dict[tuple[str, str], list[dict[str, str]]]:
    rows: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    with MEASURED.open(encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            if row["source"] in ("q25", "q3"):
                rows[row["model"], row["quant"]].append(row)
    return rows


def _in_a_process(task: str, config: Path, quant: str = "BF16", rows: list[dict[str, str]] | None = None) -> Any:
    arguments = json.dumps([task, str(config), quant, rows or []])
    command = [sys.executable, "-m", "tests.benchmarks.rehearsals", arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def _peaks(config: Path, quant: str, rows: list[dict[str, str]]) -> list[dict[str, int]]:
    from devmap_cli.simulation.memory import UNLIMITED_BYTES
    from devmap_cli.simulation.rehearsal import rehearse
    from devmap_cli.simulation.workload import Workload

    model = _empty(config, quant)
    seen = []
    for row in rows:
        workload = Workload(prompt_tokens=int(row["context"]), max_new_tokens=int(row["new_tokens"]))
        (device,) = rehearse(model, ONE_GPU, workload, [UNLIMITED_BYTES]).devices
        last = device.phases["decode"]
        seen.append({"peak": max(device.allocated_bytes.values()), "end": last.weights_bytes + last.kv_cache_bytes})
    return seen


def _timed(config: Path) -> dict[str, float]:
    """For a prompt of 2,048 tokens, or as many as there are positions for."""
    from devmap_cli.simulation.memory import UNLIMITED_BYTES
    from devmap_cli.simulation.positions import usual_prompt_tokens
    from devmap_cli.simulation.rehearsal import rehearse
    from devmap_cli.simulation.workload import Workload

    prompt_tokens = usual_prompt_tokens(_empty(config), 2048, 256)  # imports the model's code too
    start = time.perf_counter()
    workload = Workload(prompt_tokens=prompt_tokens, max_new_tokens=256)
    seen = rehearse(_empty(config), ONE_GPU, workload, [UNLIMITED_BYTES])
    seconds = time.perf_counter() - start
    seen.raise_failure()
    return {"seconds": seconds, "ram_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def _covers(config: Path) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    native = json.loads((config / "config.json").read_text()).get("model_type") in CONFIG_MAPPING
    try:
        _timed(config)
    except Exception as error:  # noqa: BLE001 - whatever stops it is the reason to list
        return {"native": native, "reason": f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"}
    return {"native": native, "reason": ""}


def _empty(config: Path, quant: str | None = None) -> Any:
    """The empty model of a config as it loads, or in the format (BF16, GPTQ-Int4) that its page measures."""
    from devmap_cli.model.empty import build_quantized
    from devmap_cli.model.quantization.scheme import modelopt_text, quantization_in_map, quantization_of
    from devmap_cli.model.quiet import quiet_libraries
    from devmap_cli.model.reference import resolve

    with quiet_libraries():
        reference = resolve(str(config))
        quantization = quantization_of(reference.config, modelopt_text(reference.folder), None)
        if quant == "GPTQ-Int4":
            quantization = quantization_in_map(GPTQ)
        dtype = {"BF16": "bfloat16", "GPTQ-Int4": "float16", None: None}[quant]
        return build_quantized(reference, dtype, quantization, trust_remote_code=False).model


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        task, folder, quant, rows = json.loads(sys.argv[1])
        result = _peaks(Path(folder), quant, rows) if task == "peaks" else globals()[f"_{task}"](Path(folder))
        print(json.dumps(result))
