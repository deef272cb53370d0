"""What `devmap plan` answers beside a plan: all strategies, how many cards, the largest workload, ways out."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from devmap_cli.planning.strategies import STRATEGIES
from devmap_cli.units import format_bytes
from tests.support.processes import Outcome

MakeToy = Callable[..., Path]
Run = Callable[..., Outcome]
# 8 layers of 243 million parameters, an embedding and a head of 131 million: 4.4 GB in 2 bytes
BILLIONS = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 20_000,
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def model(toy: MakeToy) -> Path:
    """A model of the size that people have."""
    return toy("qwen2", **BILLIONS)


def rerun(devmap: Run, command: str) -> Outcome:
    """Run a command that a hint gave."""
    words = shlex.split(command)
    assert words[0] == "devmap"
    return devmap(*words[1:])


class TestAllStrategies:
    def test_a_row_for_each_and_no_map(self, devmap: Run, model: Path) -> None:
        done = devmap("plan", model, "--gpus", "2xT4", "--strategy", "all")
        assert (done.exit_code, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert "GPU 0 T4" in lines[0]
        assert "tokens/s" in lines[0]
        assert [line.split()[0] for line in lines[1 : len(STRATEGIES) + 1]] == list(STRATEGIES)
        assert not list(Path().iterdir())

    def test_as_data_each_is_what_its_own_plan_says(self, devmap: Run, model: Path) -> None:
        budgets = ("--max-memory", "0:3.5GB,1:4GB")
        found = json.loads(devmap("plan", model, *budgets, "--strategy", "all", "--json").stdout)
        assert found["format"] == "devmap.compare/1"
        for row in found["strategies"]:
            alone = json.loads(devmap("plan", model, *budgets, "--strategy", row["strategy"], "--json").stdout)
            assert [item["peak_bytes"] for item in row["devices"]] == [item["peak_bytes"] for item in alone["devices"]]
            assert row["highest_use"] == pytest.approx(
                max(item["peak_bytes"] / item["budget_bytes"] for item in alone["devices"]), abs=1e-4
            )

    def test_none_fits(self, devmap: Run, model: Path) -> None:
        done = devmap("plan", model, "--max-memory", "0:1GB", "--strategy", "all")
        assert done.exit_code == 1
        assert done.stdout.count("does not fit on GPU 0, missing ") == len(STRATEGIES)
        found = json.loads(devmap("plan", model, "--max-memory", "0:1GB", "--strategy", "all", "--json").stdout)
        assert {row["device"] for row in found["strategies"]} == {0}

    def test_it_writes_nothing_so_output_is_refused(self, devmap: Run, model: Path) -> None:
        done = devmap("plan", model, "--max-memory", "0:9GB", "--strategy", "all", "-o", "map.json")
        assert done.exit_code == 2
        assert "--strategy balanced" in done.stderr


class TestHowMany:
    def test_fewer_are_not_enough(self, devmap: Run, model: Path) -> None:
        heavy = ("--batch-size", "8", "--dtype", "float16")
        done = devmap("plan", model, "--gpus", "P4", "--how-many", *heavy)
        assert done.exit_code == 0
        (line,) = (line for line in done.stdout.splitlines() if "needed" in line)
        count, _, rest = line.partition(" × ")
        card = rest.partition(" needed")[0]
        assert int(count) > 1
        devices = json.loads(Path("map.json").read_text())["devices"]
        assert len(devices) == int(count)
        again = ("plan", model, "--gpus", f"{int(count) - 1}x{card}", *heavy)
        assert devmap(*again, "-o", "no.json").exit_code == 1

    @pytest.mark.parametrize(
        ("options", "hint"),
        [(["--how-many"], "--gpus T4 --how-many"), (["--gpus", "T4,A10", "--how-many"], "--gpus 'T4'")],
    )
    def test_one_kind_of_card_is_needed(self, devmap: Run, toy: MakeToy, options: list[str], hint: str) -> None:
        done = devmap("plan", toy("qwen2"), *options)
        assert done.exit_code == 2
        assert hint in done.stderr


class TestSolve:
    def test_the_longest_prompt(self, devmap: Run, model: Path) -> None:
        budgets = ("--max-memory", "0:3.5GB,1:3.5GB")
        done = devmap("plan", model, *budgets, "--solve", "context")
        assert done.exit_code == 0
        (line,) = (line for line in done.stdout.splitlines() if "tokens of prompt" in line)
        tokens = json.loads(Path("map.json").read_text())["workload"]["prompt_tokens"]
        assert re.fullmatch(rf"{tokens:,} tokens of prompt fit, {tokens + 1:,} do not: GPU \d binds, .* missing", line)
        assert devmap("plan", model, *budgets, "--prompt-tokens", str(tokens + 1), "-o", "no.json").exit_code == 1
        assert devmap("check", "--map", "map.json").exit_code == 0

    @pytest.mark.slow
    def test_a_handful_of_rehearsals_and_none_that_was_there(
        self, devmap: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DEVMAP_CACHE", str(tmp_path / "cache"))
        options = ("plan", model, "--max-memory", "0:8GB", "-o", "no.json")
        assert devmap(*options).exit_code == 0
        profiles = tmp_path / "cache" / "profiles"
        (before,) = profiles.iterdir()
        assert " do not: GPU 0 binds, " in devmap(*options, "--solve", "context").stdout
        assert before in profiles.iterdir()
        assert len(list(profiles.iterdir())) <= 8

    def test_a_quantized_cache_takes_lengths_that_divide(self, devmap: Run, toy: MakeToy) -> None:
        # 2 heads of 16 numbers: an odd number of tokens is no whole number of groups of 64
        options = ("--max-memory", "0:40MB", "--kv-dtype", "int4", "--solve", "context")
        done = devmap("plan", toy("qwen2", max_position_embeddings=1000), *options)
        assert (done.exit_code, done.stderr) == (0, "wrote map.json\n")
        tokens = json.loads(Path("map.json").read_text())["workload"]["prompt_tokens"]
        assert tokens % 64 == 0
        assert f"{tokens:,} tokens of prompt " in done.stdout

    @pytest.mark.slow
    def test_where_the_model_ends(self, devmap: Run, model: Path) -> None:
        done = devmap("plan", model, "--gpus", "H100", "--solve", "context", "--max-new-tokens", "1000")
        assert "19,000 tokens of prompt at most: the model ends there" in done.stdout

    @pytest.mark.slow
    def test_batch(self, devmap: Run, model: Path) -> None:
        options = ("--max-memory", "0:8GB", "--prompt-tokens", "512", "--max-new-tokens", "64")
        assert devmap("plan", model, *options, "--solve", "batch").exit_code == 0
        size = json.loads(Path("map.json").read_text())["workload"]["batch_size"]
        assert devmap("plan", model, *options, "--batch-size", str(size + 1), "-o", "no.json").exit_code == 1

    def test_images_need_one(self, devmap: Run, toy: MakeToy) -> None:
        done = devmap("plan", toy("qwen2_5_vl"), "--max-memory", "0:8GB", "--solve", "images")
        assert done.exit_code == 2
        assert "--image 1024x768" in done.stderr


class TestWaysOut:
    @pytest.mark.parametrize("meaning", [[], ["--weights-only"]], ids=["all", "weights"])
    def test_weights_that_need_an_accelerator_are_offloaded_nowhere(
        self, devmap: Run, toy: MakeToy, meaning: list[str]
    ) -> None:
        folder = toy("qwen2", quantization_config={"quant_method": "awq", "bits": 4, "group_size": 32})
        done = devmap("plan", folder, "--max-memory", "0:50KB,cpu:1GB", *meaning)
        assert done.exit_code == 1
        assert "awq weights run on accelerators only" in done.stderr
        (_, hint) = done.stderr.splitlines()
        for way in hint.removeprefix("hint: ").split("; or "):
            command = shlex.split(way)[1:]
            assert devmap(*command).exit_code == 0
            devices = {
                item["device"] for item in json.loads(Path("map.json").read_text())["devices"] if item["weights_bytes"]
            }
            assert devices == {0}

    def test_no_more_ram_than_needed(self, devmap: Run, model: Path) -> None:
        done = devmap("plan", model, "--max-memory", "0:4GB", "--prompt-tokens", "1000", "--json")
        (way,) = (way for way in json.loads(done.stdout)["ways_out"] if "cpu:" in way)
        assert rerun(devmap, way).exit_code == 0
        size = float(way.partition("cpu:")[2].partition("GB")[0])
        less = way.replace(f"cpu:{size:g}GB", f"cpu:{size - 0.1:.1f}GB")
        assert less != way
        assert rerun(devmap, less).exit_code == 1

    def test_what_was_given_is_repeated_as_it_was(self, devmap: Run, model: Path) -> None:
        given = "--reserve 0=25% --no-offload --pin lm_head=0 --strategy sequential"
        done = devmap("plan", model, "--gpus", "RTX 3060 12GB", "--batch-size", "16", *given.split(), "--json")
        ways = json.loads(done.stdout)["ways_out"]
        assert ways
        for way in ways:
            assert set(given.split()) <= set(way.split())
            assert "cpu" not in way
            assert rerun(devmap, way).exit_code == 0, way

    def test_disk_needs_something_that_computes(self, devmap: Run, model: Path) -> None:
        done = devmap("plan", model, "--max-memory", "cpu:100MB,disk:20GB")
        assert done.exit_code == 1
        assert ", cpu needs " in done.error
        assert rerun(devmap, done.hint).exit_code == 0

    @pytest.mark.parametrize("budgets", ["0:2GB,1:2GB", "0:2GB,cpu:1GB", "cpu:300MB,disk:20GB"])
    def test_figures_add_up_and_are_enough(self, devmap: Run, model: Path, budgets: str) -> None:
        done = devmap("plan", model, "--max-memory", budgets, "--json")
        answer = json.loads(done.stdout)
        assert answer["needed_bytes"] - answer["budget_bytes"] == answer["missing_bytes"] > 0
        label = f"GPU {answer['device']}" if isinstance(answer["device"], int) else answer["device"]
        assert f"{label} needs {format_bytes(answer['needed_bytes'])}" in done.error
        sizes = dict(item.split(":") for item in budgets.split(","))
        grown = {**sizes, str(answer["device"]): f"{answer['needed_bytes']}B"}
        enough = ",".join(f"{device}:{size}" for device, size in grown.items())
        assert devmap("plan", model, "--max-memory", enough).exit_code == 0

    def test_no_number_of_cards(self, devmap: Run, model: Path) -> None:
        options = ("--attention", "eager", "--prompt-tokens", "18000", "--batch-size", "4")
        done = devmap("plan", model, "--gpus", "P4", "--how-many", *options)
        assert done.exit_code == 1
        assert "does not fit on any number of these cards: " in done.error
        assert "model.layers.0 alone takes" in done.error
        for way in done.hint.split("; or "):
            assert "--gpus P4" in way
            assert "--how-many" in way
            assert rerun(devmap, way).exit_code == 0, way

    def test_each_command_of_the_hint_fits(self, devmap: Run, model: Path) -> None:
        done = devmap("plan", model, "--max-memory", "0:4GB", "--prompt-tokens", "1000", "--strategy", "balanced")
        assert done.exit_code == 1
        assert "missing" in done.stderr
        assert not Path("map.json").exists()
        hint = done.stderr.partition("hint: ")[2].strip()
        commands = hint.split("; or ")
        assert any("--quantize nf4" in command for command in commands)
        assert any("1:4GB" in command for command in commands)
        assert any("cpu:" in command for command in commands)
        for command in commands:
            assert rerun(devmap, command).exit_code == 0, command

    def test_a_shorter_prompt(self, devmap: Run, model: Path) -> None:
        done = devmap("plan", model, "--max-memory", "0:6.5GB", "--prompt-tokens", "16000", "--no-offload", "--json")
        assert done.exit_code == 1
        ways = json.loads(done.stdout)["ways_out"]
        assert "--prompt-tokens" in ways[0]
        assert rerun(devmap, ways[0]).exit_code == 0
        assert not any("cpu:" in way for way in ways)

    def test_one_more_card(self, devmap: Run, model: Path) -> None:
        done = devmap("plan", model, "--gpus", "RTX 3060 12GB", "--batch-size", "20")
        assert done.exit_code == 1
        assert "--gpus '2xRTX 3060 12GB'" in done.stderr.partition("hint: ")[2]

    def test_bfloat16_on_a_card_before_ampere(self, devmap: Run, model: Path) -> None:
        done = devmap("plan", model, "--gpus", "T4", "--prompt-tokens", "8000")
        assert done.exit_code == 1
        assert "--dtype float16" in done.stderr


def test_workload_options_reach_the_map(devmap: Run, toy: MakeToy) -> None:
    options = ("--image", "64x32", "--image", "32x32", "--prompt-tokens", "100", "--attention", "eager")
    done = devmap("plan", toy("qwen2_5_vl"), "--max-memory", "0:200MB", *options, "--json")
    workload = json.loads(done.stdout)["workload"]
    assert workload["images"] == [[32, 64], [32, 32]]
    assert (workload["attention"], workload["prompt_tokens"]) == ("eager", 100)


def test_the_default_prompt_is_no_longer_than_the_model(devmap: Run, toy: MakeToy) -> None:
    done = devmap("plan", toy("qwen2"), "--max-memory", "0:100MB", "--json")
    workload = json.loads(done.stdout)["workload"]
    assert workload["prompt_tokens"] + workload["max_new_tokens"] == 256


def test_the_default_prompt_has_room_for_images(devmap: Run, toy: MakeToy) -> None:
    folder = toy("qwen2_5_vl")
    images = [option for _ in range(9) for option in ("--image", "448x448")]
    document = json.loads(devmap("plan", folder, "--max-memory", "0:900MB", *images, "--json").stdout)
    assert document["workload"]["prompt_tokens"] > 9 * 256
    given = ("--prompt-tokens", "100")
    refused = devmap("plan", folder, "--max-memory", "0:900MB", *images, *given)
    assert refused.exit_code == 2
    assert "--prompt-tokens" in refused.stderr.partition("hint: ")[2]


def test_weights_for_gpus_only_are_not_offloaded(devmap: Run, toy: MakeToy) -> None:
    folder = toy("qwen2", **BILLIONS)
    done = devmap("plan", folder, "--max-memory", "0:1GB,cpu:30GB", "--quantize", "int8")
    assert done.exit_code == 1
    assert "int8 weights run on accelerators only" in done.stderr


def test_images_until_the_device_or_the_model_ends(devmap: Run, toy: MakeToy) -> None:
    done = devmap("plan", toy("qwen2_5_vl"), "--max-memory", "0:60MB", "--image", "56x56", "--solve", "images")
    assert done.exit_code == 0
    assert "images in a prompt at most: " in done.stdout
    workload = json.loads(Path("map.json").read_text())["workload"]
    assert f"{len(workload['images']):,} images in a prompt at most" in done.stdout


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["-o", "r.svg", "--report", "r.svg"], "another file"),
        (["--strategy", "all", "--report", "r.svg"], "name one strategy"),
        (["--report", "no/such/folder/r.svg"], "mkdir -p 'no/such/folder'"),
        (["--image", "100x100"], "leave out --image"),
        (["--gpus", "T4", "--attention", "flash_attention_2"], "--attention sdpa"),
        (["--gpus", "T4", "--pin", "lm_head=cpu"], "devices with a budget: 0"),
    ],
)
def test_options_that_do_not_go_together(devmap: Run, toy: MakeToy, options: list[str], hint: str) -> None:
    budgets = [] if "--gpus" in options else ["--max-memory", "0:99MB"]
    done = devmap("plan", toy("qwen2"), *budgets, *options)
    assert done.exit_code == 2
    assert hint in done.stderr
    assert not list(Path().iterdir())
