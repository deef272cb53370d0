"""`devmap check`."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.processes import Outcome, run_python

MakeToy = Callable[..., Path]
Run = Callable[..., Outcome]
SHORT = ("--prompt-tokens", "32", "--max-new-tokens", "8")
WHOLE: dict[str, int | str] = {
    "model.embed_tokens": 0,
    **{f"model.layers.{index}": index // 2 for index in range(4)},
    "model.norm": 1,
    "model.rotary_emb": 0,
    "lm_head": 1,
}
FORGETFUL = {key: device for key, device in WHOLE.items() if key != "model.rotary_emb"}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def write(device_map: Mapping[str, int | str], path: str = "map.json") -> str:
    Path(path).write_text(json.dumps(device_map))
    return path


def test_a_right_map(devmap: Run, toy: MakeToy) -> None:
    done = devmap("check", "--map", write(WHOLE), "--model", toy("qwen2"), *SHORT)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("no findings\n")
    assert "predicted by a rehearsal of 1 × (32 + 8 tokens)" in done.stdout


def test_a_map_with_a_mistake(devmap: Run, toy: MakeToy) -> None:
    done = devmap("check", "--map", write(FORGETFUL), "--model", toy("qwen2"), *SHORT)
    assert (done.exit_code, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("error  uncovered-buffer  model.rotary_emb has no device (2 buffers, ")
    assert lines[1] == "    transformers leaves it on the cpu, and every token copies it to GPU 0"
    assert lines[2] == '    fix: add "model.rotary_emb": 0'
    assert list(Path().iterdir()) == [Path("map.json")]


@pytest.mark.parametrize("budgets", ["cpu:60MB", "cpu:300KB,disk:1GB"])
def test_without_a_gpu_the_cpu_takes_what_was_planned(devmap: Run, toy: MakeToy, budgets: str) -> None:
    done = devmap("plan", toy("qwen2"), "--max-memory", budgets, *SHORT)
    assert done.exit_code == 0
    planned = json.loads(Path("map.json").read_text())["devices"]
    document = json.loads(devmap("check", "--map", "map.json", "--json").stdout)
    assert [item["peak_bytes"] for item in document["devices"]] == [item["peak_bytes"] for item in planned]
    assert planned[0]["kv_cache_bytes"] > 0


def test_a_map_of_plan_needs_nothing_else(devmap: Run, toy: MakeToy) -> None:
    planned = devmap("plan", toy("qwen2"), "--max-memory", "0:60MB,1:60MB", "--strategy", "balanced", *SHORT)
    assert planned.exit_code == 0
    done = devmap("check", "--map", "map.json")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "(32 + 8 tokens)" in done.stdout
    assert "57.2 MiB" in done.stdout  # the budget of 60 MB


@pytest.mark.parametrize("name", ["bert", "opt", "gemma3", "mixtral", "qwen2_5_vl"])
def test_a_map_of_plan_has_no_error(devmap: Run, toy: MakeToy, name: str) -> None:
    workload = ("--prompt-tokens", "16", "--max-new-tokens", "8")
    planned = devmap("plan", toy(name), "--max-memory", "0:60MB,1:60MB", "--strategy", "balanced", *workload)
    assert planned.exit_code == 0
    assert devmap("check", "--map", "map.json").exit_code == 0


def test_json_is_one_document(devmap: Run, toy: MakeToy) -> None:
    done = devmap(
        "check", "--map", write(FORGETFUL), "--model", toy("qwen2"), *SHORT, "--json", "--max-memory", "0:1GB"
    )
    document: dict[str, Any] = json.loads(done.stdout)
    assert (done.exit_code, done.stderr) == (1, "")
    assert list(document) == [
        "format",
        "model",
        "workload",
        "passed",
        "findings",
        "rehearsed",
        "not_rehearsed_because",
        "stopped_in",
        "devices",
        "notes",
        "assumptions",
    ]
    assert document["format"] == "devmap.check/1"
    assert [finding["code"] for finding in document["findings"]] == ["uncovered-buffer"]
    assert set(document["findings"][0]) == {"code", "severity", "module", "message", "consequence", "fix"}
    assert [(item["device"], item["budget_bytes"]) for item in document["devices"]] == [(0, 10**9), (1, None)]
    parts = ("weights_bytes", "kv_cache_bytes", "activation_bytes", "overhead_bytes")
    for item in document["devices"]:
        for phase in item["phases"]:
            assert phase["peak_bytes"] == sum(phase[part] for part in parts)
        highest = next(phase for phase in item["phases"] if phase["phase"] == item["peak_phase"])
        assert item["peak_bytes"] == highest["peak_bytes"]


def test_findings_of_equal_layers_are_one_line(devmap: Run, toy: MakeToy) -> None:
    device_map = {key: device for key, device in WHOLE.items() if ".layers." not in key or key.endswith("3")}
    done = devmap("check", "--map", write(device_map), "--model", toy("qwen2"), *SHORT)
    (line,) = [line for line in done.stdout.splitlines() if "uncovered-parameter" in line]
    assert line.startswith("error  uncovered-parameter  model.layers.0-2 has no device (12 parameters, ")
    assert line.endswith(") each")


def test_fix_writes_beside_the_map(devmap: Run, toy: MakeToy) -> None:
    before = write({**FORGETFUL, "model.layers.9": 1})
    done = devmap("check", "--map", before, "--model", toy("qwen2"), *SHORT, "--fix")
    assert (done.exit_code, done.stderr) == (0, "wrote map.fixed.json\n")
    assert json.loads(Path(before).read_text()) == {**FORGETFUL, "model.layers.9": 1}
    assert json.loads(Path("map.fixed.json").read_text()) == WHOLE
    assert "fixed  model.layers.9 removed: names no part of the model\n" in done.stdout
    assert "fixed  model.rotary_emb → GPU 0: no key named it\n" in done.stdout
    assert "repaired map map.fixed.json:\nno findings\n" in done.stdout


def test_fix_of_a_map_of_plan_keeps_all_that_it_says(devmap: Run, toy: MakeToy) -> None:
    devmap("plan", toy("qwen2"), "--max-memory", "0:60MB,1:60MB", "--strategy", "balanced", *SHORT)
    planned = json.loads(Path("map.json").read_text())
    del planned["device_map"]["model.rotary_emb"]
    write(planned)
    done = devmap("check", "--map", "map.json", "--fix", "-o", "other.json")
    assert (done.exit_code, done.stderr) == (0, "wrote other.json\n")
    fixed = json.loads(Path("other.json").read_text())
    assert {key: fixed[key] for key in ("format", "model", "workload", "strategy", "versions")} == {
        key: planned[key] for key in ("format", "model", "workload", "strategy", "versions")
    }
    assert "model.rotary_emb" in fixed["device_map"]
    assert all(item["activation_bytes"] for item in fixed["devices"] if item["weights_bytes"])
    assert devmap("check", "--map", "other.json").exit_code == 0


def test_fix_of_a_right_map_writes_nothing(devmap: Run, toy: MakeToy) -> None:
    done = devmap("check", "--map", write(WHOLE), "--model", toy("qwen2"), *SHORT, "--fix")
    assert (done.exit_code, done.stderr) == (0, "")
    assert list(Path().iterdir()) == [Path("map.json")]


def test_fix_in_a_pipe(devmap: Run, toy: MakeToy, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = SimpleNamespace(buffer=io.BytesIO(json.dumps(FORGETFUL).encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    done = devmap("check", "--map", "-", "--model", toy("qwen2"), *SHORT, "--fix", "-o", "-")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == WHOLE
    assert done.stderr.startswith("error  uncovered-buffer")


def test_fix_in_json(devmap: Run, toy: MakeToy) -> None:
    done = devmap("check", "--map", write(FORGETFUL), "--model", toy("qwen2"), *SHORT, "--fix", "--json")
    document = json.loads(done.stdout)
    assert done.exit_code == 0
    assert document["passed"] is False
    assert document["fixed"]["passed"] is True
    assert document["fixed"]["file"] == "map.fixed.json"
    assert document["fixed"]["changes"] == [{"module": "model.rotary_emb", "device": 0, "reason": "no key named it"}]


def test_memory_is_told_with_device_and_phase(devmap: Run, toy: MakeToy) -> None:
    arguments = ("check", "--map", write(WHOLE), "--model", toy("qwen2"), "--prompt-tokens", "4096")
    done = devmap(*arguments, "--max-memory", "0:4MiB,1:1GiB")
    assert done.exit_code == 1
    assert "error  out-of-memory  GPU 0 would take " in done.stdout
    assert "    the run ends in prefill, out of memory on GPU 0, in model." in done.stdout
    (hint,) = done.stderr.splitlines()
    command = shlex.split(hint.removeprefix("hint: let devmap place it: devmap "))
    assert devmap(*command, "--no-offload").exit_code == 0


def test_the_plan_that_is_hinted_at_loads_the_model_alike(devmap: Run, toy: MakeToy) -> None:
    workload = ("--prompt-tokens", "4096", "--max-new-tokens", "8", "--batch-size", "2")
    arguments = ("check", "--map", write(WHOLE), "--model", toy("qwen2"), *workload)
    done = devmap(*arguments, "--dtype", "float32", "--max-memory", "0:16MiB,1:8GiB")
    (hint,) = done.stderr.splitlines()
    command = shlex.split(hint.removeprefix("hint: let devmap place it: devmap "))
    assert devmap(*command).exit_code == 0
    planned = json.loads(Path("map.json").read_text())
    assert planned["model"]["dtype"] == "float32"
    assert planned["workload"]["batch_size"] == 2


def test_images_and_videos_have_room_and_are_planned_for(devmap: Run, toy: MakeToy) -> None:
    media = ("--image", "280x280", "--video", "112x56x8")
    arguments = ("check", "--map", write({"": 0}), "--model", toy("qwen2_5_vl", max_position_embeddings=4096), *media)
    assert devmap(*arguments).exit_code == 0
    done = devmap(*arguments, "--max-memory", "0:6MB,1:1GB")
    assert "activations: " in done.stdout
    assert "or shorten the prompt or take smaller images or take fewer frames" in done.stdout
    (hint,) = done.stderr.splitlines()
    assert " 0:6MB,1:1GB " in hint
    command = shlex.split(hint.removeprefix("hint: let devmap place it: devmap "))
    assert devmap(*command).exit_code == 0
    planned = json.loads(Path("map.json").read_text())["workload"]
    assert (planned["images"], planned["videos"]) == ([[280, 280]], [[56, 112, 8]])


def test_a_device_that_is_not_there_is_an_error(devmap: Run, toy: MakeToy) -> None:
    assert devmap("plan", toy("qwen2"), "--gpus", "2xT4", "--strategy", "balanced", *SHORT).exit_code == 0
    assert devmap("check", "--map", "map.json").exit_code == 0
    fewer = devmap("check", "--map", "map.json", "--gpus", "1xT4")
    assert fewer.exit_code == 1
    assert "error  no-such-device  " in fewer.stdout
    assert " put on GPU 1, and there is but GPU 0\n" in fewer.stdout
    document = json.loads(Path("map.json").read_text())
    document["device_map"]["lm_head"] = 7
    Path("map.json").write_text(json.dumps(document))
    edited = devmap("check", "--map", "map.json")
    assert edited.exit_code == 1
    assert "error  no-such-device  lm_head is put on GPU 7, and there is but GPU 0 and GPU 1\n" in edited.stdout
    assert "any size fits there" not in edited.stdout


def test_budgets_of_weights_alone_limit_no_rehearsal(devmap: Run, toy: MakeToy) -> None:
    size = sum(
        item["weights_bytes"]
        for item in json.loads(devmap("plan", toy("qwen2"), "--max-memory", "0:1GB", "--json").stdout)["devices"]
    )
    assert devmap("plan", toy("qwen2"), "--max-memory", f"0:{size}B", "--weights-only").exit_code == 0
    done = devmap("check", "--map", "map.json")
    assert (done.exit_code, done.stderr) == (0, "")
    assert (
        "the map's budgets cap weights alone (--weights-only) and limit nothing here; --max-memory would" in done.stdout
    )
    assert devmap("check", "--map", "map.json", "--max-memory", f"0:{size}B").exit_code == 1


def test_no_plan_is_hinted_at_where_a_budget_is_missing(devmap: Run, toy: MakeToy) -> None:
    arguments = ("check", "--map", write(WHOLE), "--model", toy("qwen2"), "--prompt-tokens", "4096")
    done = devmap(*arguments, "--max-memory", "0:4MiB,7:1GiB")
    assert (done.exit_code, done.stderr) == (1, "")
    assert "\nthe map puts nothing on GPU 7\n" in done.stdout
    assert "\nno budget is given for GPU 1, so any size fits there\n" in done.stdout


def test_a_bare_map_says_nothing_of_dtype_and_quantization(devmap: Run, toy: MakeToy) -> None:
    arguments = ("check", "--map", write({"": 0}), "--model", toy("qwen2"), *SHORT, "--json")

    def weights_bytes(*options: str) -> int:
        size: int = json.loads(devmap(*arguments, *options).stdout)["devices"][0]["phases"][0]["weights_bytes"]
        return size

    assert weights_bytes("--quantize", "nf4") < weights_bytes() < weights_bytes("--dtype", "float32")


def test_what_transformers_refuses_is_not_rehearsed(devmap: Run, toy: MakeToy) -> None:
    arguments = ("check", "--map", write({**WHOLE, "lm_head": "cpu"}), "--model", toy("qwen2"), *SHORT)
    done = devmap(*arguments, "--quantize", "int8")
    assert done.exit_code == 1
    assert "run-fails" not in done.stdout
    assert "not rehearsed, so only weights are known: quantized weights are where they cannot run" in done.stdout


def test_a_map_of_plan_says_how_its_model_is_loaded(devmap: Run, toy: MakeToy) -> None:
    assert devmap("plan", toy("qwen2"), "--max-memory", "0:60MB", *SHORT).exit_code == 0
    done = devmap("check", "--map", "map.json", "--dtype", "float32")
    assert done.exit_code == 2
    assert "devmap plan" in done.hint
    assert "--dtype float32" in done.hint


def test_the_prompt_is_by_default_no_longer_than_the_model_takes(devmap: Run, toy: MakeToy) -> None:
    arguments = ("check", "--map", write({"": 0}), "--model", toy("opt"), "--max-new-tokens", "8")
    done = devmap(*arguments)
    assert done.exit_code == 0
    assert "(24 + 8 tokens)" in done.stdout
    assert devmap(*arguments, "--prompt-tokens", "25").exit_code == 1


def test_a_narrow_terminal_shows_every_figure(devmap: Run, toy: MakeToy, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("check", "--map", write(WHOLE), "--model", toy("qwen2"), *SHORT, "--max-memory", "0:1GB,1:1GB")
    wide = devmap(*arguments).stdout
    monkeypatch.setenv("COLUMNS", "50")
    narrow = devmap(*arguments).stdout
    assert max(map(len, narrow.splitlines())) <= 50
    assert "…" not in narrow
    told = " ".join(narrow.split())
    rows = [line.split("  ") for line in wide.splitlines() if line.startswith(("GPU", "      "))]
    figures = {cell.strip() for row in rows for cell in row if cell.strip().endswith("B") and cell.strip() != "0 B"}
    assert figures
    assert all(figure in told for figure in figures)


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (("--map", "map.json"), "the map does not name its model", "--model"),
        (("--map", "none.json"), "none.json does not exist", "devmap plan"),
        (("--map", "map.json", "-o", "x.json"), "--fix is not given", "add --fix"),
        (("--map", "map.json", "--fix", "-o", "map.json"), "--fix does not write over map.json", "another file"),
        (("--map", "-", "--fix"), "there is no file beside standard input", "-o"),
        (("--map", "map.json", "--fix", "-o", "-", "--json"), "both want standard output", "file"),
        (("--map", "map.json", "--image", "12"), "--image: '12' is not WIDTHxHEIGHT", "1024x768"),
        (("--map", "map.json", "--video", "64x64"), "--video: '64x64' is not WIDTHxHEIGHTxFRAMES", "1280x720x16"),
        (("--map", "map.json", "--attention", "x"), "--attention: 'x'", "sdpa"),
        (("--map", "map.json", "--attention", "flash_attention_3"), "none that a rehearsal knows", "--attention sdpa"),
        (("--map", "map.json", "--max-memory", "0:10"), "no unit", "0:10GB"),
    ],
)
def test_a_wrong_request(devmap: Run, arguments: tuple[str, ...], error: str, hint: str) -> None:
    write(WHOLE)
    done = devmap("check", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert error in done.error
    assert hint in done.hint


def test_images_for_a_model_without_eyes(devmap: Run, toy: MakeToy) -> None:
    done = devmap("check", "--map", write(WHOLE), "--model", toy("qwen2"), *SHORT, "--image", "64x64")
    assert done.exit_code == 2
    assert "image" in done.error


def test_a_vision_model_is_rehearsed_with_its_image(devmap: Run, toy: MakeToy) -> None:
    arguments = ("check", "--map", write({"": 0}), "--model", toy("qwen2_5_vl"), *SHORT, "--json")
    with_image = json.loads(devmap(*arguments, "--image", "112x56").stdout)
    without = json.loads(devmap(*arguments).stdout)
    assert with_image["workload"]["images"] == [[56, 112]]
    with_video = json.loads(devmap(*arguments, "--video", "112x56x4").stdout)
    assert with_video["workload"]["videos"] == [[56, 112, 4]]
    assert with_video["passed"]
    assert with_image["passed"]
    assert without["workload"]["images"] == []
    assert with_image["devices"][0]["phases"][1] != without["devices"][0]["phases"][1]


def test_the_same_check_says_the_same(devmap: Run, toy: MakeToy) -> None:
    arguments = ("check", "--map", write(FORGETFUL), "--model", toy("qwen2"), *SHORT, "--json")
    assert devmap(*arguments).stdout == devmap(*arguments).stdout


def test_a_wrong_request_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from devmap_cli.cli import invoke;"
        "invoke(['check', '--map', 'none.json']); print('torch' in sys.modules)"
    )
    assert run_python("-c", code, cwd=tmp_path).stdout.strip() == "False"
