"""`devmap plan`."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from devmap_cli.mapreader import read_map
from devmap_cli.model.load import load_spec
from devmap_cli.model.names import is_ancestor
from devmap_cli.units import format_bytes
from tests.support.processes import Outcome
from tests.support.toys import TOYS

MakeToy = Callable[..., Path]
Run = Callable[..., Outcome]
# Each toy is at most 725 kB of weights: on none of these do they fit on one GPU, on all of them together they do.
WEIGHT_BUDGETS = {
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
ROOMY = "0:60MB,1:60MB"
"""Room on each for a run of any toy: 22 MiB that the allocator takes for weights and workspace, an eighth for CUDA."""
RUNTIME_BYTES = 60_000_000 // 8


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def planned(devmap: Run, *arguments: object, workload: tuple[str, ...] = SHORT) -> dict[str, Any]:
    done = devmap("plan", *arguments, *workload, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def checked(devmap: Run, document: dict[str, Any]) -> dict[str, Any]:
    """What `devmap check` says of a map, which it must let pass."""
    Path("planned.json").write_text(json.dumps(document))
    done = devmap("check", "--map", "planned.json", "--json")
    answer: dict[str, Any] = json.loads(done.stdout)
    assert (done.exit_code, answer["rehearsed"]) == (0, True)
    return answer


def rehearsable(toy: MakeToy, name: str) -> Path:
    """A toy that can generate: T5 wants to know the token that answers begin with."""
    return toy(name, **({"decoder_start_token_id": 0} if name == "t5" else {}))


def test_writes_the_map_and_prints_the_table(devmap: Run, toy: MakeToy) -> None:
    done = devmap("plan", toy("qwen2"), "--max-memory", ROOMY, *SHORT)
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
    done = devmap("plan", toy("qwen2"), "--max-memory", f"{ROOMY},cpu:1MB", *SHORT)
    document = json.loads(Path("map.json").read_text())
    table = {line.split("  ")[0]: line for line in done.stdout.split("\n\n")[0].splitlines()}
    for item in document["devices"]:
        name = f"GPU {item['device']}" if isinstance(item["device"], int) else item["device"]
        columns = ("budget", "weights", "kv_cache", "activation", "overhead", "peak", "free")
        for column in columns:
            assert format_bytes(item[f"{column}_bytes"]) in table[name], column
        assert f"{100 * item['peak_bytes'] / item['budget_bytes']:.0f} %" in table[name]
    assert table["cpu"].rstrip().endswith("nothing")
    bar = next(line for line in done.stdout.splitlines() if line.startswith("█"))
    assert len(bar.strip()) == 72


def test_names_a_file(devmap: Run, toy: MakeToy, tmp_path: Path) -> None:
    done = devmap("plan", toy("qwen2"), "--max-memory", "0:9MB", "--weights-only", "-o", tmp_path / "other.json")
    assert (done.exit_code, done.stderr) == (0, f"wrote {tmp_path / 'other.json'}\n")
    assert list(Path().iterdir()) == []
    assert json.loads((tmp_path / "other.json").read_text())["strategy"] == "auto"


def test_a_dash_sends_the_map_to_stdout_and_the_rest_to_stderr(devmap: Run, toy: MakeToy) -> None:
    done = devmap("plan", toy("qwen2"), "--max-memory", "0:9MB", "--weights-only", "-o", "-")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["format"] == "devmap.map/1"
    assert "GPU 0" in done.stderr
    assert list(Path().iterdir()) == []


def test_json_prints_the_map_and_nothing_else(devmap: Run, toy: MakeToy, tmp_path: Path) -> None:
    arguments = ("plan", toy("qwen2"), "--max-memory", "0:9MB", "--weights-only", "--json")
    done = devmap(*arguments)
    assert (done.exit_code, done.stderr) == (0, "")
    assert json.loads(done.stdout)["format"] == "devmap.map/1"
    assert list(Path().iterdir()) == []
    both = devmap(*arguments, "-o", tmp_path / "map.json")
    assert both.stdout == done.stdout == (tmp_path / "map.json").read_text()
    assert both.stderr == ""


@pytest.mark.parametrize("options", [(ROOMY,), (WEIGHT_BUDGETS["mixtral"], "--weights-only")])
def test_the_same_request_gives_the_same_bytes(
    devmap: Run, toy: MakeToy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.setenv("DEVMAP_CACHE", str(tmp_path / "cache"))
    arguments = ("plan", toy("mixtral"), "--max-memory", *options, "-o", "-", *SHORT)
    cold, warm = devmap(*arguments), devmap(*arguments)
    assert (cold.exit_code, warm.exit_code) == (0, 0)
    assert cold.stdout == warm.stdout


@pytest.mark.parametrize("name", TOYS)
def test_every_parameter_and_buffer_has_one_device(devmap: Run, toy: MakeToy, name: str) -> None:
    folder = toy(name)
    document = planned(devmap, folder, "--max-memory", WEIGHT_BUDGETS[name], "--weights-only")
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
def test_the_figures_add_up_and_check_agrees(devmap: Run, toy: MakeToy, name: str) -> None:
    document = planned(devmap, rehearsable(toy, name), "--max-memory", ROOMY)
    parts = ("weights_bytes", "kv_cache_bytes", "activation_bytes", "overhead_bytes")
    for item in document["devices"]:
        assert item["peak_bytes"] == sum(item[part] for part in parts)
        assert item["free_bytes"] == item["budget_bytes"] - item["peak_bytes"] >= 0
    weights = sum(item["weights_bytes"] for item in document["devices"])
    assert weights == TOYS[name].parameter_bytes + TOYS[name].buffer_bytes
    for item, seen in zip(document["devices"], checked(devmap, document)["devices"], strict=True):
        phase = next(phase for phase in seen["phases"] if phase["phase"] == seen["peak_phase"])
        assert item["kv_cache_bytes"] == phase["kv_cache_bytes"]
        assert item["activation_bytes"] == phase["activation_bytes"]
        assert item["peak_bytes"] == phase["peak_bytes"] + RUNTIME_BYTES


@pytest.mark.parametrize("name", ["qwen2", "opt", "mixtral"])
def test_the_cache_of_all_tokens_counts(devmap: Run, toy: MakeToy, name: str) -> None:
    # after a prompt of one token the end of the run is its highest moment
    workload = ("--prompt-tokens", "1", "--max-new-tokens", "15")
    document = planned(devmap, toy(name), "--max-memory", ROOMY, workload=workload)
    per_token, _ = TOYS[name].kv_bytes or (0, 0)
    assert sum(item["kv_cache_bytes"] for item in document["devices"]) == 16 * per_token


def test_what_is_offloaded_passes_through_a_gpu(devmap: Run, toy: MakeToy) -> None:
    # a layer: q and o 2·512·512, k and v 2·512·256, feed-forward 3·512·2048, 7.5 MiB of bfloat16 in all; of its
    # modules each of the feed-forward holds most, 2 MiB. Eight layers are 60 MiB.
    folder = toy("qwen2", hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    document = planned(devmap, folder, "--max-memory", "0:70MB,cpu:20MB,disk:1GB")
    assert {0, "cpu", "disk"} == set(document["device_map"].values())
    gpu, *tiers = document["devices"]
    assert gpu["activation_bytes"] >= 2 * 512 * 2048
    assert sum(tier["peak_bytes"] - tier["weights_bytes"] for tier in tiers) == 0
    [seen, *_] = checked(devmap, document)["devices"]
    # the budget less an eighth, and less what an allocator may differ by
    assert gpu["peak_bytes"] == seen["peak_bytes"] + 70_000_000 // 8 <= 70_000_000


@pytest.mark.parametrize(
    ("name", "num_bytes"), [("qwen2", 128), ("gpt2", 256), ("mixtral", 128), ("qwen3_next", 128), ("qwen2_5_vl", 128)]
)
def test_what_crosses_for_each_token(devmap: Run, toy: MakeToy, name: str, num_bytes: int) -> None:
    # one row of the hidden size 64, in 2 or 4 bytes, at each change of GPU
    options = ("--max-memory", WEIGHT_BUDGETS[name], "--weights-only", "--strategy", "balanced")
    document = planned(devmap, toy(name), *options)
    crossings = {(item["from"], item["to"]): item["bytes_per_token"] for item in document["transfers"]}
    assert crossings[0, 1] == num_bytes
    assert all(size == num_bytes for size in crossings.values())


def test_what_the_map_records(devmap: Run, toy: MakeToy) -> None:
    folder = toy("qwen2")
    document = planned(
        devmap, folder, "--max-memory", "0:60MB,cpu:1GB", "--strategy", "sequential", "--batch-size", "3"
    )
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
    # 3 sequences of 8 tokens, 512 bytes each: the prompt is the highest moment
    assert [item["kv_cache_bytes"] for item in document["devices"]] == [3 * 8 * 512, 0]
    assert [item["device"] for item in document["devices"]] == [0, "cpu"]


def test_weights_only_counts_no_cache(devmap: Run, toy: MakeToy) -> None:
    folder = toy("qwen2")
    exact = TOYS["qwen2"].parameter_bytes + TOYS["qwen2"].buffer_bytes
    done = devmap("plan", folder, "--max-memory", f"0:{exact}B", "--json", *SHORT)
    assert done.exit_code == 1
    less = ("--max-memory", f"0:{exact - 1}B", "--weights-only")
    assert devmap("plan", folder, *less, *SHORT).exit_code == 1
    document = planned(devmap, folder, "--max-memory", f"0:{exact}B", "--weights-only")
    assert document["devices"][0]["free_bytes"] == 0
    assert document["devices"][0]["kv_cache_bytes"] == 0


def test_a_map_of_weights_alone_says_so_and_is_read(devmap: Run, toy: MakeToy) -> None:
    budgets = ("--max-memory", "0:60MB")
    assert "weights_only" not in planned(devmap, toy("qwen2"), *budgets)
    document = planned(devmap, toy("qwen2"), *budgets, "--weights-only")
    assert document["weights_only"] is True
    checked(devmap, document)
    assert read_map("planned.json").to_document() == document
    Path("planned.json").write_text(json.dumps({**document, "weights_only": "yes"}))
    assert "'weights_only' is \"yes\", not true or false" in devmap("check", "--map", "planned.json").error


def test_reserves_are_kept_free(devmap: Run, toy: MakeToy) -> None:
    options = ("--max-memory", ROOMY, "--reserve", "1=60MB", "--reserve")
    document = planned(devmap, toy("qwen2"), *options, "0=30MB")
    assert [item["budget_bytes"] for item in document["devices"]] == [60_000_000, 60_000_000]
    # of 30 MB an eighth is CUDA's, and 23.07 MB are what a run takes
    assert document["devices"][0]["free_bytes"] >= 30_000_000
    assert set(document["device_map"].values()) == {0}
    assert devmap("plan", toy("qwen2"), *options, "0=35MB", *SHORT).exit_code == 1


def test_pins(devmap: Run, toy: MakeToy, tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text("# the last layers\nmodel.layers.{2..3}=1\n")
    document = planned(devmap, toy("qwen2"), "--max-memory", ROOMY, "--rules", rules, "--pin", "lm_head=1")
    on_1 = [key for key, device in document["device_map"].items() if device == 1]
    assert {"model.layers.2", "model.layers.3", "lm_head"} <= set(on_1)


def test_cpu_and_disk_take_what_the_gpu_cannot(devmap: Run, toy: MakeToy) -> None:
    done = devmap("plan", toy("qwen2"), "--max-memory", "0:150KB,cpu:100KB,disk:1MB", "--weights-only")
    assert done.exit_code == 0
    assert "of the weights are offloaded" in done.stdout
    document = json.loads(Path("map.json").read_text())
    assert {0, "cpu", "disk"} == set(document["device_map"].values())


def test_no_offload_keeps_to_gpus(devmap: Run, toy: MakeToy) -> None:
    budgets = ("--max-memory", "0:150KB,cpu:1MB", "--weights-only")
    assert set(planned(devmap, toy("qwen2"), *budgets)["device_map"].values()) == {0, "cpu"}
    assert devmap("plan", toy("qwen2"), *budgets, "--no-offload").exit_code == 1
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


def test_more_of_what_is_all_reserved_is_no_hint(devmap: Run, toy: MakeToy) -> None:
    done = devmap("plan", str(toy("qwen2")), "--max-memory", "0:100MB", "--reserve", "0=1GB")
    assert done.exit_code == 1
    assert "budget 0 B" in done.error
    assert done.hint.count("0:100MB") == done.hint.count("devmap plan") > 0


def test_the_missing_bytes_are_enough(devmap: Run, toy: MakeToy) -> None:
    folder = toy("qwen2")
    done = devmap("plan", folder, "--max-memory", "sim:0:20MB", "--json", *SHORT)
    assert done.exit_code == 1
    answer = json.loads(done.stdout)
    assert answer["format"] == "devmap.infeasible/1"
    assert (answer["budget_bytes"], answer["device"]) == (20_000_000, "sim:0")
    enough = answer["budget_bytes"] + answer["missing_bytes"]
    assert devmap("plan", folder, "--max-memory", f"sim:0:{enough}B", *SHORT).exit_code == 0


def test_the_missing_bytes_of_weights_are_the_fewest(devmap: Run, toy: MakeToy) -> None:
    folder = toy("qwen2")
    done = devmap("plan", folder, "--max-memory", "0:100KB", "--weights-only", "--json")
    answer = json.loads(done.stdout)
    needed = TOYS["qwen2"].parameter_bytes + TOYS["qwen2"].buffer_bytes
    assert (answer["needed_bytes"], answer["budget_bytes"]) == (needed, 100_000)
    assert (answer["missing_bytes"], answer["device"]) == (needed - 100_000, 0)
    assert devmap("plan", folder, "--max-memory", f"0:{needed}B", "--weights-only").exit_code == 0
    assert devmap("plan", folder, "--max-memory", f"0:{needed - 1}B", "--weights-only").exit_code == 1


def test_an_image_counts(devmap: Run, toy: MakeToy) -> None:
    # 16 x 16 patches of 14 pixels, 2 x 2 to a token: 64 of the 100 tokens
    options = (toy("qwen2_5_vl"), "--max-memory", "0:60MB")
    workload = ("--prompt-tokens", "100", "--max-new-tokens", "8")
    plain = planned(devmap, *options, workload=workload)
    seen = planned(devmap, *options, "--image", "224x224", workload=workload)
    assert (plain["workload"]["images"], seen["workload"]["images"]) == ([], [[224, 224]])
    assert seen["devices"][0]["activation_bytes"] > plain["devices"][0]["activation_bytes"]
    checked(devmap, seen)


def test_a_video_counts(devmap: Run, toy: MakeToy) -> None:
    workload = ("--prompt-tokens", "100", "--max-new-tokens", "8", "--video", "112x112x4")
    document = planned(devmap, toy("qwen2_5_vl"), "--max-memory", "0:60MB", workload=workload)
    assert document["workload"]["videos"] == [[112, 112, 4]]
    checked(devmap, document)


def test_how_attention_is_computed_counts(devmap: Run, toy: MakeToy) -> None:
    workload = ("--prompt-tokens", "200", "--max-new-tokens", "8")
    options = (toy("qwen2"), "--max-memory", "0:60MB", "--attention")
    sdpa, eager = (planned(devmap, *options, name, workload=workload) for name in ("sdpa", "eager"))
    assert (sdpa["workload"]["attention"], eager["workload"]["attention"]) == ("sdpa", "eager")
    # the scores of 4 heads, 200 x 200 of 2 bytes, at least
    assert eager["devices"][0]["activation_bytes"] - sdpa["devices"][0]["activation_bytes"] > 4 * 200 * 200 * 2


def test_the_prompt_ends_where_the_positions_of_the_model_do(devmap: Run, toy: MakeToy) -> None:
    document = planned(devmap, toy("gpt2"), "--max-memory", "0:60MB", workload=())
    assert document["workload"]["prompt_tokens"] + document["workload"]["max_new_tokens"] == 32
    checked(devmap, document)


def test_a_model_that_cannot_be_rehearsed_is_planned_by_its_weights(devmap: Run, toy: MakeToy) -> None:
    done = devmap("plan", toy("t5"), "--max-memory", WEIGHT_BUDGETS["t5"], *SHORT)
    assert done.exit_code == 0
    note = " ".join(done.stdout.partition("not rehearsed: ")[2].split())
    assert "Counted: weights, KV cache" in note
    assert "Not counted: activations" in note
    assert "decoder_start_token_id" in note


def test_decisions_and_a_picture(devmap: Run, toy: MakeToy) -> None:
    arguments = ("plan", toy("qwen2"), "--max-memory", ROOMY, *SHORT)
    plain = devmap(*arguments)
    done = devmap(*arguments, "--explain", "--report", "plan.svg")
    assert done.exit_code == 0
    assert done.stdout.startswith(plain.stdout)
    assert "model.layers" in done.stdout[len(plain.stdout) :]
    assert "<svg" in Path("plan.svg").read_text()


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
        (["--image", "wide"], 2, "'wide'", "--image 1024x768"),
        (["--video", "10x10"], 2, "'10x10'", "--video 1280x720x16"),
        (["--attention", "flash"], 2, "--attention", "plan --help"),
        (["--max-memory", "0:60MB", "--image", "224x224"], 2, "", "--image"),
        (["--max-memory", "0:60MB", "--report", "plan.txt"], 2, "plan.txt", ".svg"),
        (["--max-memory", "0:60MB", "-o", "no/such/folder/map.json"], 2, "does not exist", "mkdir -p"),
        (["--max-memory", "0:60MB", "-o", "."], 2, "folder", "map.json"),
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
        done = devmap("plan", toy("qwen2"), "--max-memory", "0:9MB", "--weights-only")
    finally:
        Path().chmod(stat.S_IRWXU)
    assert done.exit_code == 3
    assert "read-only" in done.error


def test_a_full_disk(devmap: Run, toy: MakeToy) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    done = devmap("plan", toy("qwen2"), "--max-memory", "0:9MB", "--weights-only", "-o", "/dev/full")
    assert (done.exit_code, done.stdout) == (3, "")
    assert "the disk is full" in done.error
