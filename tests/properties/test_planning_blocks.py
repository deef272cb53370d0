"""Blocks and device maps of random module trees: coverage, order, ties, no cut."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import CPU, Device
from devmap_cli.model.names import is_ancestor
from devmap_cli.model.spec import ModelSpec, ModuleSpec, TensorSpec
from devmap_cli.planning.blocks import blocks_of, device_map_of
from devmap_cli.planning.nouns import Placement

DEVICES = (Device("cuda", 0), Device("cuda", 1), CPU)


@st.composite
def modules(draw: st.DrawFn, name: str = "", depth: int = 4) -> ModuleSpec:
    num_children = draw(st.integers(0, 3)) if depth else 0
    children = tuple(draw(modules(str(index), depth - 1)) for index in range(num_children))
    tensors = tuple(
        TensorSpec(f"t{index}", (), "float32", draw(st.integers(0, 50)), draw(st.booleans()))
        for index in range(draw(st.integers(0, 2)))
    )
    class_name = draw(st.sampled_from(["ModuleList", "Layer", "Linear"]))
    return ModuleSpec(name, class_name, tensors, children, draw(st.integers(0, 5)) == 0)


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    root = draw(modules())
    spec = ModelSpec("m", None, "M", "m", "float32", root)
    fqns = [fqn for fqn, _ in spec.modules()]
    names = [name for name, _ in spec.tensors()]
    order = draw(st.permutations(fqns))[: draw(st.integers(0, len(fqns)))]
    ties = []
    if len(names) >= 4 and draw(st.booleans()):
        shuffled = draw(st.permutations(names))
        ties = [tuple(shuffled[:2]), tuple(shuffled[2:4])]
    return ModelSpec("m", None, "M", "m", "float32", root, ties=tuple(ties), execution_order=tuple(order))


@given(specs())
@settings(max_examples=100, deadline=None)
def test_every_tensor_is_in_exactly_one_block_and_counts_once(spec: ModelSpec) -> None:
    blocks = blocks_of(spec, 0, 1)
    fqns = [fqn for block in blocks for fqn in block.fqns]
    for name, _ in spec.tensors():
        assert sum(is_ancestor(fqn, name) for fqn in fqns) == 1
    own = {name: tensor.num_bytes for name, tensor in spec.tensors() if name not in spec.tied_to_another()}
    assert sum(block.weights_bytes for block in blocks) == sum(own.values())
    assert sorted(Counter(fqns).values(), reverse=True)[:1] in ([], [1])


@given(specs())
@settings(max_examples=100, deadline=None)
def test_no_block_is_cut_and_ties_stay_together(spec: ModelSpec) -> None:
    blocks = blocks_of(spec, 0, 1)
    for fqn, module in spec.modules():
        if module.no_split:
            below = [key for block in blocks for key in block.fqns if key != fqn and is_ancestor(fqn, key)]
            assert not below
    for tie in spec.ties:
        holders = {
            index
            for index, block in enumerate(blocks)
            for name in tie
            if any(is_ancestor(fqn, name) for fqn in block.fqns)
        }
        assert len(holders) == 1


@given(specs(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_map_says_the_same_as_the_placement(spec: ModelSpec, data: st.DataObject) -> None:
    blocks = blocks_of(spec, 0, 1)
    devices = tuple(data.draw(st.sampled_from(DEVICES)) for _ in blocks)
    placement = Placement("manual", blocks, devices, Budgets.of(dict.fromkeys(DEVICES, 10**6)))
    device_map = device_map_of(spec, placement)
    device_of = {fqn: device for block, device in zip(blocks, devices, strict=True) for fqn in block.fqns}
    for name, _ in spec.tensors():
        (key,) = [key for key in device_map if is_ancestor(key, name)]
        (fqn,) = [fqn for fqn in device_of if is_ancestor(fqn, name)]
        assert device_map[key] == device_of[fqn].map_value
    order = [fqn for fqn, _ in spec.modules()] + [name for name, _ in spec.tensors()]
    positions = [order.index(key) for key in device_map if key in dict(spec.modules())]
    assert positions == sorted(positions)
