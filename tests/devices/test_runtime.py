"""What a process takes of a device outside PyTorch's allocator."""

from __future__ import annotations

import pytest

from devmap_cli.devices.device import ACCELERATOR_KINDS
from devmap_cli.devices.runtime import is_whole_runtime, runtime_overhead_bytes

MIB = 1 << 20


@pytest.mark.parametrize("kind", ACCELERATOR_KINDS)
def test_every_kind_of_accelerator_has_a_figure(kind: str) -> None:
    assert (runtime_overhead_bytes(kind) > 0) == (kind != "sim")


def test_cuda_is_on_the_high_side_of_what_was_measured_and_not_by_much() -> None:
    with_all_kernels = 666_632_192
    assert with_all_kernels <= runtime_overhead_bytes("cuda") < with_all_kernels + 8 * MIB


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_what_has_no_driver_has_nothing_beside(kind: str) -> None:
    assert runtime_overhead_bytes(kind) == 0


def test_an_eighth_of_a_small_budget_counts_at_most() -> None:
    # 8 x 640 MiB = 5 GiB
    assert runtime_overhead_bytes("cuda", 5 << 30) == 640 * MIB
    assert runtime_overhead_bytes("cuda", 2 << 30) == 256 * MIB
    assert is_whole_runtime("cuda", 5 << 30)
    assert not is_whole_runtime("cuda", (5 << 30) - 8)
    assert is_whole_runtime("sim", 0)
