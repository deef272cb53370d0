"""How much memory a device uses, and what it says when it has no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from devmap_cli.simulation.work import Work

UNLIMITED_BYTES = 1 << 50
"""Capacity of a device that is to show what a run takes, not whether it fits."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in tensors (`allocated`) and bytes taken from the device (`reserved`)."""

    allocated_bytes: int
    reserved_bytes: int

    def at_least(self, other: MemoryUse) -> MemoryUse:
        """The higher of both, figure by figure."""
        return MemoryUse(
            max(self.allocated_bytes, other.allocated_bytes), max(self.reserved_bytes, other.reserved_bytes)
        )


@dataclass(frozen=True)
class PhaseMemory:
    """The most a device had to hold in one phase, in bytes: `reserved_bytes` is the sum of the other four.

    The KV cache counts as long as it is at the end of the phase. The activations are what else tensors took at the
    highest moment, weights brought from the cpu among them. The overhead is the matrix library's workspace and what
    the allocator reserved beyond tensors.
    """

    weights_bytes: int
    kv_cache_bytes: int
    activation_bytes: int
    overhead_bytes: int

    @classmethod
    def of(cls, use: MemoryUse, *, weights_bytes: int, kv_cache_bytes: int, workspace_bytes: int) -> PhaseMemory:
        """The highest use of a phase, divided by what it was for."""
        return cls(
            weights_bytes=weights_bytes,
            kv_cache_bytes=kv_cache_bytes,
            activation_bytes=use.allocated_bytes - weights_bytes - kv_cache_bytes - workspace_bytes,
            overhead_bytes=workspace_bytes + use.reserved_bytes - use.allocated_bytes,
        )

    @property
    def reserved_bytes(self) -> int:
        """What the allocator took from the device."""
        return self.weights_bytes + self.kv_cache_bytes + self.activation_bytes + self.overhead_bytes


@dataclass(frozen=True)
class DeviceRehearsal:
    """What one device was seen to need; `peak` is the phase with most bytes in tensors.

    `work` is what it did in each phase, and `block_work` the same by block number, where blocks were recorded.
    """

    index: int
    capacity_bytes: int
    phases: Mapping[str, PhaseMemory]
    allocated_bytes: Mapping[str, int]
    peak_phase: str
    work: Mapping[str, Work] = field(default_factory=dict)
    block_work: Mapping[int, Mapping[str, Work]] = field(default_factory=dict)

    @property
    def peak(self) -> PhaseMemory:
        """The figures of the highest phase."""
        return self.phases[self.peak_phase]

    @property
    def most_reserved_bytes(self) -> int:
        """The most that the allocator took from the device in any phase."""
        return max(memory.reserved_bytes for memory in self.phases.values())


class AllocatorOutOfMemoryError(MemoryError):
    """The device cannot serve a request, not even after releasing what was cached."""

    def __init__(self, requested_bytes: int, capacity_bytes: int, use: MemoryUse) -> None:
        self.requested_bytes = requested_bytes
        self.capacity_bytes = capacity_bytes
        self.use = use
        super().__init__(f"out of memory: tried to allocate {requested_bytes} of {capacity_bytes} bytes")

    def describe(self, device: str) -> str:
        """The message as PyTorch words it for `device`."""
        capacity, allocated = _format_size(self.capacity_bytes), _format_size(self.use.allocated_bytes)
        free = _format_size(self.capacity_bytes - self.use.reserved_bytes)
        cached = _format_size(self.use.reserved_bytes - self.use.allocated_bytes)
        return (
            f"{device} out of memory. Tried to allocate {_format_size(self.requested_bytes)}. "
            f"{device} has a total capacity of {capacity} of which {free} is free. "
            f"Of the allocated memory {allocated} is allocated by PyTorch, "
            f"and {cached} is reserved by PyTorch but unallocated. "
            "If reserved but unallocated memory is large try setting "
            "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
        )


def _format_size(num_bytes: int) -> str:
    if num_bytes <= 1 << 10:
        return f"{num_bytes} bytes"
    for unit, shift in (("KiB", 10), ("MiB", 20)):
        if num_bytes <= 1 << (shift + 10):
            return f"{num_bytes / (1 << shift):.2f} {unit}"
    return f"{num_bytes / (1 << 30):.2f} GiB"
