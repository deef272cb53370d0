"""Shapes-only numbers: what is known stays known, what is unknown is asked for as seldom as possible."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from devmap_cli.simulation.backend import simulated_devices
from devmap_cli.simulation.shapes import MAX_KNOWN_ELEMENTS, Shapes
from devmap_cli.simulation.tensor import DeviceTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

GIB = 1 << 30


@contextmanager
def shapes_only(*capacities: int) -> Iterator[list[str]]:
    assumptions: list[str] = []
    with simulated_devices(capacities or [GIB], numbers=Shapes(assumptions.append)):
        yield assumptions


def unknown(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=0)


def is_known(tensor: torch.Tensor) -> bool:
    assert isinstance(tensor, DeviceTensor)
    return not tensor.numbers.is_meta


def test_positions_and_masks_are_computed() -> None:
    with shapes_only() as assumptions:
        positions = torch.arange(6, device=0)
        mask = (positions[:, None] >= positions[None, :]) & (positions != 2)
        assert mask.sum().item() == 21 - 4  # rows 2 to 5 see position 2
        assert positions[mask[3]].tolist() == [0, 1, 3]
        grid = torch.tensor([[1, 4, 6]], device=0)
        assert grid.prod(dim=-1).tolist() == [24]
        assert assumptions == []


def test_small_floats_made_from_numbers_are_known() -> None:
    with shapes_only():
        grid = torch.linspace(0, 7, 4, device=0)
        assert grid.int().tolist() == [0, 2, 4, 7]
        assert torch.full((2,), 1.5, device=0).tolist() == [1.5, 1.5]
        assert torch.zeros(2, device=0).add(1).tolist() == [1, 1]


def test_what_unknown_numbers_touch_is_a_shape() -> None:
    with shapes_only():
        hidden = torch.ones(3, 4, device=0) @ unknown(4, 5)
        assert hidden.shape == (3, 5)
        assert not is_known(hidden)
        total = torch.zeros(5, device=0)
        assert is_known(total)
        total += hidden[0]
        assert not is_known(total)


def test_large_results_are_shapes_without_being_computed() -> None:
    with shapes_only(1 << 50):
        positions = torch.arange(100_000, device=0)
        mask = positions[:, None] >= positions[None, :]  # 10 GB of booleans on a real device
        assert not is_known(mask)
        assert mask.all().item() is True
        assert not is_known(torch.zeros(MAX_KNOWN_ELEMENTS + 1, dtype=torch.long, device=0))


def test_new_tensors_like_unknown_ones_are_shapes() -> None:
    with shapes_only(1 << 50, 1 << 50):
        large = unknown(1 << 20, 1 << 12)  # 16 GiB, were it real
        assert not is_known(torch.zeros_like(large))
        assert not is_known(large.new_zeros(large.shape, device=1))
        assert not is_known(torch.empty_like(large, device=1))


def test_memory_counts_whether_numbers_are_known_or_not() -> None:
    with simulated_devices([GIB], numbers=Shapes(lambda _: None)) as machine:
        known, shape = torch.zeros(1000, dtype=torch.long, device=0), unknown(1000)
        assert is_known(known)
        assert machine.devices[0].use.allocated_bytes == 8192 + 4096  # 8000 and 4000 B in blocks of 512
        assert shape.shape == (1000,)


def test_unknown_numbers_that_are_read_are_assumed() -> None:
    with shapes_only() as assumptions:
        assert unknown(3).sum().item() == 0
        assert (unknown(3) > 0).all().item() is True
        assert unknown(2).tolist() == [0, 0]
        assert unknown(2).cpu().tolist() == [0, 0]
        assert assumptions == [
            "unknown float32 read as zero",
            "unknown bool read as true",
            "unknown float32 read as zero",
            "unknown float32 read as zero",
        ]


def test_router_choices_are_spread_evenly() -> None:
    with shapes_only() as assumptions:
        values, experts = unknown(6, 8).topk(2, dim=-1)
        assert not is_known(values)
        assert experts.flatten().bincount(minlength=8).tolist() == [2, 2, 2, 2, 1, 1, 1, 1]
        assert all(first != second for first, second in experts.tolist())
        assert assumptions == ["topk of 8 unknown scores: spread evenly"]
        assert unknown(4, 3).argmax(dim=0).tolist() == [0, 1, 2]


def test_the_order_of_unknown_numbers_is_as_they_come() -> None:
    with shapes_only() as assumptions:
        assert unknown(2, 3).sort(dim=-1).indices.tolist() == [[0, 1, 2], [0, 1, 2]]
        assert assumptions == ["sort of unknown numbers: they are in order"]


def test_masks_select_as_many_rows_as_they_have_true() -> None:
    with shapes_only() as assumptions:
        mask = torch.tensor([True, False, True, True], device=0)
        assert unknown(4, 5)[mask].shape == (3, 5)
        assert unknown(4, 5)[mask.unsqueeze(-1).expand(4, 5)].shape == (15,)
        assert assumptions == []
        assert unknown(4, 5)[unknown(4) > 0].shape == (4, 5)
        assert (unknown(4) > 0).nonzero().shape == (4, 1)
        assert assumptions[0] == "a mask that depends on unknown numbers is all true"


def test_a_known_mask_stays_known_however_far_it_is_expanded() -> None:
    with shapes_only() as assumptions:
        mask = torch.tensor([True, False, True, True], device=0)
        width = MAX_KNOWN_ELEMENTS
        assert unknown(4, width)[mask.unsqueeze(-1).expand(4, width)].shape == (3 * width,)
        assert assumptions == []


def test_writing_through_a_mask() -> None:
    with shapes_only():
        hidden = unknown(4, 5)
        hidden[torch.tensor([True, False, True, False], device=0)] = unknown(2, 5)
        assert hidden.shape == (4, 5)


def test_copies_keep_what_is_known() -> None:
    with shapes_only(GIB, GIB):
        assert torch.tensor([1.5, 2.5]).to(0).tolist() == [1.5, 2.5]
        assert torch.tensor([3, 4], device=0).to(1).tolist() == [3, 4]
        target = torch.zeros(2, device=0)
        target.copy_(unknown(2))
        assert not is_known(target)
        target.zero_()
        assert target.tolist() == [0, 0]


def test_a_copy_of_an_expanded_mask_is_known_on_another_device() -> None:
    with shapes_only(GIB, GIB):
        mask = torch.zeros(1, 2000, dtype=torch.bool, device=0)
        mask[0, :3] = True
        expanded = mask.unsqueeze(-1).expand(1, 2000, 1000)  # more than are known of other tensors
        assert unknown(1, 2000, 1000).to(1)[expanded.to(1)].shape == (3000,)
        assert not is_known(expanded.to(1).int())


def test_a_part_of_an_unknown_tensor_does_not_make_it_known() -> None:
    with shapes_only():
        hidden = unknown(4)
        hidden[:2] = torch.tensor([1.0, 2.0], device=0)
        assert not is_known(hidden)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_products_have_the_shape_of_the_gpus_kernel(dtype: torch.dtype) -> None:
    with shapes_only():
        tokens, experts = unknown(12, 16, dtype=dtype), unknown(4, 16, 32, dtype=dtype)
        ends = torch.tensor([3, 6, 9, 12], dtype=torch.int32, device=0)
        product = torch._grouped_mm(tokens, experts, offs=ends)
        assert (product.shape, product.dtype) == ((12, 32), dtype)


def test_the_same_operator_gives_the_same_shapes_again() -> None:
    with shapes_only():
        for _ in range(2):  # the second time from what was inferred the first time
            hidden = unknown(2, 6)
            first, second = hidden.chunk(2, dim=-1)
            assert (second.shape, second.storage_offset()) == ((2, 3), 3)
            assert first.allocation is hidden.allocation  # type: ignore[attr-defined]  # simulated tensors
            values, indices = hidden.max(dim=1)
            assert (values.shape, indices.tolist()) == ((2,), [0, 1])
            assert (torch.ones(2, dtype=torch.long, device=0) * unknown(2)).dtype == torch.float32
            assert hidden.mul_(2) is hidden


def test_an_integer_scalar_and_a_float_one_are_told_apart() -> None:
    with shapes_only():
        large = torch.zeros(MAX_KNOWN_ELEMENTS + 1, dtype=torch.long, device=0)
        assert (large * 2).dtype == torch.long
        assert (large * 2.0).dtype == torch.float32


@pytest.mark.parametrize("ids", [[0, 4], [-1, 2]])
def test_rows_that_an_embedding_lacks_are_refused_as_the_cpu_does(ids: list[int]) -> None:
    with shapes_only(), pytest.raises(IndexError, match="index out of range in self"):
        torch.nn.functional.embedding(torch.tensor(ids, device=0), unknown(4, 2))


def test_the_first_and_last_rows_of_an_embedding_are_there() -> None:
    with shapes_only():
        assert torch.nn.functional.embedding(torch.tensor([[0, 3]], device=0), unknown(4, 2)).shape == (1, 2, 2)
