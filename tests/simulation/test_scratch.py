"""What kernels take besides their results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from devmap_cli.simulation.backend import simulated_devices

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20


def extra_peak(prepare: Callable[[], tuple[torch.Tensor, ...]], run: Callable[..., torch.Tensor]) -> int:
    """Bytes that `run` takes at its highest moment, its result among them."""
    with simulated_devices([256 * MIB]) as machine:
        device = machine.devices[0]
        tensors = prepare()
        before = device.use.allocated_bytes
        device.reset_peak()
        run(*tensors)
        return device.peak.allocated_bytes - before


def test_the_first_matrix_product_opens_the_library_and_keeps_its_workspace() -> None:
    with simulated_devices([256 * MIB]) as machine:
        device = machine.devices[0]
        ones = torch.ones(4, 4, device=0)
        assert device.workspace_bytes == 0
        ones @ ones
        ones @ ones
        assert device.workspace_bytes == 8519680  # 2 x 4096 KiB + 8 x 16 KiB
        assert device.use.allocated_bytes == 512 + 8519680


def test_indexing_by_a_mask_makes_its_positions() -> None:
    taken = extra_peak(
        lambda: (torch.zeros(64, 32, device=0), torch.ones(64, 32, dtype=torch.bool, device=0)),
        lambda values, mask: values[mask],
    )
    # 2048 elements: two int64 positions each, and the float32 result
    assert taken == 2048 * 2 * 8 + 2048 * 4


def test_a_masked_scatter_counts_through_the_whole_mask() -> None:
    taken = extra_peak(
        lambda: (torch.zeros(64, 32, device=0), torch.ones(64, 1, dtype=torch.bool, device=0)),
        lambda values, mask: values.masked_scatter(mask, values),
    )
    # a prefix sum in int64, the mask at full size, the result
    assert taken == 2048 * 8 + 2048 + 2048 * 4
