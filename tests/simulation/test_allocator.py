"""The caching allocator against sequences worked out by hand from PyTorch's published rules."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devmap_cli.simulation.allocator import CachingAllocator
from devmap_cli.simulation.memory import AllocatorOutOfMemoryError, MemoryUse
from devmap_cli.simulation.pool import Block

if TYPE_CHECKING:
    from collections.abc import Sequence

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("request_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),  # rounded to 512 B, from a 2 MiB segment
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest of the small pool
        (MIB + 1, MIB + 512, 20 * MIB),  # the smallest of the large pool, split off a 20 MiB segment
        (10 * MIB - 1, 10 * MIB, 10 * MIB),  # rounded to 10 MiB first, which is no longer "below 10 MiB"
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),  # 2 MiB - 512 B remain, over 1 MiB: split off
        (11 * MIB, 12 * MIB, 12 * MIB),  # exactly 1 MiB remains, not over it: the block keeps it all
        (21 * MIB + 512, 22 * MIB, 22 * MIB),
    ],
)
def test_one_request(request_bytes: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator(GIB)
    allocator.allocate(request_bytes)
    assert allocator.use == MemoryUse(allocated, reserved)


def test_small_requests_share_a_segment() -> None:
    allocator = CachingAllocator(GIB)
    for _ in range(4):
        allocator.allocate(512 * KIB)  # four halves of a MiB fill 2 MiB
    assert allocator.use == MemoryUse(2 * MIB, 2 * MIB)
    allocator.allocate(1)  # the fifth request needs a second segment
    assert allocator.use == MemoryUse(2 * MIB + 512, 4 * MIB)


def test_medium_requests_share_a_segment() -> None:
    allocator = CachingAllocator(GIB)
    allocator.allocate(6 * MIB)
    allocator.allocate(6 * MIB)
    allocator.allocate(7 * MIB)  # 20 - 12 = 8 MiB are left; 1 MiB remains, not over 1 MiB: block of 8 MiB
    assert allocator.use == MemoryUse(20 * MIB, 20 * MIB)
    allocator.allocate(2 * MIB)
    assert allocator.use == MemoryUse(22 * MIB, 40 * MIB)


def test_freed_memory_is_cached_and_reused() -> None:
    allocator = CachingAllocator(GIB)
    block = allocator.allocate(100 * MIB)
    address = block.address
    allocator.free(block)
    assert allocator.use == MemoryUse(0, 100 * MIB)
    again = allocator.allocate(100 * MIB)
    assert again.address == address
    assert allocator.use == MemoryUse(100 * MIB, 100 * MIB)


def test_best_fit_takes_the_smallest_block_that_serves() -> None:
    allocator = CachingAllocator(GIB)
    blocks = [allocator.allocate(size * MIB) for size in (40, 20, 30)]
    addresses = {block.size // MIB: block.address for block in blocks}
    for block in blocks:
        allocator.free(block)
    # 25 MiB: 30 is the best fit, though 40 was first; 5 MiB remain, over 1 MiB: split.
    taken = allocator.allocate(25 * MIB)
    assert (taken.address, taken.size) == (addresses[30], 25 * MIB)
    # 4 MiB: the 5 MiB that remained of 30; 1 MiB would remain: not split.
    taken = allocator.allocate(4 * MIB)
    assert (taken.address, taken.size) == (addresses[30] + 25 * MIB, 5 * MIB)
    assert allocator.use == MemoryUse(30 * MIB, 90 * MIB)


def test_freed_neighbours_join() -> None:
    allocator = CachingAllocator(20 * MIB)
    first, second, third = (allocator.allocate(size * MIB) for size in (5, 6, 9))
    allocator.free(first)
    allocator.free(third)
    allocator.free(second)  # joins both sides: one block of 20 MiB again
    whole = allocator.allocate(20 * MIB)
    assert (whole.address, whole.size) == (first.address, 20 * MIB)


def test_a_segment_in_use_in_part_fragments_memory() -> None:
    allocator = CachingAllocator(40 * MIB)
    left = allocator.allocate(20 * MIB)
    right = allocator.allocate(20 * MIB)
    allocator.free(left)
    allocator.free(right)
    assert allocator.allocate(2 * MIB).size == 2 * MIB  # 18 MiB of its segment are cached, the other is whole
    # 22 MiB: no cached block serves; the untouched 20 MiB segment is released, 20 MiB are free: not enough.
    with pytest.raises(AllocatorOutOfMemoryError):
        allocator.allocate(22 * MIB)
    assert allocator.use == MemoryUse(2 * MIB, 20 * MIB)


def test_cached_segments_are_released_before_giving_up() -> None:
    allocator = CachingAllocator(100 * MIB)
    for _ in range(2):
        allocator.free(allocator.allocate(40 * MIB))
    small = allocator.allocate(1)  # 40 + 2 MiB reserved
    allocator.allocate(90 * MIB)  # 58 MiB free: releases the cached 40
    assert allocator.use == MemoryUse(90 * MIB + 512, 92 * MIB)
    allocator.free(small)
    allocator.empty_cache()
    assert allocator.use == MemoryUse(90 * MIB, 90 * MIB)


def test_out_of_memory_has_the_familiar_figures() -> None:
    allocator = CachingAllocator(64 * MIB)
    allocator.free(allocator.allocate(8 * MIB))
    allocator.allocate(3 * MIB)
    with pytest.raises(AllocatorOutOfMemoryError) as caught:
        allocator.allocate(45 * MIB)  # a segment of 46 MiB
    error = caught.value
    assert (error.requested_bytes, error.capacity_bytes) == (46 * MIB, 64 * MIB)
    assert error.use == MemoryUse(3 * MIB, 20 * MIB)
    assert error.describe("sim:0").startswith(
        "sim:0 out of memory. Tried to allocate 46.00 MiB. sim:0 has a total capacity of 64.00 MiB of which "
        "44.00 MiB is free. Of the allocated memory 3.00 MiB is allocated by PyTorch, "
        "and 17.00 MiB is reserved by PyTorch but unallocated."
    )
    assert allocator.num_out_of_memory == 1
    allocator.allocate(44 * MIB)  # exactly what is left


def test_sizes_in_words() -> None:
    error = AllocatorOutOfMemoryError(1024, 3 * GIB, MemoryUse(1536, 2 * MIB))
    text = error.describe("sim:1")
    assert "allocate 1024 bytes" in text
    assert "capacity of 3.00 GiB" in text
    assert "1.50 KiB is allocated" in text


def test_peaks_and_their_reset() -> None:
    allocator = CachingAllocator(GIB)
    kept = allocator.allocate(30 * MIB)
    allocator.free(allocator.allocate(50 * MIB))
    assert allocator.peak == MemoryUse(80 * MIB, 80 * MIB)
    allocator.reset_peak()
    assert allocator.peak == MemoryUse(30 * MIB, 80 * MIB)  # the 50 MiB segment is still reserved
    allocator.free(kept)
    assert allocator.use.allocated_bytes == 0
    assert allocator.peak == MemoryUse(30 * MIB, 80 * MIB)


def test_each_phase_has_its_own_peak() -> None:
    allocator = CachingAllocator(GIB)
    with allocator.phase("load"):
        allocator.allocate(100 * MIB)
    with allocator.phase("prefill"):
        allocator.free(allocator.allocate(60 * MIB))
    with allocator.phase("decode"):
        allocator.free(allocator.allocate(10 * MIB))  # 10 of the cached 60
    assert allocator.phases == {
        "load": MemoryUse(100 * MIB, 100 * MIB),
        "prefill": MemoryUse(160 * MIB, 160 * MIB),
        "decode": MemoryUse(110 * MIB, 160 * MIB),
    }
    with allocator.phase("decode"):  # entered again: the higher of both
        allocator.allocate(200 * MIB)
    assert allocator.phases["decode"] == MemoryUse(300 * MIB, 360 * MIB)
    assert allocator.peak == MemoryUse(300 * MIB, 360 * MIB)


def test_what_is_allocated_outside_phases_belongs_to_none() -> None:
    allocator = CachingAllocator(GIB)
    with allocator.phase("load"):
        pass
    allocator.allocate(MIB)
    assert allocator.phases == {"load": MemoryUse(0, 0)}


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_nothing_cannot_be_allocated(num_bytes: int) -> None:
    with pytest.raises(ValueError, match="cannot allocate"):
        CachingAllocator(GIB).allocate(num_bytes)


def test_a_block_is_freed_once() -> None:
    allocator = CachingAllocator(GIB)
    block = allocator.allocate(1)
    allocator.free(block)
    with pytest.raises(ValueError, match="freed already"):
        allocator.free(block)


# ---------------------------------------------------------------- expandable segments


def test_an_expandable_segment_grows_by_pages() -> None:
    allocator = CachingAllocator(GIB, expandable_segments=True)
    allocator.allocate(11 * MIB)  # one page of 20 MiB; split to the byte, not kept at 12
    assert allocator.use == MemoryUse(11 * MIB, 20 * MIB)
    allocator.allocate(30 * MIB)  # 9 MiB are cached at the end, 21 missing: two pages more
    assert allocator.use == MemoryUse(41 * MIB, 60 * MIB)
    allocator.allocate(MIB)  # the small pool has pages of 2 MiB
    assert allocator.use == MemoryUse(42 * MIB, 62 * MIB)


def test_expandable_segments_do_not_fragment() -> None:
    allocator = CachingAllocator(60 * MIB, expandable_segments=True)
    blocks = [allocator.allocate(20 * MIB) for _ in range(3)]
    allocator.free(blocks[0])
    allocator.free(blocks[1])
    joined = allocator.allocate(40 * MIB)  # two neighbours that were segments of their own otherwise
    assert joined.address == blocks[0].address
    assert allocator.use == MemoryUse(60 * MIB, 60 * MIB)


def test_expandable_segments_give_back_whole_pages() -> None:
    allocator = CachingAllocator(GIB, expandable_segments=True)
    first = allocator.allocate(26 * MIB)
    kept = allocator.allocate(26 * MIB)  # 26-52 MiB of 60
    allocator.free(first)
    allocator.empty_cache()  # of 0-26 the page 0-20 goes; 52-60 lies within the third page
    assert allocator.use == MemoryUse(26 * MIB, 40 * MIB)
    again = allocator.allocate(26 * MIB)  # the first page is mapped again and joins the 6 MiB left there
    assert again.address == first.address
    assert allocator.use == MemoryUse(52 * MIB, 60 * MIB)
    allocator.free(again)
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.use == MemoryUse(0, 0)


def test_an_expandable_segment_runs_out_of_memory() -> None:
    allocator = CachingAllocator(50 * MIB, expandable_segments=True)
    allocator.allocate(40 * MIB)
    with pytest.raises(AllocatorOutOfMemoryError):
        allocator.allocate(10 * MIB)  # another page of 20 MiB would pass 50 MiB
    assert allocator.use == MemoryUse(40 * MIB, 40 * MIB)


# ---------------------------------------------------------------- properties

SIZES = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 2 * MIB), st.integers(1, 30 * MIB))
ACTIONS = st.lists(st.tuples(SIZES, st.integers(0, 5)), min_size=1, max_size=60)


def _check_consistent(allocator: CachingAllocator, live: Sequence[tuple[int, Block]]) -> None:
    use = allocator.use
    assert 0 <= use.allocated_bytes <= use.reserved_bytes <= allocator.capacity_bytes
    assert use.allocated_bytes == sum(block.size for _, block in live)
    assert use.reserved_bytes <= allocator.peak.reserved_bytes
    assert use.allocated_bytes <= allocator.peak.allocated_bytes
    spans = sorted((block.address, block.address + block.size) for _, block in live)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


@settings(max_examples=60, deadline=None)
@given(ACTIONS, st.booleans())
def test_memory_adds_up(actions: list[tuple[int, int]], expandable: bool) -> None:
    """Each action allocates, then frees the live block its second figure points at, or empties the cache."""
    allocator = CachingAllocator(120 * MIB, expandable_segments=expandable)
    live: list[tuple[int, Block]] = []
    for size, choice in actions:
        try:
            block = allocator.allocate(size)
        except AllocatorOutOfMemoryError:
            allocator.empty_cache()
        else:
            assert block.size >= size
            live.append((size, block))
        if choice < len(live):
            allocator.free(live.pop(choice)[1])
        elif choice == 5:
            allocator.empty_cache()
        _check_consistent(allocator, live)
    for _, block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.use == MemoryUse(0, 0)


def test_threads_do_not_lose_bytes() -> None:
    allocator = CachingAllocator(GIB)

    def churn() -> None:
        for size in range(1, 400):
            allocator.free(allocator.allocate(size * KIB))

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    allocator.empty_cache()
    assert allocator.use == MemoryUse(0, 0)


def test_a_released_block_is_free_for_the_next_request() -> None:
    allocator = CachingAllocator(20 * MIB)
    block = allocator.allocate(20 * MIB)
    allocator.release(block)
    assert allocator.allocate(20 * MIB).address == block.address
    assert allocator.peak == MemoryUse(20 * MIB, 20 * MIB)


def test_a_released_block_no_longer_counts() -> None:
    allocator = CachingAllocator(GIB)
    allocator.release(allocator.allocate(MIB))
    assert allocator.use == MemoryUse(0, 2 * MIB)
