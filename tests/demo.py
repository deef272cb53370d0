"""The main job on a real model: inspect, plan and run, each command printed before its output."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

QUESTION = "What is the capital of France?"


def main(model: str) -> int:
    """Run the commands one after another; the first that fails ends the demo with its exit code."""
    devmap = [str(Path(sys.executable).with_name("devmap"))]
    ask = ["--prompt", QUESTION, "--max-new-tokens", "32"]
    map_path = str(Path(model).parent / "map.json")
    plan = ["plan", model, *_budgets(), "-o", map_path]
    for arguments in (["inspect", model], plan, ["run", "--map", map_path, *ask]):
        print(f"\n$ devmap {shlex.join(arguments)}", flush=True)
        code = subprocess.run([*devmap, *arguments], check=False).returncode
        if code:
            return code
    return 0


def _budgets() -> list[str]:
    """Options for the GPUs of this machine; without any, the model is split over cpu and disk to show offloading."""
    import torch

    if torch.accelerator.is_available():
        return ["--strategy", "balanced", "--no-offload"]
    return ["--max-memory", "cpu:250MB,disk:1GB"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
