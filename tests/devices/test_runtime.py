"""What a process takes of a device outside PyTorch's allocator."""

from __future__ import annotations

import pytest

from devmap_cli.devices.device import ACCELERATOR_KINDS
from devmap_cli.devices.runtime import runtime_overhead_bytes

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
