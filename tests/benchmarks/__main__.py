"""devmap beside plain transformers and accelerate, in one run; every figure is measured here and now.

`python -m tests.benchmarks MODEL`, where MODEL is a folder with weights. Each pair runs alternately, so that both see
the same machine; the median of each side is compared, of tokens/s the geometric mean of the pairs' ratios with its
standard error. No result fails the run: timings are for reading.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median, stdev

from rich.console import Console
from rich.table import Table

BIN = Path(sys.executable).parent
ROUNDS = 5
RUN_ROUNDS = 8  # single runs differ by 10 % and more
BUDGETS = "0:8GB,1:8GB,2:8GB"
PROMPT = "Write a long story about a dragon who learns to sail."
CORPUS = Path(__file__).parents[2].parent / "shared" / "corpus" / "configs"

PLAIN_PLAN = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.accelerate import _get_device_map
config = AutoConfig.from_pretrained(sys.argv[1])
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.tie_weights()
print(len(_get_device_map(model, "auto", {0: 8 * 10**9, 1: 8 * 10**9, 2: 8 * 10**9}, None)))
"""
PLAIN_RUN = """
import json, sys, time, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer
document = json.load(open(sys.argv[1]))
tokenizer = AutoTokenizer.from_pretrained(document["model"]["id"])
start = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(
    document["model"]["id"], dtype=getattr(torch, document["model"]["dtype"]), device_map=document["device_map"],
    attn_implementation="sdpa", offload_folder=sys.argv[2])
load_seconds = time.perf_counter() - start
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": sys.argv[3]}], add_generation_prompt=True, return_tensors="pt", return_dict=True)
class Clock(BaseStreamer):
    times = []
    def put(self, value): self.times.append(time.perf_counter())
    def end(self): pass
model.generate(**inputs.to(model.device), max_new_tokens=int(sys.argv[4]), do_sample=False, streamer=Clock())
first, last = Clock.times[1], Clock.times[-1]
print(json.dumps({"load_seconds": load_seconds, "decode_tokens_per_second": (len(Clock.times) - 2) / (last - first)}))
"""


def main(model: str) -> None:
    """Measure and print all pairs."""
    table = Table("what", "devmap", "the other", "ratio", title="devmap beside plain transformers and accelerate")
    with tempfile.TemporaryDirectory() as scratch:
        for row in (*_help_rows(), *_plan_rows(Path(scratch)), *_run_rows(model, Path(scratch))):
            table.add_row(*row)
    Console(width=140).print(table)


def _help_rows() -> list[tuple[str, ...]]:
    ours, theirs = _alternate(
        lambda: _seconds([str(BIN / "devmap"), "--help"]), lambda: _seconds([str(BIN / "accelerate"), "--help"])
    )
    return [_time_row("devmap --help / accelerate --help", ours, theirs)]


def _plan_rows(scratch: Path) -> list[tuple[str, ...]]:
    """Planning a 7B model for three GPUs: from a cold cache and a warm one, against building the same empty model."""
    config = CORPUS / "Qwen__Qwen2.5-7B"
    if not config.is_dir():
        return [("plan of a 7B", "", "", f"skipped: {config} is not here")]
    plan = [str(BIN / "devmap"), "plan", str(config), "--max-memory", BUDGETS, "-o", str(scratch / "7b.json")]
    theirs_command = [sys.executable, "-c", PLAIN_PLAN, str(config)]

    def cold() -> float:
        with tempfile.TemporaryDirectory() as cache:
            return _seconds(plan, DEVMAP_CACHE=cache)

    warm_cache = str(scratch / "cache")
    _seconds(plan, DEVMAP_CACHE=warm_cache)
    ours_cold, theirs = _alternate(cold, lambda: _seconds(theirs_command))
    ours_warm, theirs_again = _alternate(
        lambda: _seconds(plan, DEVMAP_CACHE=warm_cache), lambda: _seconds(theirs_command)
    )
    return [
        _time_row("plan of a 7B, cold cache / empty model + transformers' own planner", ours_cold, theirs),
        _time_row("plan of a 7B, warm cache / the same", ours_warm, theirs_again),
    ]


def _run_rows(model: str, scratch: Path) -> list[tuple[str, ...]]:
    """Loading and generating with one map, by `devmap run` and by plain from_pretrained + generate."""
    rows = []
    for name, (tokens, budgets) in _run_budgets().items():
        map_path = str(scratch / "run.json")
        _output([str(BIN / "devmap"), "plan", model, *budgets, "-o", map_path])
        ours = [str(BIN / "devmap"), "run", "--map", map_path, "--prompt", PROMPT, "--max-new-tokens", tokens, "--json"]
        theirs = [sys.executable, "-c", PLAIN_RUN, map_path, str(scratch / "offload"), PROMPT, tokens]
        mine: list[dict[str, float]] = []
        plain: list[dict[str, float]] = []
        for number in range(RUN_ROUNDS):  # either goes first in turn
            for is_ours in (number % 2 == 0, number % 2 == 1):
                document = json.loads(_output(ours if is_ours else theirs))
                (mine if is_ours else plain).append(document["measured"] if is_ours else document)
        load, rate = "load_seconds", "decode_tokens_per_second"
        rows.append(_time_row(f"run, {name}: load time", *(median(r[load] for r in side) for side in (mine, plain))))
        speeds = [fmean(r[rate] for r in side) for side in (mine, plain)]
        ratios = [math.log(one[rate] / other[rate]) for one, other in zip(mine, plain, strict=True)]
        error = stdev(ratios) / math.sqrt(len(ratios))
        ratio = f"{math.exp(fmean(ratios)):.3f} ± {error:.3f}"
        rows.append((f"run, {name}: tokens/s", *(f"{speed:.2f}" for speed in speeds), ratio))
    return rows


def _run_budgets() -> dict[str, tuple[str, list[str]]]:
    """New tokens and budget options of each run, by its name; some seconds of decoding each."""
    import torch

    if torch.accelerator.is_available():
        return {"all on the accelerators": ("256", ["--strategy", "balanced", "--no-offload"])}
    return {
        "all on cpu": ("128", ["--max-memory", "cpu:8GB"]),
        "cpu and disk": ("24", ["--max-memory", "cpu:250MB,disk:1GB"]),
    }


def _alternate(ours: Callable[[], float], theirs: Callable[[], float]) -> tuple[float, float]:
    pairs = [(ours(), theirs()) for _ in range(ROUNDS)]
    return median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)


def _seconds(command: list[str], **environment: str) -> float:
    start = time.perf_counter()
    _output(command, **environment)
    return time.perf_counter() - start


def _output(command: list[str], **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def _time_row(what: str, ours: float, theirs: float) -> tuple[str, ...]:
    return what, f"{ours:.2f} s", f"{theirs:.2f} s", f"{ours / theirs:.3f}"


if __name__ == "__main__":
    main(sys.argv[1])
