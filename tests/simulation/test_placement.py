"""Which device a map gives a module, and empty models with weights for a while."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from devmap_cli.simulation.backend import simulated_devices
from devmap_cli.simulation.placement import device_of, normalized, placed
from devmap_cli.simulation.shapes import Shapes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.1.mlp", 1),
        ("model.layers.1", 1),
        ("model.layers.10.mlp", 0),  # layers.1 is no ancestor of layers.10
        ("model.layers.2", 0),
        ("lm_head.weight", "cpu"),
        ("other", "cpu"),  # no key covers it
    ],
)
def test_the_closest_ancestor_decides(name: str, expected: int | str) -> None:
    assert device_of(name, {"model": 0, "model.layers.1": 1, "lm_head": "cpu"}) == expected


def test_the_empty_name_covers_everything() -> None:
    assert device_of("model.layers.1", {"": 3}) == 3


def test_devices_of_any_type_are_told_by_their_index() -> None:
    assert normalized({"a": "cuda:1", "b": "npu:0", "c": "mps", "d": 2, "e": "cpu", "f": "disk"}) == {
        "a": 1,
        "b": 0,
        "c": 0,
        "d": 2,
        "e": "cpu",
        "f": "disk",
    }


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256, bias=False)
        self.second = nn.Linear(256, 256, bias=False)
        self.second.weight = self.first.weight


def test_tied_weights_take_memory_once() -> None:
    with torch.device("meta"):
        model = Tied()
    weight = model.first.weight
    with simulated_devices([64 * MIB] * 2, numbers=Shapes(lambda _: None)) as machine:
        with placed(model, {"first": 1, "second": 1}, machine):
            assert [device.use.allocated_bytes for device in machine.devices] == [0, 256 * 256 * 4]
        assert machine.devices[1].use.allocated_bytes == 0
    assert model.first.weight is weight
    assert model.second.weight is weight


def test_memory_for_the_weights_is_reserved_in_one_piece() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))
    with simulated_devices([64 * MIB], numbers=Shapes(lambda _: None)) as machine, placed(model, {"": 0}, machine):
        # six weights of 4 MiB: one segment of 24 MiB, not two of 20 as one by one
        assert machine.devices[0].use.reserved_bytes == 24 * MIB


def test_an_error_while_placing_leaves_the_model_empty() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 1024))
    with simulated_devices([MIB], numbers=Shapes(lambda _: None)) as machine:
        with pytest.raises(torch.OutOfMemoryError), placed(model, {"": 0}, machine):
            pass
        assert all(parameter.is_meta for parameter in model.parameters())
