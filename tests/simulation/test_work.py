"""Operations, bytes and kernels that a rehearsal counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from devmap_cli.simulation import trace
from devmap_cli.simulation.backend import simulated_devices
from devmap_cli.simulation.memory import UNLIMITED_BYTES
from devmap_cli.simulation.recording import record
from devmap_cli.simulation.rehearsal import Rehearsal, rehearse
from devmap_cli.simulation.shapes import Shapes
from devmap_cli.simulation.work import Work, WorkCounter
from devmap_cli.simulation.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HIDDEN, INNER, HEADS, KEY_HEADS, HEAD_SIZE, VOCABULARY, LAYERS = 256, 512, 4, 2, 64, 1000, 2
PROMPT, NEW = 512, 34
KEYS = PROMPT + NEW - 1  # the last step attends to all tokens but the one it makes
DECODER: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
}
# q and o are 256 x 256, k and v 256 x 128, the three of the MLP 256 x 512
ATTENTION_WEIGHTS = 2 * 256 * 256 + 2 * 256 * 128
MLP_WEIGHTS = 3 * 256 * 512
SCORES = 256 * 1000
EXPERTS, EXPERTS_PER_TOKEN = 8, 2


def empty(model_class: Any, config: Any) -> Any:
    with torch.device("meta"):
        return model_class(config).eval()


def llama_run(device_map: dict[str, int | str], **options: Any) -> Rehearsal:
    workload = Workload(**{"prompt_tokens": PROMPT, "max_new_tokens": NEW, "dtype": "bfloat16", **options})
    seen = rehearse(empty(LlamaForCausalLM, LlamaConfig(**DECODER)), device_map, workload, [UNLIMITED_BYTES] * 2)
    seen.raise_failure()
    return seen


def counted(run: Callable[[torch.device], object]) -> Work:
    with simulated_devices([UNLIMITED_BYTES], numbers=Shapes(lambda _: None)) as machine:
        with machine.phase("setup"):
            device = machine.devices[0].torch_device
        with machine.phase("run"):
            run(device)
        return machine.devices[0].counter.work("run")


@pytest.fixture(scope="module")
def whole() -> Iterator[Rehearsal]:
    with torch.no_grad():
        yield llama_run({"": 0})


def moved(num_bytes: int) -> Work:
    """The work of one kernel that only moves bytes."""
    return Work(0, num_bytes, 1, num_bytes)


def test_work_adds_up() -> None:
    assert Work(1, 2, 3, 1) + Work(10, 20, 30, 10) == Work(11, 22, 33, 11)


def test_a_counter_keeps_phases_apart() -> None:
    counter = WorkCounter()
    counter.add("prefill", 5, 7)
    counter.add("prefill", 0, 1)
    counter.add("decode", 2, 3)
    assert counter.work("prefill") == Work(5, 8, 2, 1)
    assert counter.work("decode") == Work(2, 3, 1)
    assert counter.work("load") == Work()


# ---------------------------------------------------------------- whole models


def test_operations_of_a_prompt(whole: Rehearsal) -> None:
    # each token meets each weight, a multiply and an add; scores are made for the last token only
    products = 2 * PROMPT * LAYERS * (ATTENTION_WEIGHTS + MLP_WEIGHTS) + 2 * SCORES
    # queries with keys, then weights with values
    attention = LAYERS * 2 * (2 * HEADS * PROMPT * PROMPT * HEAD_SIZE)
    assert whole.devices[0].work["prefill"].flops == products + attention


def test_operations_of_a_token(whole: Rehearsal) -> None:
    products = 2 * LAYERS * (ATTENTION_WEIGHTS + MLP_WEIGHTS) + 2 * SCORES
    attention = LAYERS * 2 * (2 * HEADS * KEYS * HEAD_SIZE)
    assert whole.devices[0].work["decode"].flops == products + attention


def test_bytes_of_a_token_are_weights_and_cache(whole: Rehearsal) -> None:
    weights = 2 * (LAYERS * (ATTENTION_WEIGHTS + MLP_WEIGHTS) + SCORES)  # one row of the embeddings is next to nothing
    cache = 2 * LAYERS * 2 * KEYS * KEY_HEADS * HEAD_SIZE
    # transformers' dynamic cache is read and written to append to it, then read by attention
    expected = weights + 3 * cache
    assert whole.devices[0].work["decode"].bytes_moved == pytest.approx(expected, rel=0.05)


def test_loading_is_no_work(whole: Rehearsal) -> None:
    assert whole.devices[0].work["load"] == Work()


def test_a_split_model_does_the_same_work(whole: Rehearsal) -> None:
    first = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
    seen = llama_run({**first, "model.layers.1": 1, "model.norm": 1, "lm_head": 1})
    for phase in ("prefill", "decode"):
        both = seen.devices[0].work[phase] + seen.devices[1].work[phase]
        assert both.flops == whole.devices[0].work[phase].flops
        # what is copied between devices is no kernel; inputs are moved once more
        assert both.bytes_moved == pytest.approx(whole.devices[0].work[phase].bytes_moved, rel=0.01)


def test_work_of_an_offloaded_layer_is_the_device_s(whole: Rehearsal) -> None:
    seen = llama_run({"": 0, "model.layers.1": "cpu"})
    assert seen.devices[0].work["decode"].flops == whole.devices[0].work["decode"].flops


def test_eager_attention_moves_more(whole: Rehearsal) -> None:
    eager = llama_run({"": 0}, attention="eager").devices[0].work["prefill"]
    assert eager.flops == whole.devices[0].work["prefill"].flops
    assert eager.bytes_moved > whole.devices[0].work["prefill"].bytes_moved
    assert eager.num_kernels > whole.devices[0].work["prefill"].num_kernels


def test_only_experts_with_tokens_are_read() -> None:
    config = MixtralConfig(**DECODER, num_local_experts=EXPERTS, num_experts_per_tok=EXPERTS_PER_TOKEN)
    model = empty(MixtralForCausalLM, config)
    workload = Workload(prompt_tokens=2, max_new_tokens=2, dtype="bfloat16")
    (device,) = rehearse(model, {"": 0}, workload, [UNLIMITED_BYTES]).devices
    # two tokens of two experts each, spread evenly: four of eight
    read = 2 * LAYERS * 4 * MLP_WEIGHTS
    all_others = 2 * (LAYERS * ATTENTION_WEIGHTS + SCORES)
    assert device.work["prefill"].bytes_moved == pytest.approx(read + all_others, rel=0.05)


def test_packed_weights_are_read_packed() -> None:
    from devmap_cli.model.quantization.bitsandbytes import Linear4bit, Settings4bit
    from devmap_cli.model.quantization.linear import LinearShape

    layer: Any = Linear4bit(LinearShape(4096, 4096, torch.bfloat16, None), Settings4bit.of({}, on_the_fly=True))

    def run(device: torch.device) -> None:
        for name, tensor in [*layer.named_parameters()]:
            layer._parameters[name] = torch.nn.Parameter(
                torch.empty(tensor.shape, dtype=tensor.dtype, device=device), requires_grad=False
            )
        for name, tensor in [*layer.named_buffers()]:
            layer._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        layer(torch.empty((1, 4096), dtype=torch.bfloat16, device=device))

    work = counted(run)
    assert work.flops == 2 * 4096 * 4096
    assert 4096 * 4096 // 2 < work.bytes_moved < 4096 * 4096 * 0.6  # half a byte each, and scales


# ---------------------------------------------------------------- single operators


def test_views_and_new_memory_start_no_kernel() -> None:
    def run(device: torch.device) -> None:
        tensor = torch.empty((4, 6), device=device)
        tensor.view(6, 4).transpose(0, 1)[1:].unsqueeze(0).expand(8, 3, 6)
        tensor.split(2)
        tensor.new_empty((3,))

    assert counted(run) == Work()


def test_bytes_are_read_and_written() -> None:
    def run(device: torch.device) -> None:
        first, second = torch.empty((4, 256), device=device), torch.empty((4, 256), device=device)
        first + second

    assert counted(run) == moved(3 * 4 * 256 * 4)


def test_what_is_expanded_is_read_once() -> None:
    def run(device: torch.device) -> None:
        torch.empty((1, 256), device=device).expand(100, 256).contiguous()

    assert counted(run).bytes_moved == (1 + 100) * 256 * 4


def test_embeddings_read_their_rows() -> None:
    def run(device: torch.device) -> None:
        matrix = torch.empty((50_000, 64), dtype=torch.bfloat16, device=device)
        torch.nn.functional.embedding(torch.empty((10,), dtype=torch.int64, device=device), matrix)

    assert counted(run).bytes_moved == 2 * 10 * 64 * 2 + 10 * 8


def test_copies_within_a_device_are_kernels_and_those_between_are_not() -> None:
    def within(device: torch.device) -> None:
        torch.empty(1000, device=device).copy_(torch.empty(1000, device=device))

    def between(device: torch.device) -> None:
        torch.empty(1000, device=device).copy_(torch.ones(1000))

    assert counted(within) == moved(2 * 4000)
    assert counted(between) == Work()


@pytest.mark.parametrize(("tokens", "used"), [(1, 1), (3, 3), (100, 8)])
def test_groups_without_rows_are_not_read(tokens: int, used: int) -> None:
    def run(device: torch.device) -> None:
        rows = torch.empty((tokens, 64), dtype=torch.bfloat16, device=device)
        matrices = torch.empty((8, 64, 32), dtype=torch.bfloat16, device=device)
        ends = torch.tensor([min(tokens, index + 1) for index in range(7)] + [tokens], dtype=torch.int32)
        torch._grouped_mm(rows, matrices, offs=ends.to(device))

    work = counted(run)
    assert work.flops == 2 * tokens * 64 * 32
    assert work.bytes_moved == 2 * (tokens * (64 + 32) + used * 64 * 32)


def test_products_by_pytorch_s_own_formulas() -> None:
    def run(device: torch.device) -> None:
        torch.empty((2, 3, 4), device=device) @ torch.empty((2, 4, 5), device=device)
        torch.nn.functional.conv2d(torch.empty((1, 3, 8, 8), device=device), torch.empty((6, 3, 2, 2), device=device))

    # 2 x 3 x 4 x 5 multiply-adds; 49 places, each with 3 x 2 x 2 for 6 channels
    assert counted(run).flops == 2 * (2 * 3 * 4 * 5) + 2 * (49 * 3 * 2 * 2 * 6)


# ---------------------------------------------------------------- block by block


def test_recorded_blocks_have_their_own_work(whole: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [["model.embed_tokens"], ["model.rotary_emb"], ["model.layers.0"], ["model.layers.1"], ["model.norm"]]
    model = empty(LlamaForCausalLM, LlamaConfig(**DECODER))
    workload = Workload(prompt_tokens=PROMPT, max_new_tokens=NEW, dtype="bfloat16")
    seen = record(model, [*blocks, ["lm_head"]], workload)
    by_block = {number: work for device in seen.rehearsal.devices for number, work in device.block_work.items()}
    assert by_block[2] == by_block[3]
    assert by_block[5]["decode"].flops == 2 * SCORES
    total = sum((work["decode"] for work in by_block.values()), Work())
    assert total.flops == whole.devices[0].work["decode"].flops
    # where blocks share devices, what runs between modules goes to the last of them
    monkeypatch.setattr(trace, "MAX_DEVICES", 2)
    shared = record(model, [*blocks, ["lm_head"]], workload)
    assert len(shared.rehearsal.devices) == 2
    work = {number: work for device in shared.rehearsal.devices for number, work in device.block_work.items()}
    for number in (2, 3, 5):
        assert work[number]["decode"].flops == by_block[number]["decode"].flops
        assert work[number]["decode"].bytes_moved == pytest.approx(by_block[number]["decode"].bytes_moved, rel=0.05)
