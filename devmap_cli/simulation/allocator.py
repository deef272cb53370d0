"""A device's memory, handed out by the published rules of PyTorch's CUDA caching allocator.

Source of every rule and figure: c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of PyTorch.
One stream, `max_split_size` and garbage collection at their defaults (off), so that cached segments are
released all at once before an allocation fails. Free of torch: sizes in, addresses out.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from devmap_cli.simulation.memory import AllocatorOutOfMemoryError, MemoryUse
from devmap_cli.simulation.pool import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES, Block, Pool

if TYPE_CHECKING:
    from collections.abc import Iterator

MIN_BLOCK_BYTES = 512
"""Every block is a multiple of this (`kMinBlockSize`)."""
SMALL_REQUEST_BYTES = 1 << 20
"""Requests up to this come from the small pool (`kSmallSize`)."""
MIN_LARGE_REQUEST_BYTES = 10 << 20
"""Requests from this on get a segment of their own size (`kMinLargeAlloc`) …"""
ROUND_LARGE_BYTES = 2 << 20
"""… rounded up to this (`kRoundLarge`)."""


class CachingAllocator:
    """Serves one device of `capacity_bytes`; safe to use from several threads.

    `expandable_segments` stands for PYTORCH_ALLOC_CONF=expandable_segments:True: one growing address range
    per pool instead of many segments, so that freed neighbours always join.
    """

    def __init__(self, capacity_bytes: int, *, expandable_segments: bool = False, base_address: int = 0) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"a device cannot have a capacity of {capacity_bytes} bytes")
        self.capacity_bytes = capacity_bytes
        self.expandable_segments = expandable_segments
        self.num_out_of_memory = 0
        self._lock = threading.Lock()
        self._released: deque[Block] = deque()
        # Whole large pages, so that segments and the pages of expandable ones are aligned; never 0.
        self._next_address = (base_address // LARGE_SEGMENT_BYTES + 1) * LARGE_SEGMENT_BYTES
        self._small = Pool(is_small=True)
        self._large = Pool(is_small=False)
        self._allocated = 0
        self._reserved = 0
        self._peak = MemoryUse(0, 0)
        self._phase: str | None = None
        self._phases: dict[str, MemoryUse] = {}
        # The peaks since they were last folded into _peak and _phases: bare integers, for speed.
        self._high_allocated = 0
        self._high_reserved = 0

    # ------------------------------------------------------------------ figures

    @property
    def use(self) -> MemoryUse:
        """What is allocated and reserved now."""
        with self._lock:
            self._settle()
            return MemoryUse(self._allocated, self._reserved)

    @property
    def peak(self) -> MemoryUse:
        """The highest figures since the start, or since `reset_peak`."""
        with self._lock:
            self._fold_peaks()
            return self._peak

    @property
    def phases(self) -> dict[str, MemoryUse]:
        """The highest figures within each named phase, in the order of their first entry."""
        with self._lock:
            self._fold_peaks()
            return dict(self._phases)

    @property
    def free_bytes(self) -> int:
        """What the device has left to reserve (`free` of `torch.accelerator.get_memory_info`)."""
        with self._lock:
            return self.capacity_bytes - self._reserved

    def reset_peak(self) -> None:
        """Let `peak` start again from what is in use now."""
        with self._lock:
            self._settle()
            self._fold_peaks()
            self._peak = MemoryUse(self._allocated, self._reserved)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the peaks within as those of phase `name`; an inner phase is recorded alone."""
        with self._lock:
            outer = self._enter_phase(name)
        try:
            yield
        finally:
            with self._lock:
                self._enter_phase(outer)

    def _enter_phase(self, name: str | None) -> str | None:
        self._settle()
        self._fold_peaks()
        left, self._phase = self._phase, name
        self._fold_peaks()
        return left

    def _fold_peaks(self) -> None:
        high = MemoryUse(self._high_allocated, self._high_reserved)
        self._peak = self._peak.at_least(high)
        if self._phase is not None:
            self._phases[self._phase] = self._phases.get(self._phase, high).at_least(high)
        self._high_allocated, self._high_reserved = self._allocated, self._reserved

    # ------------------------------------------------------------------ allocate and free

    def allocate(self, num_bytes: int) -> Block:
        """A block of at least `num_bytes`.

        Raises AllocatorOutOfMemoryError, ValueError for a request of nothing.
        """
        if num_bytes <= 0:
            raise ValueError(f"cannot allocate {num_bytes} bytes")
        size = -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        with self._lock:
            self._settle()
            pool = self._small if size <= SMALL_REQUEST_BYTES else self._large
            block = self._take_cached(pool, size) or self._take_new(pool, size)
            remaining = block.size - size
            if remaining and self._may_split(pool, remaining):
                pool.add(block.split_off(size))
            block.in_use = True
            self._allocated += block.size
            if self._allocated > self._high_allocated:
                self._high_allocated = self._allocated
            return block

    def free(self, block: Block) -> None:
        """Return `block` to the cache, joined with the cached blocks beside it."""
        with self._lock:
            self._settle()
            self._free(block)

    def release(self, block: Block) -> None:
        """Free `block` with the next call: for finalizers, which may run in the middle of any other one."""
        self._released.append(block)

    def empty_cache(self) -> None:
        """Give every segment that no tensor uses back to the device."""
        with self._lock:
            self._settle()
            self._release_segments()

    def _settle(self) -> None:
        while self._released:
            self._free(self._released.popleft())

    def _free(self, block: Block) -> None:
        if not block.in_use:
            raise ValueError(f"the block at {block.address:#x} was freed already")
        block.in_use = False
        self._allocated -= block.size
        self._cache(block)

    def _release_segments(self) -> None:
        for pool in (self._large, self._small):
            for block in list(pool.blocks.values()):
                if self.expandable_segments:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    pool.remove(block)
                    self._reserved -= block.size

    def _may_split(self, pool: Pool, remaining: int) -> bool:
        if pool.is_small or self.expandable_segments:
            return remaining >= MIN_BLOCK_BYTES
        return remaining > SMALL_REQUEST_BYTES

    def _cache(self, block: Block) -> Block:
        """Put `block` among the cached ones, joined with its neighbours; the block it ends up in."""
        before, after = block.previous, block.next
        if after is not None and not after.in_use and after.mapped:
            block.pool.remove(after)
            block.absorb_next()
        if before is not None and not before.in_use and before.mapped:
            block.pool.remove(before)
            before.absorb_next()
            block = before
        block.pool.add(block)
        return block

    def _take_cached(self, pool: Pool, size: int) -> Block | None:
        best = self._best_expandable(pool, size) if self.expandable_segments else pool.best_fit(size)
        if best is not None:
            pool.remove(best)
        return best

    def _best_expandable(self, pool: Pool, size: int) -> Block | None:
        """The smallest that cannot grow as much as a larger one."""
        best: Block | None = None
        for block in pool.at_least(size):
            if best is not None and _expandable_size(block) >= _expandable_size(best):
                break
            best = block
        return best

    def _take_new(self, pool: Pool, size: int) -> Block:
        wanted = _segment_size(size)
        take = self._take_expandable if self.expandable_segments else self._take_segment
        block = take(pool, wanted)
        if block is None:
            self._release_segments()
            block = take(pool, wanted)
        if block is None:
            self.num_out_of_memory += 1
            raise AllocatorOutOfMemoryError(wanted, self.capacity_bytes, MemoryUse(self._allocated, self._reserved))
        return block

    def _take_segment(self, pool: Pool, size: int) -> Block | None:
        if not self._reserve(size):
            return None
        return Block(pool, self._new_addresses(size), size)

    def _reserve(self, size: int) -> bool:
        if self._reserved + size > self.capacity_bytes:
            return False
        self._reserved += size
        self._high_reserved = max(self._high_reserved, self._reserved)
        return True

    def _new_addresses(self, size: int) -> int:
        address = self._next_address
        self._next_address += -(-size // LARGE_SEGMENT_BYTES) * LARGE_SEGMENT_BYTES
        return address

    # ------------------------------------------------------------------ expandable segments

    def _take_expandable(self, pool: Pool, size: int) -> Block | None:
        """Grow a cached block at the end of what is mapped, or start there, until it has `size` bytes."""
        block = self._find_room(pool, size)
        if not block.mapped:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            assert block.next is not None
            mapped = self._map(block.next, min(size - block.size, block.next.size))
            if mapped is None:
                return None
            block = mapped
        pool.remove(block)
        return block

    def _find_room(self, pool: Pool, size: int) -> Block:
        for unmapped in sorted(pool.unmapped, key=lambda block: block.address):
            before = unmapped.previous
            start = before if before is not None and not before.in_use else unmapped
            if _free_run(start, size) >= size:
                return start
        span = max(size, self.capacity_bytes + self.capacity_bytes // 8)
        span = -(-span // pool.segment_bytes) * pool.segment_bytes
        block = Block(pool, self._new_addresses(span), span, mapped=False)
        pool.unmapped.append(block)
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        """Back the first `size` bytes of `block` with whole pages; the cached block they end up in."""
        pages = -(-size // block.pool.segment_bytes) * block.pool.segment_bytes
        if not self._reserve(pages):
            return None
        block.pool.unmapped.remove(block)
        if pages < block.size:
            block.pool.unmapped.append(block.split_off(pages))
        block.mapped = True
        return self._cache(block)

    def _unmap(self, block: Block) -> None:
        """Take the memory from the whole pages within the cached `block`."""
        pool = block.pool
        page = pool.segment_bytes
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if start >= end:
            return
        pool.remove(block)
        if block.address < start:
            head, block = block, block.split_off(start - block.address)
            pool.add(head)
        if end < block.address + block.size:
            pool.add(block.split_off(end - block.address))
        block.mapped = False
        self._reserved -= end - start
        self._join_unmapped(block)

    def _join_unmapped(self, block: Block) -> None:
        pool = block.pool
        after, before = block.next, block.previous
        if after is not None and not after.mapped:
            pool.unmapped.remove(after)
            block.absorb_next()
        if before is not None and not before.mapped:
            pool.unmapped.remove(before)
            before.absorb_next()
            block = before
        pool.unmapped.append(block)


def _segment_size(size: int) -> int:
    if size <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_REQUEST_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def _expandable_size(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _free_run(block: Block | None, wanted: int) -> int:
    """Bytes of the blocks from `block` on that nothing uses, counted no further than `wanted`."""
    total = 0
    while block is not None and not block.in_use and total < wanted:
        total += block.size
        block = block.next
    return total
