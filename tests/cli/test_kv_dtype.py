"""`--kv-dtype` of plan and check: what it saves, where it is named, and which models cannot have it.

The toy keeps 2 heads of 16 in each of 4 layers: keys and values are 64 bytes a token and layer each in bfloat16, and
64·4/8/2 + 2 = 18 in int4, with two bytes of scale and of shift for each 64 numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from devmap_cli.cli.workload import KvDtype
from devmap_cli.model.kv_dtypes import KV_DTYPES
from tests.support.processes import Outcome

MakeToy = Callable[..., Path]
Run = Callable[..., Outcome]
LONG: dict[str, object] = {"max_position_embeddings": 1 << 17}
SHORT = ("--prompt-tokens", "64", "--max-new-tokens", "8")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def planned(devmap: Run, model: Path, *options: object) -> dict[str, Any]:
    done = devmap("plan", model, "--max-memory", "0:2GB", "--json", *options)
    assert done.exit_code == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_the_command_line_has_the_names_of_the_format() -> None:
    assert tuple(item.value for item in KvDtype) == KV_DTYPES


def test_a_plan_says_what_its_cache_is_kept_in(devmap: Run, toy: MakeToy) -> None:
    options = ("--prompt-tokens", "16384", "--max-new-tokens", "2")
    model = toy("qwen2", **LONG)
    plain, small = (planned(devmap, model, *options, "--kv-dtype", name) for name in ("auto", "int4"))
    assert "kv_dtype" not in plain["workload"]
    assert small["workload"]["kv_dtype"] == "int4"
    caches = [document["devices"][0]["kv_cache_bytes"] for document in (small, plain)]
    assert caches[0] / caches[1] == pytest.approx(18 / 64, abs=0.01)
    assert small["devices"][0]["peak_bytes"] < plain["devices"][0]["peak_bytes"]


def test_the_notes_name_it_and_a_check_takes_it_from_the_map(devmap: Run, toy: MakeToy) -> None:
    done = devmap("plan", toy("qwen2"), "--max-memory", "0:60MB", "--kv-dtype", "fp8", *SHORT, "-o", "map.json")
    assert "predicted for 1 × (64 + 8 tokens), KV cache in fp8 by a rehearsal" in done.stdout
    assert "attention sdpa, KV cache in fp8" in devmap("check", "--map", "map.json").stdout
    assert "KV cache in int8" in devmap("check", "--map", "map.json", "--kv-dtype", "int8").stdout
    plain = json.loads(devmap("check", "--map", "map.json", "--kv-dtype", "auto", "--json").stdout)
    assert "kv_dtype" not in plain["workload"]


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("t5", {}, "no quantized cache for an encoder with a decoder"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "sliding_attention"),
    ],
)
def test_a_model_that_cannot_have_it(
    devmap: Run, toy: MakeToy, name: str, changes: dict[str, object], why: str
) -> None:
    model = toy(name, **changes)
    done = devmap("plan", model, "--max-memory", "0:60MB", "--kv-dtype", "int4", *SHORT)
    assert (done.exit_code, done.stdout, done.hint) == (2, "", "--kv-dtype auto")
    assert why in done.error
    Path("map.json").write_text(json.dumps({"": 0}))
    checked = devmap("check", "--map", "map.json", "--model", model, "--kv-dtype", "int4", *SHORT)
    assert (checked.exit_code, checked.stdout, checked.hint) == (2, "", "--kv-dtype auto")


def test_a_prompt_that_groups_do_not_divide(devmap: Run, toy: MakeToy) -> None:
    options = ("--kv-dtype", "int4", "--prompt-tokens", "63", "--max-new-tokens", "8")
    Path("map.json").write_text(json.dumps({"": 0}))
    for command in (
        ("plan", toy("qwen2"), "--max-memory", "0:60MB"),
        ("check", "--map", "map.json", "--model", toy("qwen2")),
    ):
        done = devmap(*command, *options)
        assert done.exit_code == 2
        assert "Group size (64) must be a divisor of (2016)" in done.error
        assert done.hint == "--kv-dtype auto"


def test_nothing_else_is_taken(devmap: Run, toy: MakeToy) -> None:
    done = devmap("plan", toy("qwen2"), "--max-memory", "0:60MB", "--kv-dtype", "int3")
    assert done.exit_code == 2
    assert "--kv-dtype" in done.error


@pytest.mark.slow
def test_it_is_hinted_at_where_it_is_enough(devmap: Run, toy: MakeToy) -> None:
    # 32 layers keep 32·2·64 = 4,096 bytes a token, 256 MiB for 4 sequences of 16,384 tokens, in int4 72 MiB; beside
    # them one layer at a time is dequantized, and quantized anew
    model = toy("qwen2", **LONG, num_hidden_layers=32)
    options = ("--prompt-tokens", "16384", "--max-new-tokens", "2", "--batch-size", "4")
    small, plain = (planned(devmap, model, *options, "--kv-dtype", name) for name in ("int4", "auto"))
    peaks = [document["devices"][0]["peak_bytes"] for document in (small, plain)]
    between = (7 * peaks[0] + peaks[1]) // 8
    budget = ("--max-memory", f"0:{between}B", "--no-offload")
    done = devmap("plan", model, *budget, *options)
    assert done.exit_code == 1
    assert "--kv-dtype int4" in done.hint
    assert devmap("plan", model, *budget, *options, "--kv-dtype", "int4").exit_code == 0
    smaller = devmap("plan", model, "--max-memory", "0:2MB", "--no-offload", *options, "--kv-dtype", "int2")
    assert "--kv-dtype int4" not in smaller.hint


def test_solving_for_the_prompt_finds_a_longer_one(devmap: Run, toy: MakeToy) -> None:
    model = toy("qwen2", **LONG, num_key_value_heads=4)  # each token is a group
    found = []
    for name in ("auto", "int2"):
        options = ("--max-memory", "0:700MB", "--batch-size", "16", "--no-offload", "--solve", "context")
        done = devmap("plan", model, *options, "--kv-dtype", name, "--json")
        assert done.exit_code == 0, done.stderr
        found.append(json.loads(done.stdout)["workload"]["prompt_tokens"])
    assert found[0] < found[1]
