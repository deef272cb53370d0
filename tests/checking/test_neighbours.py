from __future__ import annotations

from dataclasses import replace

from devmap_cli.checking.neighbours import neighbour
from devmap_cli.model.spec import ModuleSpec
from tests.checking.toy import CPU, GPU_0, GPU_1, SPEC, WHOLE, tensor

RUN = replace(
    SPEC,
    execution_order=(
        "model",
        "model.embed",
        "model.rotary_emb",
        *(f"model.layers.{index}" for index in range(11)),
        "model.norm",
        "lm_head",
    ),
)


def test_with_what_runs_next() -> None:
    device_map = {"model.embed": GPU_1, "model.layers.0": GPU_0, "lm_head": GPU_1}
    assert neighbour("model.rotary_emb", device_map, RUN) == GPU_0


def test_the_closest_module_around_decides() -> None:
    device_map = {**WHOLE, "model.layers.9": GPU_0, "model.norm": GPU_1}
    del device_map["model.layers.10"]
    assert neighbour("model.layers.10", device_map, RUN) == GPU_0  # layers.9, and not norm, which runs next


def test_definition_order_where_the_execution_order_says_nothing() -> None:
    assert neighbour("model.norm", {"model.rotary_emb": GPU_1, "lm_head": GPU_0}, SPEC) == GPU_1


def test_a_tensor_goes_with_the_first_part_of_its_module() -> None:
    root = replace(SPEC.root, tensors=(tensor("bias", 4),))
    assert neighbour("bias", WHOLE, replace(SPEC, root=root)) == GPU_0


def test_a_tensor_of_a_module_without_parts_goes_with_the_module() -> None:
    device_map = {"model.embed": GPU_1, "model.layers.0": GPU_0}
    assert neighbour("model.rotary_emb.inv_freq", device_map, RUN) == GPU_0


def test_the_cpu_for_an_empty_map() -> None:
    assert neighbour("model.norm", {}, SPEC) == CPU
    assert neighbour("", {}, replace(SPEC, root=ModuleSpec("", "Toy"))) == CPU
