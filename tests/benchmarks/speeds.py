"""Predicted seconds per token and of loading beside published ones: accelerate's big model inference benchmarks.

`python -m tests.benchmarks.speeds`. The runs were made with accelerate's script of 2022 on two Titan RTX with 24 GB
each and 32 GB of RAM: prompts of a few tokens, 20 tokens at most, and the time of the prefill among the tokens'. What
lay where is filled in as published, device after device. No rate is fitted to these runs, and no result fails the run.

Loading has changed since: then one thread read pickled checkpoints, and what was to lie on disk was written there anew.

Source: benchmarks/big_model_inference/README.md of huggingface/accelerate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from devmap_cli.devices.cards import cards_named
from devmap_cli.devices.device import CPU, DISK, Device
from devmap_cli.planning.rates import Rates, accelerator_rates, disk_rates, host_rates
from devmap_cli.planning.speed import BlockWork, Handover, Speed, handovers_of, predict

GIB = 1 << 30
GPUS = (Device("cuda", 0), Device("cuda", 1))
PROMPT_TOKENS, NEW_TOKENS = 8, 12
"""The script's prompts have 5 to 9 tokens, and `generate` stopped at 20 tokens by default."""


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
    predictions = [predicted(run) for run in RUNS]
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


def predicted(run: Run) -> Speed:
    """The speed of one run by the model of the planner."""
    blocks, handovers = _blocks(run)
    (card,) = cards_named("Titan RTX")
    gpu = accelerator_rates(card, run.dtype)
    rates: dict[Device, Rates] = {**dict.fromkeys(GPUS, gpu), CPU: host_rates(run.dtype), DISK: disk_rates()}
    return predict(blocks, _filled(blocks, run.used_gib), rates, handovers=handovers)


def _filled(blocks: Sequence[BlockWork], used_gib: Sequence[float]) -> list[Device]:
    """Devices one after the other, each up to what was used of it."""
    devices, room = iter((*GPUS, CPU, DISK)), iter((*used_gib, math.inf))
    device, free = next(devices), next(room) * GIB
    placed = []
    for block in blocks:
        while block.weights_bytes > free:
            device, free = next(devices), next(room) * GIB
        free -= block.weights_bytes
        placed.append(device)
    return placed


def _blocks(run: Run) -> tuple[list[BlockWork], tuple[Handover, ...]]:
    """Each block's work, from a rehearsal with each on a device of its own."""
    from devmap_cli.simulation.memory import UNLIMITED_BYTES
    from devmap_cli.simulation.rehearsal import rehearse
    from devmap_cli.simulation.workload import Workload

    model = _empty(run.model)
    device_map = _numbered_blocks(model)
    num_blocks = 1 + max(device_map.values())
    workload = Workload(prompt_tokens=PROMPT_TOKENS, max_new_tokens=NEW_TOKENS, dtype=run.dtype)
    capacities = [UNLIMITED_BYTES] * num_blocks
    seen = rehearse(model, {**device_map}, workload, capacities, compute_capabilities=[(7, 5)] * num_blocks)
    seen.raise_failure()
    blocks = [
        BlockWork(device.phases["load"].weights_bytes, device.work["prefill"], device.work["decode"])
        for device in seen.devices
    ]
    return blocks, handovers_of(seen.transfers, {f"sim:{index}": index for index in range(num_blocks)})


def _numbered_blocks(model: Any) -> dict[str, int]:
    """A number for each block, those that share weights together."""
    numbers: dict[str, int] = {}
    by_tensor: dict[int, int] = {}
    for name in _block_names(model):
        tensors = [id(tensor) for tensor in model.get_submodule(name).parameters()]
        known = [by_tensor[tensor] for tensor in tensors if tensor in by_tensor]
        numbers[name] = known[0] if known else 1 + max(numbers.values(), default=-1)
        by_tensor.update(dict.fromkeys(tensors, numbers[name]))
    return numbers


def _block_names(model: Any) -> list[str]:
    """The members of the longest lists of modules, and whole what holds no such list, in their order."""
    import torch

    lists = {name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)}
    layers = {name for name in lists if not any(name.startswith(f"{other}.") for other in lists - {name})}

    def parts(prefix: str, module: Any) -> list[str]:
        if prefix in layers:
            return [f"{prefix}.{name}" for name, _ in module.named_children()]
        if not any(name.startswith(f"{prefix}.") for name in layers):
            return [prefix]
        children = (parts(f"{prefix}.{name}", child) for name, child in module.named_children())
        return list(itertools.chain.from_iterable(children))

    return list(itertools.chain.from_iterable(parts(name, child) for name, child in model.named_children()))


def _empty(name: str) -> Any:
    import torch
    import transformers

    t5: Any = transformers.T5Config  # its signature lacks what every configuration takes
    made: dict[str, tuple[Any, Any]] = {
        "GPT-J-6B": (transformers.GPTJForCausalLM, transformers.GPTJConfig()),
        "GPT-NeoX-20B": (transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig()),
        "T0pp (11B)": (
            transformers.T5ForConditionalGeneration,
            t5(
                d_model=4096,
                d_kv=64,
                d_ff=10240,
                num_layers=24,
                num_heads=64,
                feed_forward_proj="gated-gelu",
                tie_word_embeddings=False,
                decoder_start_token_id=0,
            ),
        ),
        "OPT-30B": (
            transformers.OPTForCausalLM,
            transformers.OPTConfig(
                num_hidden_layers=48,
                hidden_size=7168,
                word_embed_proj_dim=7168,
                num_attention_heads=56,
                ffn_dim=28672,
            ),
        ),
    }
    model_class, config = made[name]
    with torch.device("meta"):
        model = model_class(config).eval()
    model.tie_weights()
    return model


if __name__ == "__main__":
    main()
