"""The judge and the repair on random maps, beside a plain derivation of the same from the tensors alone."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from devmap_cli.checking import check_map
from devmap_cli.checking.findings import any_error
from devmap_cli.checking.repair import repair
from devmap_cli.devices.device import Device
from devmap_cli.model.spec import ModelSpec, ModuleSpec
from tests.checking.toy import CPU, GPU_0, GPU_1, tensor

DEVICES = st.sampled_from([GPU_0, GPU_1, CPU])


@st.composite
def modules(draw: st.DrawFn, name: str, depth: int, *, in_block: bool = False) -> ModuleSpec:
    no_split = not in_block and depth < 3 and draw(st.integers(0, 3)) == 0
    num_children = draw(st.integers(0, 3)) if depth else 0
    children = [draw(modules(str(index), depth - 1, in_block=in_block or no_split)) for index in range(num_children)]
    tensors = [
        tensor(f"t{index}", 4 * draw(st.integers(1, 9)), is_buffer=draw(st.booleans()))
        for index in range(draw(st.integers(0, 2)))
    ]
    return ModuleSpec(name, "Module", tuple(tensors), tuple(children), no_split)


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    root = draw(modules("", 3))
    spec = ModelSpec("toy", None, "Toy", "toy", "float32", root)
    names = [name for name, _ in spec.tensors()]
    ties = []
    for size in draw(st.lists(st.integers(2, 3), max_size=2)):
        if len(names) >= size:
            group = sorted(draw(st.permutations(names))[:size], key=[name for name, _ in spec.tensors()].index)
            names = [name for name in names if name not in group]
            ties.append(tuple(group))
    order = draw(st.permutations([fqn for fqn, _ in spec.modules()]))
    return ModelSpec("toy", None, "Toy", "toy", "float32", root, tuple(ties), tuple(order[: draw(st.integers(0, 9))]))


@st.composite
def specs_and_maps(draw: st.DrawFn) -> tuple[ModelSpec, dict[str, Device]]:
    """A model and a map of its modules and tensors, most often with gaps, overlaps and keys for nothing."""
    spec = draw(specs())
    names = [*dict.fromkeys([fqn for fqn, _ in spec.modules()] + [name for name, _ in spec.tensors()]), "9", "0.9"]
    keys = draw(st.lists(st.sampled_from(names), unique=True, max_size=len(names)))
    return spec, {key: draw(DEVICES) for key in keys}


def prefixes(name: str) -> list[str]:
    """All that contains `name`, itself first and the root last."""
    parts = name.split(".") if name else []
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]


def device_of(name: str, device_map: Mapping[str, Device]) -> Device | None:
    return next((device_map[prefix] for prefix in prefixes(name) if prefix in device_map), None)


def is_wrong(device_map: Mapping[str, Device], spec: ModelSpec) -> bool:
    """A tensor has no device, what belongs together (block, leaf module, tied weights) two, or keys contradict."""
    devices = {name: device_of(name, device_map) for name, _ in spec.tensors()}
    blocks = [fqn for fqn, module in spec.modules() if module.no_split or not module.children]
    together = [{devices[name] for name in devices if block in prefixes(name)} for block in blocks]
    together += [{devices[name] for name in group} for group in spec.ties]
    names = {fqn for fqn, _ in spec.modules()} | devices.keys()
    contradicts = any(
        device_of(key.rpartition(".")[0], device_map) not in (None, device)
        for key, device in device_map.items()
        if key and key in names
    )
    return None in devices.values() or any(len(places) > 1 for places in together) or contradicts


@settings(max_examples=150, deadline=None)
@given(specs_and_maps())
def test_a_map_has_an_error_exactly_where_it_is_wrong(case: tuple[ModelSpec, dict[str, Device]]) -> None:
    spec, device_map = case
    assert any_error(check_map(device_map, spec)) == is_wrong(device_map, spec)


@settings(max_examples=150, deadline=None)
@given(specs_and_maps())
def test_a_repaired_map_has_no_finding(case: tuple[ModelSpec, dict[str, Device]]) -> None:
    spec, device_map = case
    repaired, changes = repair(device_map, spec)
    assert check_map(repaired, spec) == ()
    assert repair(repaired, spec) == (repaired, ())
    assert bool(changes) == (repaired != device_map)


@settings(max_examples=150, deadline=None)
@given(specs_and_maps())
def test_a_repair_changes_what_is_wrong_and_no_more(case: tuple[ModelSpec, dict[str, Device]]) -> None:
    spec, device_map = case
    repaired, _ = repair(device_map, spec)
    if not is_wrong(device_map, spec):
        for name, _ in spec.tensors():
            assert device_of(name, repaired) == device_of(name, device_map)
