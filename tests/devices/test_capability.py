"""What the generation of a card decides."""

from __future__ import annotations

import pytest

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.capability import (
    ALL_KERNELS,
    DEFAULT_CAPABILITY,
    NO_KERNELS,
    Capability,
    kernels_of,
    lowest_capability,
    matmul_workspace_bytes,
)
from devmap_cli.devices.cards import Card, parse_gpus
from devmap_cli.devices.device import CPU, Device

MIB = 1 << 20


def cards(gpus: str) -> list[Card]:
    return list(parse_gpus(gpus).values())


@pytest.mark.parametrize(("compute_capability", "expected"), [((8, 0), 8519680), ((9, 0), 32 * MIB), ((7, 5), 8519680)])
def test_workspace_by_generation(compute_capability: Capability, expected: int) -> None:
    assert matmul_workspace_bytes(compute_capability) == expected


@pytest.mark.parametrize(
    ("gpus", "expected"), [("2xA100 80GB", (8, 0)), ("T4,H100", (7, 5)), ("MI300X", DEFAULT_CAPABILITY)]
)
def test_the_oldest_card_decides(gpus: str, expected: Capability) -> None:
    assert lowest_capability(cards(gpus)) == expected


@pytest.mark.parametrize(("gpus", "expected"), [("H100,A100 80GB", (8, 0)), ("MI300X", ALL_KERNELS)])
def test_kernels_of_cards(gpus: str, expected: Capability) -> None:
    assert kernels_of(cards(gpus), Budgets.of(dict.fromkeys(parse_gpus(gpus), 1))) == expected


@pytest.mark.parametrize("device", [CPU, Device("mps"), Device("npu", 0)])
def test_no_kernels_beside_gpus(device: Device) -> None:
    assert kernels_of([], Budgets.of({device: 1})) == NO_KERNELS


def test_kernels_of_unknown_gpus_are_unknown() -> None:
    assert kernels_of([], Budgets.of({Device("cuda", 0): 1, CPU: 1})) is None
