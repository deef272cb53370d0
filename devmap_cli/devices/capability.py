"""What depends on the generation of a card: its compute capability, as NVIDIA counts it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from devmap_cli.devices.budgets import Budgets
    from devmap_cli.devices.cards import Card

Capability = tuple[int, int]

DEFAULT_CAPABILITY: Final[Capability] = (8, 0)
"""Taken for cards that are not known, and for those of other makers."""
FLASH_CAPABILITY: Final[Capability] = (8, 0)
"""From here on FlashAttention 2 runs."""
BFLOAT16_CAPABILITY: Final[Capability] = (8, 0)
"""From here on bfloat16 has units of its own."""
NO_KERNELS: Final[Capability] = (0, 0)
"""Of devices for which nobody wrote kernels that compute with packed floats."""

_KINDS_WITHOUT_KERNELS: Final = ("mps", "npu")
ALL_KERNELS: Final[Capability] = (9, 0)
"""Of devices that have kernels for all packed floats. AMD's and Intel's cards count as such: transformers has them for
both, and ROCm's own numbers for cards with matrix units are from (9, 0) on."""


def capability_of(card: Card | None) -> Capability:
    """The compute capability of `card`, `DEFAULT_CAPABILITY` where it is not known or has none."""
    return DEFAULT_CAPABILITY if card is None else card.compute_capability or DEFAULT_CAPABILITY


def lowest_capability(cards: Iterable[Card]) -> Capability:
    """The lowest of several cards', which decides where all of them must do the same."""
    return min(map(capability_of, cards), default=DEFAULT_CAPABILITY)


def kernels_of(cards: Iterable[Card], budgets: Budgets) -> Capability | None:
    """What decides whether packed floats stay packed: the lowest capability; None where the devices are not known."""
    if not budgets.accelerators or any(device.kind in _KINDS_WITHOUT_KERNELS for device in budgets.accelerators):
        return NO_KERNELS
    return min((card.compute_capability or ALL_KERNELS for card in cards), default=None)


def matmul_workspace_bytes(compute_capability: Capability) -> int:
    """What PyTorch gives a cuBLAS handle to work in.

    Source: `getChosenWorkspaceSize` of aten/src/ATen/cuda/CublasHandlePool.cpp, after NVIDIA's recommendation for
    cublasSetWorkspace: 32 MiB on Hopper, ":4096:2:16:8" (2 x 4096 KiB + 8 x 16 KiB) before and after.
    """
    return 32 << 20 if compute_capability[0] == 9 else (2 * 4096 + 8 * 16) << 10
