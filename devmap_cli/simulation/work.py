"""How much a device has to do: operations, bytes and kernels. Free of torch, so that planners can add it up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """What a device does in one phase; the decode phase is one step with the cache at its final length.

    Args:
        flops: floating-point operations of matrix products, convolutions and attention, a multiply-add counting two.
        bytes_moved: what kernels read and write in the device's memory, copies from other devices not among it.
        num_kernels: operators that start a kernel, so neither views nor memory alone.
        moving_bytes: the part of `bytes_moved` that kernels without such operations move, which take their turn.
    """

    flops: int = 0
    bytes_moved: int = 0
    num_kernels: int = 0
    moving_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        """Both, one after the other."""
        return Work(
            self.flops + other.flops,
            self.bytes_moved + other.bytes_moved,
            self.num_kernels + other.num_kernels,
            self.moving_bytes + other.moving_bytes,
        )


PHASES = ("load", "prefill", "decode")
"""The phases of a run; a short one ends before the last."""


class WorkCounter:
    """Adds up what one device does, phase by phase, and block by block where several share it."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int | None], list[int]] = {}

    def add(self, phase: str, flops: int, bytes_moved: int, block: int | None = None) -> None:
        """Count one kernel in `phase`, for block number `block` if that is known."""
        counts = self._counts.get((phase, block))
        if counts is None:
            counts = self._counts[phase, block] = [0, 0, 0, 0]
        counts[0] += flops
        counts[1] += bytes_moved
        counts[2] += 1
        if not flops:
            counts[3] += bytes_moved

    def work(self, phase: str) -> Work:
        """What was done in `phase`; nothing in one that did not come."""
        found = (Work(*counts) for (counted, _), counts in self._counts.items() if counted == phase)
        return sum(found, Work())

    def by_block(self) -> dict[int, dict[str, Work]]:
        """What was done for each block that did anything, in each of the phases."""
        blocks = sorted({block for _, block in self._counts if block is not None})
        return {block: {phase: Work(*self._counts.get((phase, block), ())) for phase in PHASES} for block in blocks}
