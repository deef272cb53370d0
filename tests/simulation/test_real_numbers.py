"""Models over simulated devices with real numbers answer as they do on the plain CPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from devmap_cli.simulation.backend import simulated_devices
from tests.simulation.tiny_models import GENERATION, TINY_MODELS, TinyModel

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
PLACEMENTS: dict[str, list[int | str]] = {
    "four devices": [0, 1, 2, 3],
    "back and forth": [0, 1, 0, 1],
    "cpu": [0, "cpu", 1, 1],
    "disk": [0, 1, "disk", 2],
}


@dataclass(frozen=True)
class Saved:
    """A tiny model on disk, and what it answers on the plain CPU."""

    tiny: TinyModel
    folder: Path
    kind: Any
    tokens: torch.Tensor
    logits: torch.Tensor

    def load(self, devices: list[int | str], offload_folder: Path) -> Any:
        """It, over the devices of its four quarters."""
        return self.kind.from_pretrained(
            self.folder, device_map=self.tiny.device_map(devices), offload_folder=offload_folder
        )


def _logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    if model.config.is_encoder_decoder:
        inputs = {**inputs, "decoder_input_ids": torch.zeros_like(inputs["input_ids"][:, :1])}
    logits: torch.Tensor = model(**inputs).logits
    return logits


def _save(name: str, folder: Path) -> Saved:
    tiny = TINY_MODELS[name]
    kind: Any = type(tiny.build())
    tiny.save(folder)
    model: Any = kind.from_pretrained(folder)
    inputs = tiny.inputs()
    with torch.no_grad():
        tokens: Any = model.generate(**inputs, **GENERATION)
        return Saved(tiny, folder, kind, tokens, _logits(model, inputs))


@pytest.fixture(scope="module", params=TINY_MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return _save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return _save("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_same_tokens_and_logits(saved: Saved, placement: str, tmp_path: Path) -> None:
    with simulated_devices([64 * MIB] * 4):
        model = saved.load(PLACEMENTS[placement], tmp_path)
        inputs = {name: value.to("sim:0") for name, value in saved.tiny.inputs().items()}
        assert torch.equal(model.generate(**inputs, **GENERATION).cpu(), saved.tokens)
        assert torch.equal(_logits(model, inputs).cpu(), saved.logits)


def test_parameters_lie_where_the_map_says(llama: Saved, tmp_path: Path) -> None:
    with simulated_devices([64 * MIB] * 2):
        model = llama.load([0, "cpu", 1, "disk"], tmp_path)
        layers = [next(model.model.layers[index].parameters()).device for index in range(4)]
        assert [str(device) for device in layers] == ["sim:0", "meta", "sim:1", "meta"]
        assert str(model.model.rotary_emb.inv_freq.device) == "sim:0"


def test_loaded_weights_are_charged_to_their_device(llama: Saved, tmp_path: Path) -> None:
    with simulated_devices([64 * MIB] * 3) as machine:
        model = llama.load([0, 0, 1, 1], tmp_path)
        expected = [0, 0, 0]
        for tensor in [*model.parameters(), *model.buffers()]:
            expected[tensor.device.index] += -(-tensor.nbytes // 512) * 512
        assert [device.use.allocated_bytes for device in machine.devices] == expected
        assert all(expected[:2])
        assert torch.sim.memory_allocated(1) == expected[1]  # type: ignore[attr-defined]  # registered at run time


def test_hidden_states_move_once_a_token_between_two_devices(llama: Saved, tmp_path: Path) -> None:
    with simulated_devices([64 * MIB] * 2) as machine:
        model = llama.load([0, 0, 1, 1], tmp_path)
        machine.transfers.clear()
        with machine.phase("prefill"):
            model(torch.zeros(1, 7, dtype=torch.long, device="sim:0"))
        hidden = [move for move in machine.transfers if move.num_bytes == 7 * 64 * 4]  # tokens x width x float32
        assert [(move.source, move.target, move.module) for move in hidden] == [("sim:0", "sim:1", "model.layers.2")]
        assert {move.phase for move in machine.transfers} == {"prefill"}


def test_a_layer_on_the_cpu_is_brought_to_the_device_each_time(llama: Saved, tmp_path: Path) -> None:
    with simulated_devices([64 * MIB]) as machine:
        model = llama.load([0, "cpu", 0, 0], tmp_path)
        machine.transfers.clear()
        model(torch.zeros(1, 1, dtype=torch.long, device="sim:0"))
        brought = sum(move.num_bytes for move in machine.transfers if move.module.startswith("model.layers.1"))
        # float32: q 64x64, k and v 64x32, o 64x64, three of 64x96, two norms of 64
        assert brought == 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64)
        assert {(move.source, move.target) for move in machine.transfers if move.num_bytes > 1000} == {("cpu", "sim:0")}


def test_modules_are_recorded_in_the_order_they_run(llama: Saved, tmp_path: Path) -> None:
    with simulated_devices([64 * MIB] * 2) as machine:
        model = llama.load([0, 0, 1, 1], tmp_path)
        model(torch.zeros(1, 1, dtype=torch.long, device="sim:0"))
        outer = [name for name in machine.modules.order if re.fullmatch(r"(model\.)?\w*|model\.layers\.\d", name)]
        assert outer == [
            "",
            "model",
            "model.embed_tokens",
            "model.rotary_emb",
            *(f"model.layers.{index}" for index in range(4)),
            "model.norm",
            "lm_head",
        ]


def test_a_device_that_is_too_small_runs_out_of_memory_while_loading(llama: Saved, tmp_path: Path) -> None:
    with (
        simulated_devices([64 * MIB, 100 << 10]),
        pytest.raises(torch.OutOfMemoryError, match=r"sim:1 out of memory\. Tried to allocate"),
    ):
        llama.load([0, 0, 1, 1], tmp_path)


def test_a_device_without_room_for_the_cache_runs_out_of_memory_while_generating(llama: Saved, tmp_path: Path) -> None:
    with simulated_devices([64 * MIB] * 2) as machine:
        llama.load([0, 0, 1, 1], tmp_path)
        weights = machine.devices[1].peak.reserved_bytes
    with simulated_devices([64 * MIB, weights]):
        model = llama.load([0, 0, 1, 1], tmp_path)
        with pytest.raises(torch.OutOfMemoryError, match="sim:1 out of memory"):
            model(torch.zeros(8, 256, dtype=torch.long, device="sim:0"))


def test_a_block_cut_at_its_residual_mixes_devices(llama: Saved) -> None:
    device_map: dict[str, int | str] = llama.tiny.device_map([0, 0, 0, 0])
    del device_map["model.layers.1"]
    for part, device in (
        ("self_attn", 0),
        ("input_layernorm", 0),
        ("mlp", 1),
        ("post_attention_layernorm", 1),
    ):
        device_map[f"model.layers.1.{part}"] = device
    with simulated_devices([64 * MIB] * 2):
        model = llama.kind.from_pretrained(llama.folder, device_map=device_map)
        with pytest.raises(RuntimeError, match="on the same device, but found at least two devices, sim:0 and sim:1"):
            model(torch.zeros(1, 1, dtype=torch.long, device="sim:0"))


def test_a_device_that_is_not_there_is_refused(llama: Saved, tmp_path: Path) -> None:
    with simulated_devices([64 * MIB]), pytest.raises(RuntimeError, match="invalid device ordinal: sim:3"):
        llama.load([0, 0, 3, 3], tmp_path)
