"""Plans of described models: where the KV cache of offloaded layers is charged."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import CPU, DISK, Device
from devmap_cli.mapfile import MapWorkload
from devmap_cli.model.spec import KvCacheSpec, ModelSpec, ModuleSpec, TensorSpec
from devmap_cli.planning.mapping import map_file
from devmap_cli.planning.means import PlanRequest
from devmap_cli.planning.nouns import Infeasible, Placement
from devmap_cli.planning.pins import Pin
from devmap_cli.planning.planner import make_plan
from devmap_cli.planning.profile import Profile
from devmap_cli.simulation.trace import Trace

GPU = Device("sim", 0)
LAYERS = 4


def model() -> ModelSpec:
    """4 layers of 100 bytes, each keeping 2 bytes per token: 20 for the 10 tokens of WORKLOAD."""
    weight = TensorSpec("weight", (100,), "int8", 100)
    layers = tuple(ModuleSpec(str(index), "Layer", (weight,), no_split=True) for index in range(LAYERS))
    fqns = tuple(f"layers.{index}" for index in range(LAYERS))
    return ModelSpec(
        model_id="toy",
        revision=None,
        class_name="Toy",
        model_type="toy",
        dtype="float32",
        root=ModuleSpec("", "Toy", children=(ModuleSpec("layers", "ModuleList", children=layers),)),
        execution_order=fqns,
        kv_cache=tuple(KvCacheSpec(fqn, 2) for fqn in fqns),
    )


WORKLOAD = MapWorkload(prompt_tokens=6, max_new_tokens=4)


def planned(budgets: dict[Device, int], strategy: str = "sequential") -> Placement:
    answer = make_plan(model(), PlanRequest(strategy, Budgets.of(budgets), WORKLOAD))
    assert isinstance(answer, Placement)
    return answer


@pytest.mark.parametrize("strategy", ["auto", "balanced", "sequential"])
def test_what_layers_on_cpu_need_is_charged_to_the_gpu_that_computes_them(strategy: str) -> None:
    # the cache of all 4 layers is 80, and one offloaded layer at a time passes through: 100;
    # 290 bytes hold 1 layer beside that: 100 + 80 + 100 = 280
    answer = planned({GPU: 290, CPU: 1000}, strategy)
    gpu, cpu = answer.memory(GPU), answer.memory(CPU)
    assert (gpu.weights_bytes, gpu.kv_cache_bytes, gpu.activation_bytes) == (100, 80, 100)
    assert (cpu.weights_bytes, cpu.kv_cache_bytes, cpu.activation_bytes) == (300, 0, 0)
    assert answer.budgets[GPU] == 290


def test_what_layers_on_disk_need_is_charged_to_the_cpu_where_nothing_else_computes() -> None:
    answer = planned({CPU: 290, DISK: 1000})
    cpu, disk = answer.memory(CPU), answer.memory(DISK)
    assert (cpu.weights_bytes, cpu.kv_cache_bytes, cpu.activation_bytes) == (100, 80, 100)
    assert (disk.weights_bytes, disk.kv_cache_bytes) == (300, 0)


def test_disk_alone_computes_nothing() -> None:
    # the cache of all, 80, one layer passing through, 100, and one that stays, 100: of 280 bytes 179 are there
    answer = make_plan(model(), PlanRequest("sequential", Budgets.of({GPU: 179, DISK: 1000}), WORKLOAD))
    assert isinstance(answer, Infeasible)
    assert (answer.device, answer.needed_bytes, answer.missing_bytes) == (GPU, 280, 101)
    planned({GPU: 280, DISK: 1000})
    alone = make_plan(model(), PlanRequest("sequential", Budgets.of({DISK: 1000}), WORKLOAD))
    assert isinstance(alone, Infeasible)
    assert (alone.device, alone.needed_bytes, alone.budget_bytes) == (CPU, 280, 0)
    planned({CPU: 280, DISK: 1000})


def test_the_map_says_that_budgets_cap_weights_alone() -> None:
    for weights_only in (True, False):
        request = PlanRequest("balanced", Budgets.of({GPU: 480}), WORKLOAD, weights_only=weights_only)
        answer = make_plan(model(), request)
        assert isinstance(answer, Placement)
        assert map_file(model(), request, answer).to_document().get("weights_only", False) is weights_only


def test_a_gpu_that_cannot_hold_the_cache_of_what_is_offloaded_is_left_out() -> None:
    # 70 bytes hold no layer; all on cpu compute there
    answer = planned({GPU: 70, CPU: 1000})
    assert answer.memory(GPU).peak_bytes == 0
    assert answer.memory(CPU).peak_bytes == 480


def test_weights_only_counts_no_cache() -> None:
    request = PlanRequest("balanced", Budgets.of({GPU: 400}), WORKLOAD, weights_only=True)
    answer = make_plan(model(), request)
    assert isinstance(answer, Placement)
    assert answer.memory(GPU).peak_bytes == 400
    assert isinstance(make_plan(model(), PlanRequest("balanced", Budgets.of({GPU: 400}), WORKLOAD)), Infeasible)


def test_map_file_figures_are_the_placements() -> None:
    request = PlanRequest("balanced", Budgets.of({GPU: 290, CPU: 1000}), WORKLOAD)
    answer = make_plan(model(), request)
    assert isinstance(answer, Placement)
    document = map_file(model(), request, answer).to_document()
    by_device = {item["device"]: item for item in document["devices"]}
    assert by_device["sim:0"]["peak_bytes"] == 280
    assert by_device["sim:0"]["free_bytes"] == 10
    assert sum(item["weights_bytes"] for item in document["devices"]) == 400
    assert list(document["device_map"]) == [f"layers.{index}" for index in range(LAYERS)]


def test_what_is_reserved_is_left_free_and_part_of_the_budget() -> None:
    # 480 bytes are needed: 600 less 120 is just enough, less 121 is not
    request = PlanRequest("balanced", Budgets.of({GPU: 480}, {GPU: 120}), WORKLOAD)
    answer = make_plan(model(), request)
    assert isinstance(answer, Placement)
    (device,) = map_file(model(), request, answer).devices
    assert (device.budget_bytes, device.peak_bytes, device.free_bytes) == (600, 480, 120)
    assert isinstance(
        make_plan(model(), PlanRequest("balanced", Budgets.of({GPU: 479}, {GPU: 121}), WORKLOAD)), Infeasible
    )


class TestWhatFitsButForTheMargin:
    """4 layers of 100 bytes take one segment of 2 MiB, which is just what the GPU has."""

    PROFILE = Profile(
        Trace(
            num_blocks=LAYERS,
            weights=tuple((block, 100) for block in range(LAYERS)),
            buffers=(),
            conversion_bytes=(0,) * LAYERS,
            read_bytes=(100,) * LAYERS,
            holders=(),
            phases={"prefill": ()},
        ),
        tuple((index,) for index in range(LAYERS)),
        work={},
    )

    def planned(self, budget_bytes: int, missing: int | None) -> tuple[Placement | Infeasible, int]:
        """The answer where a rehearsal says that so many bytes are missing, and how often it was asked."""
        asked: list[Mapping[str, Device]] = []

        def confirm(device_map: Mapping[str, Device]) -> dict[Device, int]:
            asked.append(device_map)
            return {GPU: missing} if missing else {}

        request = PlanRequest("balanced", Budgets.of({GPU: budget_bytes}), WORKLOAD)
        answer = make_plan(model(), request, self.PROFILE, confirm=None if missing is None else confirm)
        return answer, len(asked)

    def test_is_taken_if_it_gets_through_a_rehearsal(self) -> None:
        answer, num_asked = self.planned(2 << 20, missing=0)
        assert isinstance(answer, Placement)
        assert answer.memory(GPU).peak_bytes == 2 << 20
        assert num_asked == 1

    @pytest.mark.parametrize("missing", [1, None], ids=["runs out of memory", "is not rehearsed"])
    def test_is_refused_otherwise(self, missing: int | None) -> None:
        assert isinstance(self.planned(2 << 20, missing)[0], Infeasible)

    def test_pins_that_overfill_cpu_are_refused_whatever_fits_elsewhere(self) -> None:
        pins = tuple(Pin(f"layers.{index}", CPU) for index in range(2))
        request = PlanRequest("balanced", Budgets.of({GPU: 64 << 20, CPU: 199}), WORKLOAD, pins)
        answer = make_plan(model(), request, self.PROFILE)
        assert isinstance(answer, Infeasible)
        assert (answer.device, answer.needed_bytes) == (CPU, 200)

    @pytest.mark.parametrize("budget_bytes", [3 << 20, (2 << 20) - 1], ids=["enough", "too little"])
    def test_nothing_else_is_rehearsed(self, budget_bytes: int) -> None:
        assert self.planned(budget_bytes, missing=0)[1] == 0
