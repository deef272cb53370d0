"""`devmap inspect`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Outcome
from tests.support.toys import TOYS

MakeToy = Callable[..., Path]
Run = Callable[..., Outcome]


def lines_of(text: str) -> dict[str, list[str]]:
    """The lines of a tree by module name, each as its cells."""
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.lstrip("├└│─ ").split("  ") if cell.strip()]
        if cells:
            rows[cells[0]] = cells[1:]
    return rows


def test_the_tree_goes_to_stdout(devmap: Run, toy: MakeToy) -> None:
    done = devmap("inspect", toy("qwen2"))
    assert (done.exit_code, done.stderr) == (0, "")
    rows = lines_of(done.stdout)
    # a layer of 30,976 parameters of 2 bytes: 60.5 KiB, four of them 247,808 of 280,768 bytes
    assert rows["layers.0-3"] == ["4 × Qwen2DecoderLayer", "30,976", "60.5 KiB each", "88.3 %", "no split"]
    assert rows["lm_head"] == ["Linear", "8,192", "16.0 KiB", "5.8 %"]
    assert rows["rotary_emb"][-1] == "buffers only"
    assert rows["total"] == ["140,352 parameters, 274.2 KiB"]
    assert rows["KV cache"] == ["512 B per token and sequence; 2.00 MiB at 4,096 tokens"] or rows["KV cache"] == [
        "512 B per token and sequence; 2.0 MiB at 4,096 tokens"
    ]


def test_ties_are_shown_and_counted_once(devmap: Run, toy: MakeToy) -> None:
    rows = lines_of(devmap("inspect", toy("gpt2")).stdout)
    assert rows["lm_head"] == ["Linear", "tied to transformer.wte.weight"]
    assert rows["tied weights"] == ["transformer.wte.weight = lm_head.weight"]
    assert rows["total"] == ["160,320 parameters, 626.2 KiB"]
    assert rows["note"][0].startswith("config.json states no dtype")


def test_depth_and_expand(devmap: Run, toy: MakeToy) -> None:
    folder = toy("qwen2")
    assert "embed_tokens" not in devmap("inspect", folder, "--depth", "1").stdout
    assert "q_proj" in devmap("inspect", folder, "--depth", "4").stdout
    expanded = lines_of(devmap("inspect", folder, "--expand").stdout)
    assert {f"layers.{index}" for index in range(4)} <= set(expanded)
    assert expanded["layers.2"] == ["Qwen2DecoderLayer", "30,976", "60.5 KiB", "22.1 %", "no split"]


def test_dtype_changes_the_sizes(devmap: Run, toy: MakeToy) -> None:
    rows = lines_of(devmap("inspect", toy("qwen2"), "--dtype", "float32").stdout)
    # 140,352 of 4 bytes and 64 of buffers
    assert rows["total"] == ["140,352 parameters, 548.3 KiB"]


def document(devmap: Run, folder: Path, *options: str) -> dict[str, Any]:
    done = devmap("inspect", folder, "--json", *options)
    assert (done.exit_code, done.stderr) == (0, "")
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


def test_json_of_one_model(devmap: Run, toy: MakeToy) -> None:
    folder = toy("gpt2")
    found = document(devmap, folder)
    tree = found.pop("tree")
    order = found.pop("execution_order")
    notes = found.pop("notes")
    layer = {"bytes_per_token": 512, "fixed_bytes": 0, "max_tokens": None}
    assert found == {
        "format": "devmap.inspect/1",
        "model": {
            "id": str(folder),
            "revision": None,
            "class": "GPT2LMHeadModel",
            "model_type": "gpt2",
            "dtype": "float32",
            "quantization": None,
        },
        "total": {"num_parameters": 160320, "num_bytes": 641280, "parameter_bytes": 641280, "buffer_bytes": 0},
        "dtypes": [{"dtype": "float32", "num_bytes": 641280}],
        "tied_weights": [["transformer.wte.weight", "lm_head.weight"]],
        "no_split_classes": ["GPT2Block"],
        "kv_cache": {
            "bytes_per_token": 1536,
            "fixed_bytes": 0,
            "layers": [{"module": f"transformer.h.{index}", **layer} for index in range(3)],
        },
    }
    assert order.index("transformer.wte") < order.index("transformer.h.0") < order.index("lm_head")
    assert len(notes) == 1
    assert tree["class"] == "GPT2LMHeadModel"
    head = tree["children"][1]
    assert (head["fqn"], head["num_bytes"], head["children"]) == ("lm_head", 0, [])
    # the matrix stands under both names, and counts at its owner
    assert head["tensors"] == [
        {"name": "lm_head.weight", "shape": [128, 64], "dtype": "float32", "num_bytes": 32768, "buffer": False}
    ]


@pytest.mark.parametrize("name", TOYS)
def test_json_adds_up(devmap: Run, toy: MakeToy, name: str) -> None:
    found = document(devmap, toy(name))
    shared = {tensor for group in found["tied_weights"] for tensor in group[1:]}
    sums = ("num_parameters", "num_bytes", "parameter_bytes", "buffer_bytes")

    def check(module: dict[str, Any]) -> None:
        own = {"num_parameters": 0, "num_bytes": 0, "parameter_bytes": 0, "buffer_bytes": 0}
        for tensor in module["tensors"]:
            if tensor["name"] not in shared:
                own["num_bytes"] += tensor["num_bytes"]
                own["buffer_bytes" if tensor["buffer"] else "parameter_bytes"] += tensor["num_bytes"]
        for child in module["children"]:
            check(child)
        for key in sums[1:]:
            assert module[key] == own[key] + sum(child[key] for child in module["children"])

    check(found["tree"])
    assert {key: found["tree"][key] for key in sums} == found["total"]
    assert sum(entry["num_bytes"] for entry in found["dtypes"]) == found["total"]["num_bytes"]
    assert found["total"]["num_parameters"] == TOYS[name].num_parameters
    assert found["total"]["parameter_bytes"] == TOYS[name].parameter_bytes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--depth", "-1"], "--depth"),
        (["--depth", "two"], "--depth"),
        (["--dtype", "int4"], "--dtype"),
        (["--no-such-option"], "--no-such-option"),
        (["another"], "another"),
    ],
)
def test_wrong_options(devmap: Run, toy: MakeToy, arguments: list[str], said: str) -> None:
    done = devmap("inspect", toy("qwen2"), *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.error
    assert done.hint == "devmap inspect --help"


def test_no_model(devmap: Run) -> None:
    done = devmap("inspect")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "MODEL" in done.error
    assert done.hint == "devmap inspect --help"


def test_an_unusable_model(devmap: Run, tmp_path: Path) -> None:
    done = devmap("inspect", tmp_path, "--json")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.error == f"{tmp_path} has no config.json"
    assert done.hint
