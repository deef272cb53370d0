"""`devmap plan --gpus`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from devmap_cli.planning.strategies import STRATEGIES
from tests.support.processes import Outcome

MakeToy = Callable[..., Path]
Run = Callable[..., Outcome]
T4_BYTES, A10_BYTES = int(14.56 * 2**30), int(21.96 * 2**30)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def budgets(done: Outcome) -> dict[Any, int]:
    assert (done.exit_code, done.stderr) == (0, "")
    return {item["device"]: item["budget_bytes"] for item in json.loads(done.stdout)["devices"]}


def test_the_table_names_the_cards(devmap: Run, toy: MakeToy) -> None:
    done = devmap("plan", toy("qwen2"), "--gpus", "2xT4,1xA10", "--max-memory", "cpu:30GB")
    assert done.exit_code == 0
    labels = [line.split("  ")[0] for line in done.stdout.splitlines()[1:5]]
    assert labels == ["GPU 0 T4", "GPU 1 T4", "GPU 2 A10", "cpu"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_plans_for_cards(devmap: Run, toy: MakeToy, strategy: str) -> None:
    done = devmap("plan", toy("qwen2"), "--gpus", "2xT4,1xA10", "--strategy", strategy, "--json")
    assert budgets(done) == {0: T4_BYTES, 1: T4_BYTES, 2: A10_BYTES}


def test_reserves_and_pins(devmap: Run, toy: MakeToy) -> None:
    options = ("--gpus", "T4,A10", "--reserve", "0=1GiB,1=10%", "--max-memory", "cpu:1GB", "--pin", "lm_head=1")
    done = devmap("plan", toy("qwen2"), *options, "--json")
    assert budgets(done) == {0: T4_BYTES, 1: A10_BYTES, "cpu": 10**9}
    assert json.loads(done.stdout)["device_map"]["lm_head"] == 1


def test_cpu_and_disk_only_where_named(devmap: Run, toy: MakeToy) -> None:
    assert list(budgets(devmap("plan", toy("qwen2"), "--gpus", "T4", "--json"))) == [0]
    both = ("--gpus", "T4", "--max-memory", "disk:1GB,cpu:1GB")
    assert list(budgets(devmap("plan", toy("qwen2"), *both, "--json"))) == [0, "cpu", "disk"]
    assert list(budgets(devmap("plan", toy("qwen2"), *both, "--no-offload", "--json"))) == [0]


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["--gpus", "2xT5"], "no card is called 'T5'", "--gpus '2xT4'"),
        (["--gpus", "A100"], "A100 40GB or A100 SXM 80GB", "--gpus 'A100 40GB'"),
        (["--gpus", ""], "empty", "--gpus '2xT4,1xA10'"),
        (["--gpus", "T4", "--max-memory", "1:10GB"], "names GPU 1, but --gpus", "--max-memory 'cpu:30GB'"),
        (["--gpus", "T4", "--max-memory", ""], "empty", "--max-memory"),
        (["--gpus", "T4", "--max-memory", "cpu:80%"], "so 80% (--max-memory) of its cpu is unknown", "cpu:10GB"),
        (["--gpus", "T4", "--reserve", "1=1GB"], "no budget", "0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_requests(devmap: Run, toy: MakeToy, arguments: list[str], error: str, hint: str) -> None:
    done = devmap("plan", toy("qwen2"), *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert error in done.error
    assert hint in done.hint
