"""The main job on a real model: inspect, plan and run, each command printed before its output."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

QUESTION = "What is the capital of France?"


def main(model: str) -> int:
    """Run the commands one after another; the first that fails ends the demo with its exit code."""
    folder = Path(model).parent
    commands = [["inspect", model]]
    for name, budgets, options in _placements():
        map_path = str(folder / f"map-{name}.json")
        commands.append(["plan", model, *budgets, "-o", map_path])
        commands.append(["run", "--map", map_path, *options, "--prompt", QUESTION, "--max-new-tokens", "32"])
    for arguments in commands:
        print(f"\n$ devmap {shlex.join(arguments)}", flush=True)
        code = subprocess.run([str(Path(sys.executable).with_name("devmap")), *arguments], check=False).returncode
        if code:
            return code
    return 0


def _placements() -> list[tuple[str, list[str], list[str]]]:
    """A name, options for plan and options for run: this machine's GPUs, or cpu and disk and then simulated GPUs."""
    import torch

    if torch.accelerator.is_available():
        return [("gpus", ["--strategy", "balanced", "--no-offload"], [])]
    return [
        ("offloaded", ["--max-memory", "cpu:250MB,disk:1GB"], []),
        ("two-gpus", ["--strategy", "balanced", "--max-memory", "0:500MB,1:500MB"], ["--simulate"]),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
