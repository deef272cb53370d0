"""How much memory a device uses, and what it says when it has no more."""

from __future__ import annotations

from dataclasses import dataclass


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
