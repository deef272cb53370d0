"""Why devices stay empty, in words that are true of the placement at hand."""

from __future__ import annotations

import pytest

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import CPU, DISK, Device
from devmap_cli.planning.explaining import unused_reasons
from devmap_cli.planning.nouns import Block, Placement
from devmap_cli.planning.strategies import plan

GPUS = [Device("cuda", index) for index in range(3)]
# a norm of 1, three layers of 10, a norm of 1: 32 bytes
MODEL = [Block((name,), size) for name, size in zip(["first", *"012", "last"], [1, 10, 10, 10, 1], strict=True)]


def placed(strategy: str, *gpus: int, cpu: int = 0, disk: int = 0) -> Placement:
    tiers = {device: size for device, size in ((CPU, cpu), (DISK, disk)) if size}
    answer = plan(strategy, MODEL, Budgets.of({**dict(zip(GPUS, gpus, strict=False)), **tiers}))
    assert isinstance(answer, Placement), answer
    return answer


@pytest.mark.parametrize(
    ("placement", "reason"),
    [
        (placed("auto", 40, disk=100), "all fits on the accelerators"),
        (placed("auto", 15, cpu=100, disk=100), "all fits on the accelerators and cpu"),
        (placed("auto", cpu=100, disk=100), "all fits on cpu"),
    ],
    ids=["gpu", "gpu-cpu", "cpu"],
)
def test_what_holds_all_that_disk_need_not(placement: Placement, reason: str) -> None:
    assert unused_reasons(placement) == [(DISK, reason)]


def test_ram_too_small_for_what_goes_to_disk() -> None:
    placement = placed("auto", 15, cpu=5, disk=100)
    assert unused_reasons(placement) == [(CPU, "no room there for what is offloaded")]


def test_an_accelerator_between_others_that_is_too_small_for_a_layer() -> None:
    # 1 + 10 on GPU 0 of 11; no layer fits in 5 on GPU 1, a norm would
    placement = placed("sequential", 11, 5, 30)
    assert unused_reasons(placement) == [(GPUS[1], "no room there for 1 and what it needs")]


def test_an_accelerator_after_all_that_hold_something() -> None:
    assert unused_reasons(placed("sequential", 22, 22, 22)) == [(GPUS[2], "the devices before it hold all")]
