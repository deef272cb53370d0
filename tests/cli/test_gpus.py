"""`devmap plan --gpus`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from devmap_cli.planning.strategies import STRATEGIES
from tests.support.processes import Outcome
from tests.support.toys import write_config

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


# ---------------------------------------------------------------------- what the generation of a card decides

FP8: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
APART = ("--pin", "model.embed_tokens=0", "--pin", "model.layers.{2..3}=1")
LONG = ("--prompt-tokens", 128, "--max-new-tokens", 32)


def peaks(document: dict[str, Any]) -> list[int]:
    return [item["peak_bytes"] for item in document["devices"]]


def checked(done: Outcome) -> dict[str, Any]:
    assert done.exit_code == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def foretold_by_check(devmap: Run) -> list[int]:
    """What the process takes of each device with map.json."""
    devices = checked(devmap("check", "--map", "map.json", "--json"))["devices"]
    return [item["peak_bytes"] + item["runtime_overhead_bytes"] for item in devices]


def test_a_map_says_what_it_was_planned_for_and_check_takes_it(devmap: Run, toy: MakeToy) -> None:
    done = devmap(
        "plan",
        toy("qwen2"),
        "--gpus",
        "T4,A10",
        *APART,
        *LONG,
        "-o",
        "map.json",
    )
    assert done.exit_code == 0
    planned = json.loads(Path("map.json").read_text())
    assert [item["card"] for item in planned["devices"]] == ["T4", "A10"]
    foretold = foretold_by_check(devmap)
    # planned as if both were T4s, and the A10 has kernels that need less
    assert foretold[0] == pytest.approx(peaks(planned)[0], rel=0.005)
    assert foretold[1] <= peaks(planned)[1] * 1.0001


def test_check_for_other_cards(devmap: Run, toy: MakeToy) -> None:
    devmap("plan", toy("qwen2"), "--gpus", "T4", "--batch-size", 64, *LONG, "-o", "map.json")
    old = checked(devmap("check", "--map", "map.json", "--json"))
    new = checked(devmap("check", "--map", "map.json", "--gpus", "L4", "--json"))
    assert peaks(new)[0] < peaks(old)[0]  # all scores of attention are kept on a T4
    assert new["devices"][0]["budget_bytes"] > old["devices"][0]["budget_bytes"]


def test_a_hopper_beside_an_older_card_keeps_its_larger_workspace(devmap: Run, toy: MakeToy) -> None:
    done = devmap(
        "plan",
        toy("qwen2"),
        "--gpus",
        "A100 80GB,H100",
        *APART,
        *LONG,
        "-o",
        "map.json",
    )
    assert done.exit_code == 0, done.stderr
    planned = json.loads(Path("map.json").read_text())
    foretold = foretold_by_check(devmap)
    assert foretold[1] - foretold[0] > 10 << 20
    assert all(foretold[index] <= peaks(planned)[index] <= 1.03 * foretold[index] for index in (0, 1))


def test_a_map_with_a_card_that_nobody_makes(devmap: Run, toy: MakeToy) -> None:
    devmap("plan", toy("qwen2"), "--gpus", "T4", *LONG, "-o", "map.json")
    path = Path("map.json")
    path.write_text(path.read_text().replace('"T4"', '"T5"'))
    done = devmap("check", "--map", "map.json")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "the map says that GPU 0 is a T5" in done.error
    assert "--gpus" in done.hint


@pytest.mark.parametrize("command", ["plan", "check"])
def test_flash_attention_on_a_card_that_is_too_old(devmap: Run, toy: MakeToy, command: str) -> None:
    devmap("plan", toy("qwen2"), "--gpus", "T4", *LONG, "-o", "map.json")
    given = (toy("qwen2"), "--gpus", "T4") if command == "plan" else ("--map", "map.json")
    done = devmap(command, *given, "--attention", "flash_attention_2")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "FlashAttention 2 runs from compute capability 8.0 on, and T4 has 7.5" in done.error
    assert done.hint.endswith("--attention sdpa")


def test_fp8_is_unpacked_on_cards_without_kernels(devmap: Run, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "fp8", FP8)
    weights = {}
    for name in ("H100", "A100 80GB"):
        done = devmap("plan", folder, "--gpus", name, *LONG, "-o", f"{name}.json")
        assert done.exit_code == 0, done.stderr
        planned = json.loads(Path(f"{name}.json").read_text())
        weights[name] = planned["devices"][0]["weights_bytes"]
        again = checked(devmap("check", "--map", f"{name}.json", "--json"))
        assert again["devices"][0]["phases"][-1]["weights_bytes"] == pytest.approx(weights[name], rel=0.05)
    layers = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256)
    assert weights["A100 80GB"] - weights["H100"] == pytest.approx(layers, rel=0.01)  # two bytes each, or one
    assert "transformers unpacks it" in devmap("plan", folder, "--gpus", "A100 80GB", *LONG).stdout


def test_weights_that_a_card_is_too_old_for(devmap: Run, toy: MakeToy) -> None:
    done = devmap("plan", toy("qwen2"), "--gpus", "V100 16GB", "--quantize", "int8")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "int8 weights run from compute capability 7.5 on" in done.error
    devmap("plan", toy("qwen2"), "--gpus", "T4", "--quantize", "int8", *LONG, "-o", "map.json")
    done = devmap("check", "--map", "map.json", "--gpus", "V100 16GB")
    assert done.exit_code == 1
    assert "quantized-on-old-card  int8 weights are on GPU 0, a V100" in done.stdout


@pytest.mark.parametrize(("gib", "expected"), [(7.6, "RTX 4060 Ti 8GB"), (15.6, "RTX 4060 Ti 16GB")])
def test_memory_tells_which_card_of_one_name_is_here(
    monkeypatch: pytest.MonkeyPatch, gib: float, expected: str
) -> None:
    from devmap_cli.cli.budgeting import local_cards
    from devmap_cli.devices import detection
    from devmap_cli.devices.device import CPU, Device

    gpu = Device("cuda", 0)
    here = [
        detection.DetectedDevice(gpu, "NVIDIA GeForce RTX 4060 Ti", int(gib * 2**30), 0),
        detection.DetectedDevice(Device("cuda", 1), "NVIDIA Something Else", 2**34, 0),
        detection.DetectedDevice(CPU, "host RAM", 2**34, 0),
    ]
    monkeypatch.setattr(detection, "detect", lambda: here)
    assert {device: card.name for device, card in local_cards().items()} == {gpu: expected}
