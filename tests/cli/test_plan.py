"""`devmap plan`."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from devmap_cli.model.load import load_spec
from devmap_cli.model.names import is_ancestor
from devmap_cli.units import format_bytes
from tests.support.processes import Outcome
from tests.support.toys import TOYS

MakeToy = Callable[..., Path]
Run = Callable[..., Outcome]
# Each toy is at most 725 kB of weights: on none of these does it fit on one GPU, on all of them together it does.
BUDGETS = {
    "qwen2": "0:200KB,1:200KB",
    "gpt2": "0:500KB,1:500KB",
    "opt": "0:110KB,1:110KB",
    "qwen2_5_vl": "0:300KB,1:300KB",
    "t5": "0:250KB,1:250KB",
    "mixtral": "0:450KB,1:450KB",
    "bert": "0:180KB,1:180KB",
    "gemma3": "0:180KB,1:180KB",
    "qwen3_next": "0:270KB,1:270KB",
    "whisper": "0:250KB,1:250KB",
}
SHORT = ("--prompt-tokens", "8", "--max-new-tokens", "8")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def planned(devmap: Run, *arguments: object) -> dict[str, Any]:
    done = devmap("plan", *arguments, *SHORT, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_writes_the_map_and_prints_the_table(devmap: Run, toy: MakeToy) -> None:
    done = devmap("plan", toy("qwen2"), "--max-memory", BUDGETS["qwen2"], *SHORT)
    assert done.exit_code == 0
    assert done.stderr == "wrote map.json\n"
    assert [path.name for path in Path().iterdir()] == ["map.json"]
    document = json.loads(Path("map.json").read_text())
    assert list(document) == [
        "format",
        "model",
        "strategy",
        "workload",
        "devices",
        "transfers",
        "device_map",
        "versions",
    ]
    assert document["format"] == "devmap.map/1"
    assert set(document["device_map"].values()) == {0, 1}


def test_the_table_says_what_the_map_says(devmap: Run, toy: MakeToy) -> None:
    done = devmap("plan", toy("qwen2"), "--max-memory", f"{BUDGETS['qwen2']},cpu:1MB", *SHORT)
    document = json.loads(Path("map.json").read_text())
    table = {line.split("  ")[0]: line for line in done.stdout.split("\n\n")[0].splitlines()}
    for item in document["devices"]:
        name = f"GPU {item['device']}" if isinstance(item["device"], int) else item["device"]
        columns = ("budget", "weights", "kv_cache", "peak", "free")
        for column in columns:
            assert format_bytes(item[f"{column}_bytes"]) in table[name], column
        assert f"{100 * item['peak_bytes'] / item['budget_bytes']:.0f} %" in table[name]
    assert table["cpu"].rstrip().endswith("nothing")
    bar = next(line for line in done.stdout.splitlines() if line.startswith("█"))
    assert len(bar.strip()) == 72


def test_names_a_file(devmap: Run, toy: MakeToy, tmp_path: Path) -> None:
    done = devmap("plan", toy("qwen2"), "--max-memory", "0:9MB", "-o", tmp_path / "other.json")
    assert (done.exit_code, done.stderr) == (0, f"wrote {tmp_path / 'other.json'}\n")
    assert list(Path().iterdir()) == []
    assert json.loads((tmp_path / "other.json").read_text())["strategy"] == "auto"


def test_a_dash_sends_the_map_to_stdout_and_the_rest_to_stderr(devmap: Run, toy: MakeToy) -> None:
    done = devmap("plan", toy("qwen2"), "--max-memory", "0:9MB", "-o", "-")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["format"] == "devmap.map/1"
    assert "GPU 0" in done.stderr
    assert list(Path().iterdir()) == []


def test_json_prints_the_map_and_nothing_else(devmap: Run, toy: MakeToy, tmp_path: Path) -> None:
    arguments = ("plan", toy("qwen2"), "--max-memory", "0:9MB", "--json")
    done = devmap(*arguments)
    assert (done.exit_code, done.stderr) == (0, "")
    assert json.loads(done.stdout)["format"] == "devmap.map/1"
    assert list(Path().iterdir()) == []
    both = devmap(*arguments, "-o", tmp_path / "map.json")
    assert both.stdout == done.stdout == (tmp_path / "map.json").read_text()
    assert both.stderr == ""


def test_the_same_request_gives_the_same_bytes(devmap: Run, toy: MakeToy) -> None:
    arguments = ("plan", toy("mixtral"), "--max-memory", BUDGETS["mixtral"], "-o", "-", *SHORT)
    assert devmap(*arguments).stdout == devmap(*arguments).stdout


@pytest.mark.parametrize("name", TOYS)
def test_every_parameter_and_buffer_has_one_device(devmap: Run, toy: MakeToy, name: str) -> None:
    folder = toy(name)
    document = planned(devmap, folder, "--max-memory", BUDGETS[name])
    device_map, spec = document["device_map"], load_spec(str(folder))
    assert set(device_map.values()) == {0, 1}
    for tensor, _ in spec.tensors():
        assert sum(is_ancestor(key, tensor) for key in device_map) == 1, tensor
    names = {fqn for fqn, _ in spec.modules()} | {tensor for tensor, _ in spec.tensors()}
    assert set(device_map) <= names
    for fqn, module in spec.modules():
        if module.no_split:
            assert not any(is_ancestor(fqn, key) and key != fqn for key in device_map)
    for group in spec.ties:
        keys = [next(key for key in device_map if is_ancestor(key, tensor)) for tensor in group]
        assert len({device_map[key] for key in keys}) == 1


@pytest.mark.parametrize("name", TOYS)
def test_the_figures_add_up(devmap: Run, toy: MakeToy, name: str) -> None:
    document = planned(devmap, toy(name), "--max-memory", BUDGETS[name])
    toy_model, parts = TOYS[name], ("weights_bytes", "kv_cache_bytes", "activation_bytes", "overhead_bytes")
    for item in document["devices"]:
        assert item["peak_bytes"] == sum(item[part] for part in parts)
        assert item["free_bytes"] == item["budget_bytes"] - item["peak_bytes"] >= 0
    weights = sum(item["weights_bytes"] for item in document["devices"])
    assert weights == toy_model.parameter_bytes + toy_model.buffer_bytes
    if name != "gemma3" and toy_model.kv_bytes is not None:  # its windows hold fewer than the 16 tokens
        per_token, fixed = toy_model.kv_bytes
        assert sum(item["kv_cache_bytes"] for item in document["devices"]) == 16 * per_token + fixed


@pytest.mark.parametrize(
    ("name", "num_bytes"), [("qwen2", 128), ("gpt2", 256), ("mixtral", 128), ("qwen3_next", 128), ("qwen2_5_vl", 128)]
)
def test_what_crosses_for_each_token(devmap: Run, toy: MakeToy, name: str, num_bytes: int) -> None:
    # one row of the hidden size 64, in 2 or 4 bytes, at each change of GPU
    document = planned(devmap, toy(name), "--max-memory", BUDGETS[name], "--strategy", "sequential")
    crossings = {(item["from"], item["to"]): item["bytes_per_token"] for item in document["transfers"]}
    assert crossings[0, 1] == num_bytes
    assert all(size == num_bytes for size in crossings.values())


def test_what_the_map_records(devmap: Run, toy: MakeToy) -> None:
    folder = toy("qwen2")
    document = planned(devmap, folder, "--max-memory", "0:1MB,cpu:1GB", "--strategy", "sequential", "--batch-size", "3")
    assert document["model"] == {
        "id": str(folder),
        "revision": None,
        "class": "Qwen2ForCausalLM",
        "dtype": "bfloat16",
        "quantization": None,
    }
    assert document["strategy"] == "sequential"
    assert document["workload"] == {
        "batch_size": 3,
        "prompt_tokens": 8,
        "max_new_tokens": 8,
        "images": [],
        "attention": "sdpa",
    }
    assert set(document["versions"]) == {"devmap", "transformers", "torch", "accelerate"}
    # 3 sequences of 16 tokens, 512 bytes each
    assert [item["kv_cache_bytes"] for item in document["devices"]] == [3 * 16 * 512, 0]
    assert [item["device"] for item in document["devices"]] == [0, "cpu"]


def test_weights_only_counts_no_cache(devmap: Run, toy: MakeToy) -> None:
    folder = toy("qwen2")
    exact = TOYS["qwen2"].parameter_bytes + TOYS["qwen2"].buffer_bytes
    done = devmap("plan", folder, "--max-memory", f"0:{exact}B", "--json", *SHORT)
    assert done.exit_code == 1
    document = planned(devmap, folder, "--max-memory", f"0:{exact}B", "--weights-only")
    assert document["devices"][0]["free_bytes"] == 0
    assert document["devices"][0]["kv_cache_bytes"] == 0


def test_reserves_are_kept_free(devmap: Run, toy: MakeToy) -> None:
    document = planned(
        devmap, toy("qwen2"), "--max-memory", "0:1MB,1:1MB", "--reserve", "0=400KB", "--reserve", "1=1MB"
    )
    assert [item["budget_bytes"] for item in document["devices"]] == [1_000_000, 1_000_000]
    assert document["devices"][0]["free_bytes"] >= 400_000
    assert set(document["device_map"].values()) == {0}


def test_pins(devmap: Run, toy: MakeToy, tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text("# the last layers\nmodel.layers.{2..3}=1\n")
    document = planned(devmap, toy("qwen2"), "--max-memory", "0:1MB,1:1MB", "--rules", rules, "--pin", "lm_head=1")
    on_1 = [key for key, device in document["device_map"].items() if device == 1]
    assert {"model.layers.2", "model.layers.3", "lm_head"} <= set(on_1)


def test_cpu_and_disk_take_what_the_gpu_cannot(devmap: Run, toy: MakeToy) -> None:
    done = devmap("plan", toy("qwen2"), "--max-memory", "0:150KB,cpu:100KB,disk:1MB", *SHORT)
    assert done.exit_code == 0
    assert "of the weights are offloaded" in done.stdout
    document = json.loads(Path("map.json").read_text())
    assert {0, "cpu", "disk"} == set(document["device_map"].values())


def test_no_offload_keeps_to_gpus(devmap: Run, toy: MakeToy) -> None:
    budgets = ("--max-memory", "0:150KB,cpu:1MB")
    assert devmap("plan", toy("qwen2"), *budgets, *SHORT).exit_code == 0
    assert devmap("plan", toy("qwen2"), *budgets, *SHORT, "--no-offload").exit_code == 1
    done = devmap("plan", toy("qwen2"), "--max-memory", "cpu:1MB", "--no-offload")
    assert (done.exit_code, done.error) == (2, "--no-offload leaves no device: no accelerator is named or found")


def test_budgets_of_this_machine(devmap: Run, toy: MakeToy) -> None:
    document = planned(devmap, toy("qwen2"))
    assert [item["device"] for item in document["devices"]][-2:] == ["cpu", "disk"]
    share = planned(devmap, toy("qwen2"), "--max-memory", "cpu:50%")
    half = share["devices"][0]["budget_bytes"]
    assert planned(devmap, toy("qwen2"), "--max-memory", "cpu:100%")["devices"][0]["budget_bytes"] in (
        2 * half,
        2 * half + 1,
    )


def test_what_does_not_fit_is_said_and_nothing_written(devmap: Run, toy: MakeToy) -> None:
    done = devmap("plan", toy("qwen2"), "--max-memory", "0:100KB,1:100KB")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "does not fit" in done.error
    assert "missing" in done.error
    assert done.hint
    assert list(Path().iterdir()) == []


def test_an_older_map_survives_a_no(devmap: Run, toy: MakeToy) -> None:
    Path("map.json").write_text("older")
    assert devmap("plan", toy("qwen2"), "--max-memory", "0:100KB").exit_code == 1
    assert Path("map.json").read_text() == "older"
    assert devmap("plan", toy("qwen2"), "--max-memory", "0:100XB").exit_code == 2
    assert Path("map.json").read_text() == "older"
    assert len(list(Path().iterdir())) == 1


def test_the_missing_bytes_are_enough(devmap: Run, toy: MakeToy) -> None:
    folder = toy("qwen2")
    done = devmap("plan", folder, "--max-memory", "0:100KB", "--json", *SHORT)
    assert done.exit_code == 1
    answer = json.loads(done.stdout)
    assert answer["format"] == "devmap.infeasible/1"
    # weights and buffers, and 16 tokens of 512 bytes
    needed = TOYS["qwen2"].parameter_bytes + TOYS["qwen2"].buffer_bytes + 16 * 512
    assert (answer["needed_bytes"], answer["budget_bytes"]) == (needed, 100_000)
    assert (answer["missing_bytes"], answer["grow_device"]) == (needed - 100_000, 0)
    assert devmap("plan", folder, "--max-memory", f"0:{needed}B", *SHORT).exit_code == 0
    assert devmap("plan", folder, "--max-memory", f"0:{needed - 1}B", *SHORT).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "exit_code", "error", "hint"),
    [
        (["--max-memory", "0:10XB"], 2, "'0:10XB'", "--max-memory '0:10GB'"),
        (["--max-memory", "0:10"], 2, "has no unit", "--max-memory '0:10GB'"),
        (["--max-memory", "0:1MB,gpu:1MB"], 2, "'gpu:1MB'", "cuda:0"),
        (["--max-memory", "0:1MB,0:1MB"], 2, "a second time", "once"),
        (["--max-memory", ""], 2, "empty", "--max-memory '0:10GB"),
        (["--max-memory", "7:50%"], 3, "GPU 7 is not on this machine", "--max-memory '7:10GB'"),
        (["--reserve", "0=2XB"], 2, "'0=2XB'", "--reserve '0=2GB'"),
        (["--max-memory", "0:9MB", "--reserve", "1=1KB"], 2, "no budget", "0"),
        (["--strategy", "balancd"], 2, "balancd", "plan --help"),
        (["--pin", "lm_head"], 2, "lm_head", "--pin"),
        (["--max-memory", "0:9MB", "--pin", "no.such=0"], 2, "no.such", ""),
        (["--max-memory", "0:9MB", "--pin", "lm_head=1"], 2, "no budget", "1:10GB"),
        (["--rules", "missing-file"], 2, "missing-file", ""),
        (["--weight", "0=none"], 2, "0=none", "--weight"),
        (["--batch-size", "0"], 2, "--batch-size", "plan --help"),
        (["--prompt-tokens", "many"], 2, "--prompt-tokens", "plan --help"),
        (["--dtype", "int4"], 2, "--dtype", "plan --help"),
        (["--unknown"], 2, "--unknown", "plan --help"),
        (["--max-memory", "0:9MB", "-o", "no/such/folder/map.json"], 2, "does not exist", "mkdir -p"),
        (["--max-memory", "0:9MB", "-o", "."], 2, "folder", "map.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_requests_are_one_error_and_one_hint(
    devmap: Run, toy: MakeToy, arguments: list[str], exit_code: int, error: str, hint: str
) -> None:
    done = devmap("plan", toy("qwen2"), *arguments)
    assert (done.exit_code, done.stdout) == (exit_code, "")
    assert error in done.error
    assert hint in done.hint
    assert list(Path().iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(devmap: Run, toy: MakeToy) -> None:
    Path().chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        done = devmap("plan", toy("qwen2"), "--max-memory", "0:9MB")
    finally:
        Path().chmod(stat.S_IRWXU)
    assert done.exit_code == 3
    assert "read-only" in done.error


def test_a_full_disk(devmap: Run, toy: MakeToy) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    done = devmap("plan", toy("qwen2"), "--max-memory", "0:9MB", "-o", "/dev/full")
    assert (done.exit_code, done.stdout) == (3, "")
    assert "the disk is full" in done.error
