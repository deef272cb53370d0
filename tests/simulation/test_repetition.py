"""What is not computed again comes out as if it were: memory, traces, work and errors."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from devmap_cli.simulation import attention, operators, rehearsal, repetition, taping
from devmap_cli.simulation.backend import simulated_devices
from devmap_cli.simulation.memory import UNLIMITED_BYTES
from devmap_cli.simulation.recording import record
from devmap_cli.simulation.shapes import Shapes
from devmap_cli.simulation.tensor import DeviceTensor
from devmap_cli.simulation.workload import Workload
from tests.simulation.tiny_models import TINY_MODELS

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_LAYERS = 4
IMAGES = {"qwen2_5_vl": ((56, 56),), "gemma3": ((56, 56),)}


def qwen3_next() -> Any:
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        )
    )


NAMES = ("gpt2", "mixtral", "t5", "gemma3", "qwen2_5_vl")
BUILDERS = {**{name: TINY_MODELS[name].build for name in NAMES}, "qwen3_next": qwen3_next}


@contextmanager
def all_computed(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is repeated."""
    with patch.context() as patched:
        patched.setattr(operators, "arguments_of", lambda *_: None)
        patched.setattr(attention, "arguments_of", lambda *_: None)
        patched.setattr(taping, "arguments_of", lambda *_: None)
        yield


def seen(name: str) -> Any:
    """All there is to see of a model's run with each part on a device of its own."""
    with torch.device("meta"):
        model: Any = BUILDERS[name]().eval()
    model.tie_weights()
    names = [name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())]
    blocks = list(dict.fromkeys(re.sub(r"(.*?\.\d+)\..*", r"\1", name) for name in names))  # layers whole
    recording = record(model, [[block] for block in blocks], Workload(2, 70, 6, images=IMAGES.get(name, ())))
    return recording.trace.to_document(), recording.groups, recording.rehearsal


@pytest.mark.parametrize("name", BUILDERS)
def test_repeated_or_computed_it_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with all_computed(monkeypatch):
        computed = seen(name)
    assert seen(name) == computed  # its layers are alike


def test_a_function_that_loops_over_the_prompt_is_run_for_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taping, "_tapes", {})
    played: list[taping.Tape] = []
    play = taping.Tape.play

    def counted(tape: taping.Tape, arguments: Any) -> None:
        played.append(tape)
        play(tape, arguments)

    monkeypatch.setattr(taping.Tape, "play", counted)
    with torch.device("meta"):
        model: Any = qwen3_next().eval()
    rehearsal.rehearse(model, {"": 0}, Workload(1, 200, 6), [UNLIMITED_BYTES]).raise_failure()
    num_linear = sum(kind == "linear_attention" for kind in model.config.layer_types)
    assert num_linear == 3
    assert len(played) >= 2 * (num_linear - 1)  # in prefill and in decode


def unknown(*size: int) -> torch.Tensor:
    return torch.empty(size, device="sim:0")


@contextmanager
def shapes_only() -> Iterator[Any]:
    with simulated_devices([UNLIMITED_BYTES, UNLIMITED_BYTES], numbers=Shapes(lambda _: None)) as machine:
        yield machine


def test_a_shape_that_changes_in_place_changes_every_time() -> None:
    with shapes_only():
        for _ in range(3):
            tensor = unknown(2, 3)
            tensor.transpose_(0, 1)
            assert tensor.shape == (3, 2)
            assert (tensor + 1).stride() == (1, 3)


def test_integers_and_floats_that_are_equal_are_told_apart() -> None:
    with shapes_only():
        numbers = torch.empty(2 << 20, dtype=torch.long, device="sim:0")  # too many to be known
        for _ in range(2):
            assert (numbers * 2).dtype == torch.long
            assert (numbers * 2.0).dtype == torch.float32


def test_a_repeated_view_lies_in_the_memory_it_is_of() -> None:
    with shapes_only() as machine:
        for _ in range(3):
            base = unknown(1 << 10, 4)
            before = machine.devices[0].use.allocated_bytes
            part = base[8:].t()
            assert machine.devices[0].use.allocated_bytes == before
            assert isinstance(part, DeviceTensor)
            assert isinstance(base, DeviceTensor)
            assert part.allocation is base.allocation
            assert part.data_ptr() - base.data_ptr() == 8 * 4 * 4
            assert part.numbers.shape == (4, (1 << 10) - 8)
            assert part.numbers.stride() == part.stride() == (1, 4)
            del base, part


def test_devices_do_not_mix_in_a_repeated_call() -> None:
    with shapes_only():
        here = unknown(3, 3)
        assert (here + here).shape == (3, 3)
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            here + torch.empty(3, 3, device="sim:1")


def test_what_was_kept_is_forgotten_before_it_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repetition, "_MAX_KEPT", 5)
    monkeypatch.setattr(repetition, "_outcomes", {})
    with shapes_only():
        for size in range(1, 20):
            assert (unknown(size) + 1).shape == (size,)
    assert 0 < len(repetition._outcomes) <= 5


def taped(function: Any) -> Any:
    return taping._taped(function)


def test_memory_that_a_function_keeps_elsewhere_is_no_part_of_what_is_repeated() -> None:
    kept = []

    def function(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor * 2)
        return tensor + 1

    with shapes_only():
        call = taped(function)
        for num_calls in range(1, 4):
            assert call(unknown(3)).shape == (3,)
            assert len(kept) == num_calls


def test_what_reads_unknown_numbers_is_not_repeated() -> None:
    calls = []

    def function(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return tensor[tensor > 0]

    with shapes_only():
        call = taped(function)
        for _ in range(2):
            call(unknown(3))
    assert len(calls) == 1  # a mask alone is none of that: it is all true each time


@pytest.mark.parametrize("size", [3, 5])
def test_a_repeated_function_does_all_that_it_did(size: int) -> None:
    def function(tensor: Any, *, factor: float) -> tuple[Any, Any]:
        for _ in range(4):
            tensor = tensor @ tensor.T * factor
        return tensor, tensor[0]

    uses = []
    for call in (function, taped(function)):
        with shapes_only() as machine:
            for _ in range(3):
                device = machine.devices[0]
                with machine.phase("prefill"):
                    held = unknown(size, size)  # as the wrapper of such functions holds their arguments
                    results = call(held, factor=0.5)
                    assert results[1].allocation is results[0].allocation
                    assert results[1].shape == (size,)
            uses.append((device.phases, device.use, device.counter.work("prefill"), device.workspace_bytes))
    assert uses[0] == uses[1]
    assert uses[0][2].num_kernels == 3 * 4 * 2
