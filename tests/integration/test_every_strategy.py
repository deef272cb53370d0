"""Maps of every strategy, loaded with real numbers over simulated devices: plain answers, and the peaks foretold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import CPU, DISK, Device
from devmap_cli.mapfile import MapWorkload
from devmap_cli.model.load import load_spec
from devmap_cli.planning.blocks import blocks_of, device_map_of
from devmap_cli.planning.means import PlanRequest
from devmap_cli.planning.nouns import Placement
from devmap_cli.planning.planner import make_plan
from devmap_cli.planning.strategies import STRATEGIES
from devmap_cli.simulation.backend import simulated_devices
from devmap_cli.simulation.rehearsal import Rehearsal, rehearse
from devmap_cli.simulation.workload import Workload
from tests.simulation.tiny_models import GENERATION as SIX_TOKENS
from tests.simulation.tiny_models import TINY_MODELS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from devmap_cli.model.spec import ModelSpec
    from devmap_cli.simulation.machine import Machine

GIB = 1 << 30
GENERATION = {**SIX_TOKENS, "max_new_tokens": 4}
NUM_DEVICES = {"auto": 2, "balanced": 3, "balanced_low_0": 3, "sequential": 4, "fewest": 4}
IMAGES = {"gemma3": ((56, 56),), "qwen2_5_vl": ((140, 112),)}
"""Those of `TinyModel.inputs`, width and height."""


@dataclass(frozen=True)
class Saved:
    """A tiny model on disk, its inputs, and what it answers on the plain CPU."""

    name: str
    folder: Path
    kind: Any
    inputs: dict[str, Any]
    tokens: torch.Tensor

    @property
    def workload(self) -> Workload:
        batch_size, prompt_tokens = self.inputs["input_ids"].shape
        return Workload(batch_size, prompt_tokens, GENERATION["max_new_tokens"], IMAGES.get(self.name, ()))

    def plan(self, strategy: str, num_devices: int, room: float, *tiers: Device) -> Placement:
        """Placed on devices that each have room for `room` of an even share, or for the largest block if that is more.

        `tiers` have room for everything.
        """
        spec = load_spec(str(self.folder))
        total, largest = self._bytes(spec)
        budget = -(-max(int(room * total / num_devices), largest) * 8 // 7)  # an eighth is for the runtime
        accelerators = {Device("cuda", index): budget for index in range(num_devices)}
        asked = self.workload
        workload = MapWorkload(asked.batch_size, asked.prompt_tokens, asked.max_new_tokens)
        budgets = Budgets.of({**accelerators, **dict.fromkeys(tiers, GIB)})
        placement = make_plan(spec, PlanRequest(strategy, budgets, workload))
        assert isinstance(placement, Placement)
        return placement

    def device_map(self, placement: Placement) -> dict[str, int | str]:
        return device_map_of(load_spec(str(self.folder)), placement)

    def _bytes(self, spec: ModelSpec) -> tuple[int, int]:
        """All blocks, and the largest with what passes through while it is offloaded."""
        asked = self.workload
        blocks = blocks_of(spec, asked.prompt_tokens + asked.max_new_tokens, asked.batch_size)
        sizes = [block.resident_bytes + block.transient_bytes for block in blocks]
        return sum(sizes), max(sizes)

    def rehearsal(self, device_map: Mapping[str, int | str], capacities: list[int]) -> Rehearsal:
        with torch.device("meta"):
            model: Any = TINY_MODELS[self.name].build().eval()
        model.tie_weights()
        return rehearse(model, device_map, self.workload, capacities)


@dataclass
class RealRun:
    """Loading and generating with real numbers; `phase` is the last one reached."""

    machine: Machine
    tokens: torch.Tensor | None = None
    error: torch.OutOfMemoryError | None = None
    phase: str = "load"

    @classmethod
    def of(cls, saved: Saved, device_map: Mapping[str, int | str], capacities: list[int]) -> RealRun:
        with simulated_devices(capacities) as machine:
            run = cls(machine)
            try:
                run._go(saved, device_map)
            except torch.OutOfMemoryError as error:
                run.error = error
        return run

    def _go(self, saved: Saved, device_map: Mapping[str, int | str]) -> None:
        model = saved.kind.from_pretrained(
            saved.folder, device_map=dict(device_map), offload_folder=saved.folder / "offload"
        )
        self.phase = "prefill"
        model.register_forward_hook(self._step_done)
        device = model.get_input_embeddings().weight.device
        inputs = {name: value.to("sim:0" if device.type == "meta" else device) for name, value in saved.inputs.items()}
        with self.machine.phase("run"):
            self.tokens = model.generate(**inputs, **GENERATION).cpu()

    def _step_done(self, *_: object) -> None:
        self.phase = "decode"


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp(request.param)
    tiny = TINY_MODELS[request.param]
    tiny.save(folder)
    kind: Any = type(tiny.build())
    inputs = tiny.inputs()
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return Saved(request.param, folder, kind, inputs, kind.from_pretrained(folder).generate(**inputs, **GENERATION))


def _turns(values: Sequence[Any]) -> list[Any]:
    """Names of tiny models and `values`, all pairs; each model with one value is quick, one after the other in turn."""
    return [
        pytest.param(name, value, marks=[] if number % len(values) == turn else [pytest.mark.slow])
        for number, name in enumerate(TINY_MODELS)
        for turn, value in enumerate(values)
    ]


@pytest.mark.parametrize(("saved", "strategy"), _turns(list(STRATEGIES)), indirect=["saved"], scope="module")
def test_it_answers_as_on_the_cpu(saved: Saved, strategy: str) -> None:
    placement = saved.plan(strategy, NUM_DEVICES[strategy], 1.5)
    device_map = saved.device_map(placement)
    used = set(device_map.values())
    assert len(used) > 1
    assert {type(device) for device in used} == {int}
    real = RealRun.of(saved, device_map, [GIB] * NUM_DEVICES[strategy])
    assert real.tokens is not None
    assert torch.equal(real.tokens, saved.tokens)


@pytest.mark.parametrize(("saved", "tier"), _turns([CPU, DISK]), indirect=["saved"], scope="module", ids=str)
def test_so_it_does_where_the_devices_are_too_small_for_it(saved: Saved, tier: Device) -> None:
    placement = saved.plan("auto", 2, 0.8, tier)
    device_map = saved.device_map(placement)
    assert str(tier) in device_map.values()
    real = RealRun.of(saved, device_map, [GIB] * 2)
    assert real.tokens is not None
    assert torch.equal(real.tokens, saved.tokens)
    _assert_takes(saved.rehearsal(device_map, [GIB] * 2), real)


def _assert_takes(rehearsal: Rehearsal, real: RealRun) -> None:
    """Each device held at most what `rehearsal` foretold, within 1 %."""
    rehearsal.raise_failure()
    for device, foretold in zip(real.machine.devices, rehearsal.devices, strict=True):
        highest = max(foretold.allocated_bytes[phase] for phase in ("prefill", "decode"))
        assert highest == pytest.approx(device.phases["run"].allocated_bytes, rel=0.01)


@pytest.mark.parametrize("saved", TINY_MODELS, indirect=True, scope="module")
def test_it_takes_what_was_foretold_and_one_byte_less_is_not_enough(saved: Saved) -> None:
    device_map = saved.device_map(saved.plan("balanced", 2, 1.5))
    unlimited = saved.rehearsal(device_map, [GIB] * 2)
    need = [max(memory.reserved_bytes for memory in device.phases.values()) for device in unlimited.devices]
    enough = RealRun.of(saved, device_map, need)
    assert enough.error is None
    _assert_takes(unlimited, enough)
    too_little = [need[0], need[1] - 1]
    foretold = saved.rehearsal(device_map, too_little).failure
    assert foretold is not None
    real = RealRun.of(saved, device_map, too_little)
    assert (real.phase, str(real.error)) == (foretold.phase, str(foretold.error))
