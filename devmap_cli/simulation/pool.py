"""Stretches of a device's memory, and the pools that the caching allocator keeps freed ones in. Free of torch.

Source of the figures: c10/core/AllocatorConfig.h of PyTorch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL_SEGMENT_BYTES = 2 << 20
"""What the small pool asks of the device at a time (`kSmallBuffer`)."""
LARGE_SEGMENT_BYTES = 20 << 20
"""What the large pool asks of the device for a medium request (`kLargeBuffer`)."""


class Block:
    """A stretch of a segment: in use, cached, or (expandable segments only) not backed by memory."""

    __slots__ = ("address", "in_use", "mapped", "next", "pool", "previous", "size")

    def __init__(self, pool: Pool, address: int, size: int, *, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.in_use = False
        self.mapped = mapped
        self.previous: Block | None = None
        self.next: Block | None = None

    def split_off(self, size: int) -> Block:
        """Keep the first `size` bytes; what remains becomes the next block, returned."""
        rest = Block(self.pool, self.address + size, self.size - size, mapped=self.mapped)
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        self.size = size
        return rest

    def absorb_next(self) -> None:
        """Take over the bytes and the neighbour of the next block."""
        after = self.next
        assert after is not None
        self.size += after.size
        self.next = after.next
        if after.next is not None:
            after.next.previous = self


class Pool:
    """The cached blocks of one pool, smallest first, the lower address first among equals."""

    __slots__ = ("blocks", "is_small", "keys", "segment_bytes", "unmapped")

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.segment_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        self.keys: list[tuple[int, int]] = []
        self.blocks: dict[tuple[int, int], Block] = {}
        self.unmapped: list[Block] = []

    def add(self, block: Block) -> None:
        """Take in a freed block."""
        key = (block.size, block.address)
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        """Let go of a block that is here."""
        key = (block.size, block.address)
        del self.keys[bisect_left(self.keys, key)]
        del self.blocks[key]

    def best_fit(self, size: int) -> Block | None:
        """The smallest block of at least `size` bytes, None without one: the first of `at_least`."""
        position = bisect_left(self.keys, (size, 0))
        return self.blocks[self.keys[position]] if position < len(self.keys) else None

    def at_least(self, size: int) -> Iterator[Block]:
        """Cached blocks of `size` bytes or more, best fit first."""
        for position in range(bisect_left(self.keys, (size, 0)), len(self.keys)):
            yield self.blocks[self.keys[position]]
