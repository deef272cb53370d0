"""Models that people wanted on too little, or quantized, and what is the right answer: it fits, or what is missing.

Each test names what was reported; sizes in GiB unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from devmap_cli.planning.nouns import Placement
from tests.support.planned import GIB, SHORT, Planner, needs_corpus
from tests.support.processes import Outcome

BLOOM = "bigscience__bloom"
INT8 = ("--quantize", "int8")


@pytest.fixture
def planner(devmap: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planner:
    monkeypatch.chdir(tmp_path)
    return Planner(devmap, tmp_path / "models")


@pytest.mark.slow
@needs_corpus
class TestBloom176B:
    """In int8: 70 blocks of 12·14,336² bytes, 2.30; the embedding of 250,880 rows in 16 bit, 6.70; together 167.7."""

    def test_four_unequal_cards_hold_it_without_ram(self, planner: Planner) -> None:
        budgets = "0:31GB,1:63GB,2:63GB,3:63GB,cpu:400GB"
        planned = planner.plan(BLOOM, *INT8, "--max-memory", budgets, *SHORT)
        first, *others = planned.num_layers("transformer.h")[:4]
        assert planned.num_layers("transformer.h")[4] == 0
        assert first <= 9
        assert max(others) <= 25
        assert first + sum(others) == 70
        assert planned.gib("weights")[0] == pytest.approx(6.70 + 2.30 * first, rel=0.005)
        filled = planner.plan(BLOOM, *INT8, "--max-memory", budgets, "--weights-only", "--strategy", "sequential")
        assert filled.num_layers("transformer.h") == [9, 25, 25, 11, 0]

    def test_blocks_for_each_card(self, planner: Planner) -> None:
        # chosen by people after trials, with room for a cache: 80 GB 27, 48 GB 16, 40 GB 13, 32 GB 10
        budgets = "0:80GB,1:48GB,2:40GB,3:32GB,4:80GB"
        planned = planner.plan(BLOOM, *INT8, "--max-memory", budgets, "--strategy", "sequential", *SHORT)
        counts = planned.num_layers("transformer.h")
        most = [
            int((size - embedding) / 2.30)
            for size, embedding in zip(planned.gib("budget"), [6.7, 0, 0, 0, 0], strict=True)
        ]
        assert all(count <= limit for count, limit in zip(counts, most, strict=True))
        assert all(count >= chosen for count, chosen in zip(counts[:3], [27, 16, 13], strict=True))

    def test_eight_cards_of_3_gb_do_not(self, planner: Planner) -> None:
        refusal = planner.refusal(BLOOM, ",".join(f"{index}:3GB" for index in range(8)), quantize="int8")
        together = "weights and KV cache take 168.1 GiB, and all budgets together are 22.4 GiB"
        assert refusal.reason.startswith(together)
        # one of the cards would have to hold what the seven others do not
        assert refusal.missing_bytes > (168 - 22.4) * GIB


@pytest.mark.slow
@needs_corpus
def test_llama_2_70b_in_nf4_and_the_longest_prompt(planner: Planner) -> None:
    # 69 B parameters: blocks of 4.13 bits a weight, 17.7 each half, and half a GiB of embedding or head
    planned = planner.plan(
        "meta-llama__Llama-2-70b-hf", "--quantize", "nf4", "--max-memory", "0:24GB,1:24GB", "--solve", "context"
    )
    assert planned.num_layers("model.layers") == [40, 40]
    assert planned.gib("weights") == pytest.approx([18.4, 18.4], abs=0.2)
    assert "3,840 tokens of prompt at most: the model ends there" in planned.text
    assert 20.5 < max(planned.gib("peak")) < 22.35  # measured at about 21 GB for short prompts


@pytest.mark.slow
@needs_corpus
def test_llama_2_7b_in_int8_on_a_t4(planner: Planner) -> None:
    planned = planner.plan("meta-llama__Llama-2-7b-hf", "--quantize", "int8", "--gpus", "T4", *SHORT)
    # 6.476 B weights in one byte, 0.26 B of embedding and head in two
    assert planned.gib("weights") == pytest.approx([6.53], abs=0.02)


@needs_corpus
def test_gpt_oss_without_kernels_for_mxfp4(planner: Planner) -> None:
    planned = planner.plan("openai__gpt-oss-20b", "--gpus", "2xV100-32GB", *SHORT)
    assert sum(planned.gib("weights")) == pytest.approx(39.0, abs=0.1)
    assert "without the kernels for MXFP4 transformers unpacks it" in planned.text
    assert "it takes 12.8 GiB" in planned.text


class TestVicuna13B:
    """24.2 in float16, on 24 GB and 11 GB, and on two cards of 8 GB, 7.45 each."""

    BUDGETS = "0:8GB,1:8GB"

    def test_on_unequal_cards(self, planner: Planner) -> None:
        planned = planner.plan("vicuna-13b", "--max-memory", "0:24GB,1:11GB", *SHORT)
        first, second = planned.num_layers("model.layers")
        assert (first + second, second) in {(40, 11), (40, 12), (40, 13)}
        assert planned.uses[0] == pytest.approx(planned.uses[1], abs=0.04)

    def test_not_in_16_bit(self, planner: Planner) -> None:
        refusal = planner.refusal("vicuna-13b", self.BUDGETS)
        assert refusal.reason == "weights and KV cache take 24.4 GiB, and all budgets together are 14.9 GiB"

    @pytest.mark.slow
    def test_in_int8_with_a_tiny_context_only(self, planner: Planner) -> None:
        # 12.4 of weights in 14.9, of which the runtime takes 1.25
        assert isinstance(planner.answer("vicuna-13b", self.BUDGETS, quantize="int8"), Placement)
        planner.refusal("vicuna-13b", self.BUDGETS, quantize="int8", tokens=2048)

    @pytest.mark.slow
    def test_in_nf4(self, planner: Planner) -> None:
        planned = planner.plan("vicuna-13b", "--max-memory", self.BUDGETS, "--quantize", "nf4")
        assert planned.num_layers("model.layers") == [20, 20]
        assert sum(planned.gib("weights")) == pytest.approx(7.26, abs=0.05)


def test_9_6_billion_parameters_on_a_card_of_16_gb(planner: Planner) -> None:
    # 9.605 B parameters of 2 bytes are 17.9; the runtime's share and a short prompt come on top
    refusal = planner.refusal("llama-9.6b", "0:16GB")
    assert 17.9 * GIB < refusal.needed_bytes < 19.5 * GIB
    assert refusal.needed_bytes - refusal.budget_bytes == refusal.missing_bytes
    assert refusal.budget_bytes == 16 * 10**9


@pytest.mark.slow
@needs_corpus
@pytest.mark.parametrize("meaning", [[], ["--weights-only"]], ids=["all", "weights"])
def test_awq_is_not_offloaded(planner: Planner, meaning: list[str]) -> None:
    done = planner.run("TheBloke__Llama-2-7B-AWQ", "--max-memory", "0:3GB,cpu:30GB", *SHORT, *meaning)
    assert done.exit_code == 1
    assert "awq weights run on accelerators only" in done.stderr


@pytest.mark.slow
class TestOPT30BOnOneSmallCard:
    """55.8 in float16, on 8 GB with 32 GB of RAM and a disk."""

    def test_what_is_offloaded_is_named_with_its_cost_and_a_warning(self, planner: Planner) -> None:
        planned = planner.plan(
            "opt-30b", "--gpus", "RTX-3070", "--max-memory", "cpu:32GB,disk:200GB", "--prompt-tokens", 512
        )
        on_gpu, on_cpu, on_disk = planned.num_layers("model.decoder.layers")
        assert on_gpu + on_cpu + on_disk == 48
        assert on_cpu == 25  # of 12·7,168² parameters, 1.15 each, in 29.8
        assert f"warning: {on_cpu + on_disk} of 48 layers are on cpu and disk" in planned.text
        assert "model.decoder.layers." in planned.text
        # 3.5 GB/s of a drive and 12 GB/s of PCIe for 27 GB: some 10 s, less for what is in RAM
        assert "for the weights on cpu and" in planned.text
        assert "for the weights on disk" in planned.text

    def test_a_disk_that_is_not_needed(self, planner: Planner) -> None:
        planned = planner.plan(
            "opt-30b",
            *("--gpus", "RTX-3070", "--max-memory", "cpu:64GB,disk:200GB", "--prompt-tokens", 512, "--explain"),
        )
        assert planned.num_layers("model.decoder.layers")[2] == 0
        assert "disk unused: all fits on the accelerators and cpu" in planned.text


@pytest.mark.parametrize(("max_memory", "exit_code"), [("0:3GB,cpu:30GB", 0), ("0:3GB", 1)], ids=["ram", "none"])
def test_weights_alone_on_a_card_that_is_too_small(planner: Planner, max_memory: str, exit_code: int) -> None:
    assert planner.run("gpt-neo-2.7B", "--max-memory", max_memory, "--weights-only").exit_code == exit_code


def test_strategies_for_an_answer_of_one_token(planner: Planner) -> None:
    options = ("--max-memory", "0:2GB,1:2GB", "--prompt-tokens", 128, "--max-new-tokens", 1)
    assert planner.run("gpt2", *options, "--strategy", "all").exit_code == 0
