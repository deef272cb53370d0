"""Placements that people had trouble with, planned by devmap: who holds what, in sizes worked out by hand.

Each test names what was reported; sizes in GiB unless said otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from devmap_cli.model.load import load_spec
from devmap_cli.planning.nouns import Infeasible, Placement
from tests.support.planned import GIB, SHORT, Planned, Planner, needs_corpus
from tests.support.processes import Outcome

Run = Callable[..., Outcome]
QWEN2_VL, QWEN2_5_VL = "Qwen__Qwen2-VL-7B-Instruct", "Qwen__Qwen2.5-VL-7B-Instruct"
TEXT_LAYERS = "model.language_model.layers"


@pytest.fixture
def planner(devmap: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planner:
    monkeypatch.chdir(tmp_path)
    return Planner(devmap, tmp_path / "models")


def cards(count: int, size: str) -> str:
    return ",".join(f"{index}:{size}" for index in range(count))


@needs_corpus
class TestQwen2VLOnThreeCards:
    """15.4 in all: the vision tower 1.26, embedding and head 1.02 each, 28 layers of 0.434.

    A third is 5.15, so that GPU 0 has room for 6 or 7 layers beside the tower and the embedding. The report had
    22, 3 and 3 GB measured, and a video that ran out of memory.
    """

    @pytest.mark.slow
    def test_an_image(self, planner: Planner) -> None:
        planned = planner.plan(QWEN2_VL, "--max-memory", cards(3, "24GB"), "--image", "1024x768")
        first, second, third = planned.num_layers(TEXT_LAYERS)
        assert first in (6, 7)
        assert {second, third} <= {9, 10, 11, 12}
        assert first + second + third == 28
        assert {planned.device_map[name] for name in ("model.visual", f"{TEXT_LAYERS[:-7]}.embed_tokens")} == {0}
        assert sum(planned.gib("weights")) == pytest.approx(15.44, rel=0.01)
        assert max(planned.uses) < 1.15 * min(planned.uses)
        assert "image 1024x768" in planned.text

    @pytest.mark.slow
    def test_a_video_takes_more_of_the_card_with_the_vision_tower(self, planner: Planner) -> None:
        options = ("--max-memory", cards(3, "24GB"), "--prompt-tokens", 8192)
        planned = planner.plan(QWEN2_VL, *options, "--video", "1280x720x10")
        assert "video 1280x720x10" in planned.text
        assert planned.gib("activation")[0] > 1.1 * max(planned.gib("activation")[1:])


@pytest.mark.slow
@needs_corpus
@pytest.mark.parametrize("model", [QWEN2_VL, QWEN2_5_VL])
def test_every_part_of_a_vision_model_is_placed_so_that_its_map_runs(devmap: Run, planner: Planner, model: str) -> None:
    # reported: embeddings on GPU 1 and the image mask on GPU 0, and rotary embeddings that no key names
    done = planner.run(model, "--max-memory", cards(2, "12GB"), "--image", "448x448", *SHORT[2:])
    assert done.exit_code == 0, done.stderr
    device_map = json.loads(Path("map.json").read_text())["device_map"]
    spec = load_spec(str(planner.path(model)))
    for tensor, _ in spec.tensors():
        assert any(tensor.startswith(f"{key}.") for key in device_map), tensor
    if model == QWEN2_5_VL:
        return  # its plan was rehearsed already
    checked = devmap("check", "--map", "map.json", "--json")
    assert (checked.exit_code, json.loads(checked.stdout)["findings"]) == (0, [])


class TestInternVL:
    """A vision tower of 0.3 B or of 6 B parameters (0.57 or 11.0), and the published "GPU 0 counts as half"."""

    @pytest.mark.slow
    def test_26b_on_three_cards_and_not_on_one(self, planner: Planner) -> None:
        planned = planner.plan("internvl2-26b", "--max-memory", cards(3, "23.65GiB"), *SHORT)
        # tower 11.0, embedding and head 1.06 each, 48 layers of 0.727, projector 0.2: 48.2
        assert sum(planned.gib("weights")) == pytest.approx(48.2, rel=0.02)
        assert planned.gib("weights") == pytest.approx([16.1] * 3, rel=0.06)
        refusal = planner.refusal("internvl2-26b", "0:23.65GiB")
        assert refusal.needed_bytes > 47.5 * GIB

    @pytest.mark.parametrize(
        ("model", "on_first"),
        [("internvl2-8b", range(14, 17)), pytest.param("internvl2-26b", range(14, 18), marks=pytest.mark.slow)],
    )
    def test_the_tower_counts_by_its_bytes(self, planner: Planner, model: str, on_first: range) -> None:
        options = (model, "--max-memory", cards(2, "40GB"), "--weights-only")
        ours = planner.plan(*options)
        assert ours.num_layers(TEXT_LAYERS)[0] in on_first
        assert ours.uses[0] == pytest.approx(ours.uses[1], abs=0.02)
        assert max(ours.uses) < max(planner.plan(*options, "--weight", "0=0.5").uses) - 0.05

    @pytest.mark.slow
    def test_76b_on_two_cards(self, planner: Planner) -> None:
        # the published formula puts 53 layers of 1.59 on GPU 1, 84, and the card has 74.5; half of all 143 is 71.6
        planned = planner.plan("internvl2-76b", "--max-memory", cards(2, "80GB"), "--weights-only")
        assert planned.gib("weights") == pytest.approx([71.6, 71.6], abs=1.7)
        assert planned.num_layers(TEXT_LAYERS)[1] in (43, 44)
        assert "model.language_model.rotary_emb" in planned.device_map


@pytest.mark.slow
@needs_corpus
def test_mixtral_on_eight_cards_leaves_none_empty(planner: Planner) -> None:
    # reported: four or five layers on GPUs 0 to 6, none on GPU 7
    planned = planner.plan(
        "mistralai__Mixtral-8x7B-v0.1", "--max-memory", cards(8, "80GB"), "--strategy", "balanced", *SHORT
    )
    assert planned.num_layers("model.layers") == [4] * 8


@needs_corpus
def test_gemma_3_keeps_its_tied_embedding_together_and_counts_it_once(planner: Planner) -> None:
    planned = planner.plan("google__gemma-3-27b-it", "--max-memory", cards(4, "19.7GiB"), "--weights-only")
    assert planned.device_map["lm_head"] == planned.device_map["model.language_model.embed_tokens"]
    # 27.43 B parameters of 2 bytes; the embedding of 262,208 rows of 5,376 would be 2.63 more
    assert sum(planned.gib("weights")) == pytest.approx(51.1, rel=0.005)


def test_gpt_bigcode_has_no_block_cut(planner: Planner) -> None:
    planned = planner.plan("starcoder", "--max-memory", cards(2, "20GB"), "--weights-only")
    assert sum(planned.num_layers("transformer.h")) == 40
    assert not [key for key in planned.device_map if key.startswith("transformer.h.") and key.count(".") > 2]


class TestGPT2:
    """Float32: 12 blocks of 27.0 MiB, the tied embedding 147.2 MiB, positions 3 MiB; two GPUs of 400 MiB and RAM."""

    BUDGETS = "0:400MiB,1:400MiB,cpu:30GiB"

    @pytest.mark.parametrize("options", [("--weights-only",), SHORT], ids=["weights", "a short prompt"])
    def test_both_gpus_hold_it_without_ram(self, planner: Planner, options: tuple[object, ...]) -> None:
        planned = planner.plan("gpt2", "--max-memory", self.BUDGETS, *options)
        assert planned.num_layers("transformer.h") == [3, 9, 0]
        assert [round(size * 1024, 1) for size in planned.gib("weights")] == [231.4, 243.3, 0]
        assert all(key.count(".") <= 2 for key in planned.device_map)


def test_gpt_neo_without_a_dtype(planner: Planner) -> None:
    planned = planner.plan("gpt-neo-2.7B", "--max-memory", cards(4, "24GB"), "--weights-only")
    assert "config.json states no dtype: counted and loaded as float32" in planned.text
    # 2.65 B parameters of 4 bytes, 10.6 GB, and masks of 2048² in 32 layers, 0.13 GB
    assert sum(planned.gib("weights")) * GIB == pytest.approx(10.74e9, rel=0.005)
    assert planned.gib("weights") == pytest.approx([2.5] * 4, abs=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "fits"), [(8, False), (10, False), (11, True)])
def test_opt_66b_on_t4s(planner: Planner, count: int, fits: bool) -> None:
    # 131.4 GB are 8.4 T4s of 14.56 GiB; a layer is 1.9, so that beside cache, activations and runtime a T4 has six
    answer = planner.answer("opt-66b", cards(count, "14.56GiB"), tokens=1984)
    assert isinstance(answer, Placement if fits else Infeasible)
    if isinstance(answer, Placement):
        (shared,) = [block for block in answer.blocks if "lm_head" in block.fqns]
        assert "model.decoder.embed_tokens" in shared.fqns


@pytest.mark.parametrize(
    ("max_memory", "places"), [("cpu:1GB,disk:10GB", {"cpu"}), ("0:600MB,cpu:1GB", {0, "cpu"})], ids=["cpu", "gpu"]
)
def test_opt_350m_with_its_projections(planner: Planner, max_memory: str, places: set[int | str]) -> None:
    planned = planner.plan("opt-350m", "--max-memory", max_memory, *SHORT)
    decoder = "model.decoder"
    assert {f"{decoder}.project_in", f"{decoder}.project_out"} <= planned.device_map.keys()
    assert planned.device_map["lm_head"] == planned.device_map[f"{decoder}.embed_tokens"]
    assert set(planned.device_map.values()) <= places


@needs_corpus
class TestBudgetsAsExamplesWriteThem:
    def test_two_gpus_and_ram(self, planner: Planner) -> None:
        planned = planner.plan("Qwen__Qwen2-7B", "--max-memory", "0:10GB,1:10GB,cpu:30GB", "--weights-only")
        assert [item["device"] for item in planned.document["devices"]] == [0, 1, "cpu"]
        assert [item["budget_bytes"] for item in planned.document["devices"]] == [10**10, 10**10, 3 * 10**10]
        assert planned.num_layers("model.layers") == [14, 14, 0]

    @pytest.mark.slow
    def test_mps(self, planner: Planner) -> None:
        planned = planner.plan("mistralai__Mistral-7B-v0.1", "--max-memory", "mps:18GB,cpu:64GB", *SHORT)
        assert set(planned.device_map.values()) == {"mps"}
        assert planned.gib("weights")[0] == pytest.approx(13.5, rel=0.01)

    def test_a_model_with_code_of_its_own_is_not_run_unasked(self, planner: Planner) -> None:
        done = planner.run("Qwen__Qwen-7B-Chat", "--max-memory", "0:10GB,1:10GB,cpu:30GB")
        assert done.exit_code == 2
        assert "--trust-remote-code" in done.hint


@pytest.mark.slow
@needs_corpus
def test_llama_2_13b_by_every_strategy(planner: Planner) -> None:
    # published: auto 18/16/15/17, balanced 16/16/16/16, balanced_low_0 12/19/19/18, and 40/0.5/0.5/0.5 out of memory
    done = planner.run(
        "meta-llama__Llama-2-13b-hf", "--gpus", "4xA100-40GB", "--strategy", "all", "--dtype", "float32", "--json"
    )
    assert done.exit_code == 0
    rows = {row["strategy"]: row for row in json.loads(done.stdout)["strategies"]}
    assert rows.keys() == {"auto", "balanced", "balanced_low_0", "sequential", "fewest"}
    peaks = {name: [item["peak_bytes"] / GIB for item in row["devices"]] for name, row in rows.items()}
    assert all(item["peak_bytes"] <= item["budget_bytes"] for row in rows.values() for item in row["devices"])
    # 13.0 B parameters of 4 bytes are 48.5, a quarter 12.1, and cache, activations and runtime some 2
    assert peaks["balanced"] == pytest.approx([14.3] * 4, abs=0.5)
    assert peaks["balanced_low_0"][0] == 0
    assert peaks["balanced_low_0"][1:] == pytest.approx([18.7] * 3, abs=0.6)
    assert peaks["sequential"][0] > 37
    assert peaks["sequential"][2:] == [0, 0]


@pytest.mark.slow
def test_bloom_7b1_leaves_gpu_0_to_others(planner: Planner) -> None:
    planned: Planned = planner.plan(
        "bloom-7b1", "--strategy", "balanced_low_0", "--max-memory", "0:20GiB,1:20GiB", *SHORT
    )
    assert set(planned.device_map.values()) == {1}
    assert planned.gib("weights") == pytest.approx([0, 13.2], abs=0.1)
    assert "GPU 0 left unused: the other accelerators hold all" in planned.text
