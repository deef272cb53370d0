"""How fast devices are: what they reach of what their makers state, what was measured, or what is assumed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from devmap_cli.devices.cards import Card, cards

if TYPE_CHECKING:
    from devmap_cli.devices.measuring import Measured

MEMORY_EFFICIENCY: Final = 0.8
"""Share of a memory's stated bandwidth that kernels reach while decoding.

The README of pytorch-labs/gpt-fast lists 1,397 GB/s of an A100's 2,039 for Llama-2-7B in 16 bit (0.69), and its issue
27 some 910 GB/s of an RTX 4090's 1,008 (0.90); the middle is taken.
"""

FLOPS_EFFICIENCY: Final = 0.5
"""Share of the stated peak of matrix products that whole layers reach, what runs between the products included.

44 to 52 % are what Narayanan et al. report for GPT models of 1.7 to 1,008 billion parameters on A100s ("Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, table 1), and 46 % Chowdhery et al. for
PaLM (2022, table 3). Those are training runs; a prompt of thousands of tokens has products of the same shapes.
"""

PINNED_EFFICIENCY: Final = 0.75
"""Share of PCIe's bandwidth that copies from pinned memory reach: 12 of 15.75 GB/s on PCIe 3.0 x16 by NVIDIA's CUDA C++
Best Practices Guide, on pinned memory."""

PAGEABLE_SHARE: Final = 0.5
"""What copies from ordinary memory reach of those from pinned memory, which the driver copies them to first.

accelerate's offloaded weights lie in ordinary memory. NVIDIA's bandwidthTest shows 4.03 against 5.84 GB/s on a GTX
TITAN Black (0.69, issue 18 of ComputationalRadiationPhysics/jungfrau-photoncounter), and 2.31 against 5.77 GB/s on a
laptop (0.40, "How to Optimize Data Transfers in CUDA C/C++", NVIDIA developer blog, 2012).
"""

PAGEABLE_LIMIT: Final = 12e9
"""Bytes per second that one core copies within the host's memory, which a faster PCIe cannot help: servers' cores reach
10 to 14 GB/s in STREAM's copy with one thread."""

KERNEL_SECONDS: Final = 20e-6
"""What Python, transformers and PyTorch's dispatcher take to issue one operator, while the device waits for it.

GPT-J-6B in float16 takes 25.4 ms per token on an RTX 4090 with a Core i7-11700K and PyTorch 1.13 (README of
ENOT-AutoDL/gpt-j-6b-tensorrt-int8: 3,255 ms for 128 tokens more), twice what its memory needs; with the 1,039 operators
that transformers 5 issues for a token that is 24 µs each, with the 1,300 or so of the transformers of then 20. A Llama
so small that its arithmetic takes next to nothing takes 16 µs for each on a server's CPU.
"""

HOP_SECONDS: Final = 20e-6
"""Until a copy between devices begins: 10 to 20 µs without peer access in NVIDIA's p2pBandwidthLatencyTest."""

DISK_BYTES_PER_SECOND: Final = 3.5e9
"""What NVMe drives for PCIe 3.0 x4 are sold with; those for PCIe 4.0 have twice that, SATA a sixth."""

MAPPED_SHARE: Final = 0.6
"""What reading through a memory map reaches of a drive's rate.

safetensors and accelerate map files, and one thread touches their pages in order: the kernel reads ahead by 128 KiB
(Linux's default), where a drive reaches its rate with many requests at a time. That maps stay well below what a drive
gives otherwise is shown by Crotty, Leis and Pavlo, "Are You Sure You Want to Use MMAP in Your Database Management
System?", CIDR 2022.
"""

HOST_BYTES_PER_SECOND: Final = 0.7 * 51.2e9
"""A desktop's two channels of DDR4-3200, of which STREAM reaches some 70 %."""

HOST_FLOPS_PER_SECOND: Final = FLOPS_EFFICIENCY * 8 * 3.5e9 * 32
"""Eight cores at 3.5 GHz, each with two multiply-adds of eight float32 (AVX2) per cycle."""

ASSUMED_CARDS: Final = {"cuda": "A10", "xpu": "Arc A770", "npu": "Ascend 910B 64GB", "mps": "M2 Pro 32GB"}
"""A card from the middle of the table for each kind of device, where only a budget is known."""

_ASSUMED_FLOPS_PER_BYTE: Final = {"mps": 35.0}
_ASSUMED_FLOPS_PER_BYTE_ELSEWHERE: Final = 75.0
"""Operations per byte of bandwidth where a card's peak is not stated: what the least of the table's others have."""
_ASSUMED_PCIE_BYTES_PER_SECOND: Final = 8 * 16e9 / 8 * 128 / 130
"""PCIe 4.0 x8, which laptops have, where a card's is not stated."""


class Basis(Enum):
    """Where the figures of a device come from."""

    STATED = "stated by its maker, of which kernels reach a share"
    MEASURED = "measured on this machine"
    ASSUMED = "those of another device, as nothing is known of this one"


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device reaches, per second.

    Args:
        bytes_per_second: of its memory; of a disk, what is read.
        flops_per_second: floating-point operations of matrix products in the model's dtype.
        kernel_seconds: the least that one operator takes, for it has to be issued.
        host_bytes_per_second: from the host's ordinary memory to this device.
        hop_bytes_per_second: to or from another accelerator through the host.
        link_bytes_per_second: directly to another of the same `name`; None without such a link.
        name: of the card or the assumption.
        basis: where they come from, with the exception of
        assumed: what is assumed nevertheless, in words, and of
        measured: what is measured nevertheless, in words.
    """

    bytes_per_second: float
    flops_per_second: float = math.inf
    kernel_seconds: float = KERNEL_SECONDS
    host_bytes_per_second: float = math.inf
    hop_bytes_per_second: float = math.inf
    link_bytes_per_second: float | None = None
    name: str = ""
    basis: Basis = Basis.STATED
    assumed: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()


def accelerator_rates(
    card: Card | None, dtype: str = "bfloat16", *, kind: str = "cuda", measured: Measured | None = None
) -> Rates:
    """What `card` reaches with a model that computes in `dtype`, torch's name of it.

    Without a card, those of one of `ASSUMED_CARDS` for the `kind` of device. `measured` are figures of the
    machine that the card is in.
    """
    if card is None:
        assumed = _card_named(ASSUMED_CARDS.get(kind, ASSUMED_CARDS["cuda"]))
        return replace(accelerator_rates(assumed, dtype, measured=measured), basis=Basis.ASSUMED, assumed=())
    peak = _peak_flops(card, dtype)
    memory = MEMORY_EFFICIENCY * card.bandwidth_bytes_per_second
    if card.kind == "mps":  # one memory for both: a copy reads and writes it
        pinned = pageable = memory / 2
    else:
        pinned = PINNED_EFFICIENCY * (card.pcie_bytes_per_second or _ASSUMED_PCIE_BYTES_PER_SECOND)
        pageable = min(PAGEABLE_SHARE * pinned, PAGEABLE_LIMIT)
    copied = None if measured is None else measured.copy_bytes_per_second
    pageable = copied or pageable
    link = card.link_bytes_per_second
    assumed_flops = _ASSUMED_FLOPS_PER_BYTE.get(card.kind, _ASSUMED_FLOPS_PER_BYTE_ELSEWHERE)
    return Rates(
        bytes_per_second=memory,
        flops_per_second=FLOPS_EFFICIENCY * (peak or assumed_flops * card.bandwidth_bytes_per_second),
        host_bytes_per_second=pageable,
        hop_bytes_per_second=pinned / 2,  # to the host and back
        link_bytes_per_second=None if link is None else PINNED_EFFICIENCY * link / 2,  # stated for both directions
        name=card.name,
        assumed=(*([] if peak else ["arithmetic"]), *([] if card.pcie or card.kind == "mps" else ["PCIe"])),
        measured=("copies from RAM",) if copied else (),
    )


def host_rates(dtype: str = "bfloat16", measured: Measured | None = None) -> Rates:
    """What the host's CPU reaches: as `measured`, else a desktop's."""
    if measured is None:
        return Rates(HOST_BYTES_PER_SECOND, HOST_FLOPS_PER_SECOND, name="a desktop's CPU", basis=Basis.ASSUMED)
    flops = measured.flops_per_second.get(dtype, measured.flops_per_second["float32"])
    return Rates(measured.memory_bytes_per_second, flops, name="this CPU", basis=Basis.MEASURED)


def disk_rates(measured: Measured | None = None) -> Rates:
    """What is read of mapped files in a second: as `measured`, else of an NVMe drive."""
    if measured is None or measured.disk_bytes_per_second is None:
        return Rates(MAPPED_SHARE * DISK_BYTES_PER_SECOND, name="an NVMe drive", basis=Basis.ASSUMED)
    return Rates(measured.disk_bytes_per_second, name="this disk", basis=Basis.MEASURED)


def _peak_flops(card: Card, dtype: str) -> float | None:
    try:
        return card.peak_flops(dtype)
    except KeyError:  # a type for storage, such as uint8 or float8_e8m0fnu, is computed with in 16 bit
        return card.peak_flops("float16")


@lru_cache(maxsize=len(ASSUMED_CARDS))
def _card_named(name: str) -> Card:
    return next(card for card in cards() if card.name == name)
