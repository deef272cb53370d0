"""Predicted seconds per token and of loading beside published ones: accelerate's big model inference benchmarks.

`python -m tests.benchmarks.speeds`. The runs were made with accelerate's script of 2022 on two Titan RTX with 24 GB
each and 32 GB of RAM: prompts of a few tokens, 20 tokens at most, and the time of the prefill among the tokens'. What
lay where is filled in as published, device after device. No rate is fitted to these runs, and no result fails the run.

Loading has changed since: then one thread read pickled checkpoints, and what was to lie on disk was written there anew.

Source: benchmarks/big_model_inference/README.md of huggingface/accelerate.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.capability import DEFAULT_CAPABILITY
from devmap_cli.devices.cards import cards_named
from devmap_cli.devices.device import CPU, DISK, Device
from devmap_cli.mapfile import MapWorkload
from devmap_cli.model.load import load_spec
from devmap_cli.planning.blocks import blocks_of
from devmap_cli.planning.nouns import Block, Placement
from devmap_cli.planning.pace import Pace
from devmap_cli.planning.profiling import Profiler
from devmap_cli.planning.speed import Speed
from tests.support.toys import write_config

GIB = 1 << 30
GPUS = (Device("cuda", 0), Device("cuda", 1))
(CARD,) = cards_named("Titan RTX")
PROMPT_TOKENS, NEW_TOKENS = 8, 12
"""The script's prompts have 5 to 9 tokens, and `generate` stopped at 20 tokens by default."""
WORKLOAD = MapWorkload(prompt_tokens=PROMPT_TOKENS, max_new_tokens=NEW_TOKENS)
CONFIGS: dict[str, dict[str, Any]] = {
    "GPT-J-6B": {"model_type": "gptj"},
    "GPT-NeoX-20B": {"model_type": "gpt_neox"},
    "T0pp (11B)": {
        "model_type": "t5",
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "decoder_start_token_id": 0,
    },
    "OPT-30B": {
        "model_type": "opt",
        "num_hidden_layers": 48,
        "hidden_size": 7168,
        "word_embed_proj_dim": 7168,
        "num_attention_heads": 56,
        "ffn_dim": 28672,
    },
}
"""As the models' config.json say it, where that is not transformers' default."""


@dataclass(frozen=True)
class Run:
    """One line of the table: GiB used of GPU 0, GPU 1 and the cpu; what is left over was on disk."""

    model: str
    dtype: str
    load_seconds: float
    seconds_per_token: float
    used_gib: tuple[float, float, float]


RUNS = (
    Run("GPT-J-6B", "float16", 8.7, 0.05, (11.7, 0, 0)),
    Run("GPT-J-6B", "float32", 12.4, 0.06, (21.9, 1.5, 0)),
    Run("GPT-NeoX-20B", "float16", 30.9, 0.08, (21.5, 18, 0)),
    Run("GPT-NeoX-20B", "float32", 78.2, 10.72, (20.3, 22.7, 24.4)),
    Run("T0pp (11B)", "float32", 29.4, 0.05, (21.1, 21.3, 0)),
    Run("OPT-30B", "float16", 34.5, 2.37, (20.7, 22.3, 14.1)),
    Run("OPT-30B", "float32", 112.3, 33.9, (20.2, 21.2, 23.5)),
)


def main() -> None:
    """Print both tables, and how far off the predictions are on average."""
    console = Console(width=140)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DEVMAP_CACHE"] = folder
        predictions = [predicted(run, Path(folder) / run.model) for run in RUNS]
    per_token = [(run.seconds_per_token, of_script(speed)) for run, speed in zip(RUNS, predictions, strict=True)]
    loads = [(run.load_seconds, speed.load_seconds) for run, speed in zip(RUNS, predictions, strict=True)]
    for title, pairs in (("seconds per token", per_token), ("seconds to load", loads)):
        table = Table("model", "dtype", "published", "predicted", "ratio", "error", title=title)
        for run, (published, value) in zip(RUNS, pairs, strict=True):
            ratio = value / published
            figures = (f"{published:.4g}", f"{value:.3g}", f"{ratio:.2f}", f"{100 * (ratio - 1):+.0f} %")
            table.add_row(run.model, run.dtype, *figures)
        off_by = math.exp(sum(abs(math.log(value / published)) for published, value in pairs) / len(pairs))
        table.add_row("all", "", "", "", f"{off_by:.2f}", "geometric mean of how far off, either way")
        console.print(table)


def of_script(speed: Speed) -> float:
    """Seconds per token as the script counts them: all of `generate`, divided by the tokens it made."""
    return (speed.seconds_to_first_token + (NEW_TOKENS - 1) * speed.seconds_per_token) / NEW_TOKENS


def predicted(run: Run, folder: Path) -> Speed:
    """The speed of one run, by way of the planner's own profile; `folder` takes the model's config."""
    write_config(folder, CONFIGS[run.model])
    spec = load_spec(str(folder), dtype=run.dtype)
    profile = Profiler(spec).profile(WORKLOAD, CARD.compute_capability or DEFAULT_CAPABILITY)
    assert profile is not None
    blocks = profile.blocks(blocks_of(spec, PROMPT_TOKENS + NEW_TOKENS, 1))
    budgets = Budgets.of(dict.fromkeys((*GPUS, CPU, DISK), 0))
    placement = Placement("published", blocks, tuple(_filled(blocks, run.used_gib)), budgets)
    return Pace(profile, spec.dtype, dict.fromkeys(GPUS, CARD)).of(placement)


def _filled(blocks: Sequence[Block], used_gib: Sequence[float]) -> Iterator[Device]:
    """Devices one after the other, each up to what was used of it."""
    devices, room = iter((*GPUS, CPU, DISK)), iter((*used_gib, math.inf))
    device, free = next(devices), next(room) * GIB
    for block in blocks:
        while block.weights_bytes > free:
            device, free = next(devices), next(room) * GIB
        free -= block.weights_bytes
        yield device


if __name__ == "__main__":
    main()
