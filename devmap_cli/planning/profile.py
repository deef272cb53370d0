"""What the blocks of a model need for one workload, as one rehearsal with each block on a device of its own showed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from devmap_cli.planning.nouns import Block
from devmap_cli.planning.speed import Handover
from devmap_cli.simulation.allocator import MIN_BLOCK_BYTES
from devmap_cli.simulation.trace import Event, Trace
from devmap_cli.simulation.work import Work

PREFILL, DECODE = "prefill", "decode"
# Bare integers, for speed: there are thousands of events.
_ALLOCATE, _FREE, _CACHED = map(int, (Event.ALLOCATE, Event.FREE, Event.CACHED))
_COPIES = (int(Event.COPY), int(Event.MOVE))
_PER_DEVICE = (int(Event.WORKSPACE), int(Event.ONCE))


@dataclass(frozen=True, slots=True)
class Profile:
    """A trace, and how its blocks are made of the blocks that a model is cut into.

    Args:
        trace: the allocations of `groups`.
        groups: for each block of the trace the numbers of the model's blocks in it: more than one where the model's
            code needs them on one device.
        work: for each phase what each block of the trace has to do.
        assumptions: what the rehearsal had to assume.
    """

    trace: Trace
    groups: tuple[tuple[int, ...], ...]
    work: Mapping[str, tuple[Work, ...]]
    assumptions: tuple[str, ...] = ()

    @property
    def shared_bytes(self) -> int:
        """What every device takes once for all its blocks: the matrix library's workspace, and rounding."""
        once = {
            (event, size) for events in self.trace.phases.values() for event, _, size in events if event in _PER_DEVICE
        }
        lost = sum(_rounded(size) - size for _, size in self.trace.weights)
        return sum(_rounded(size) for _, size in once) + lost

    def blocks(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """The blocks to place: those of the model, put together as `groups` says, with what they need."""
        needs = _Needs(self.trace)
        return tuple(
            needs.added_to(_joined([blocks[index] for index in group]), number)
            for number, group in enumerate(self.groups)
        )

    def handovers(self) -> tuple[Handover, ...]:
        """What blocks of the trace get of each other."""
        totals: dict[tuple[int, int, str], list[int]] = {}
        blocks: list[int] = []
        homes = self.trace.homes
        for phase, events in self.trace.phases.items():
            source = None
            for event, first, second in events:
                if event in _COPIES:
                    source = blocks[first]
                elif event == _ALLOCATE or event in _PER_DEVICE:
                    block = homes[first]
                    blocks.append(block)
                    if source is not None and source != block:
                        total = totals.setdefault((source, block, phase), [0, 0])
                        total[0] += second
                        total[1] += 1
                    source = None
        return tuple(Handover(*key, num_bytes, num_copies) for key, (num_bytes, num_copies) in totals.items())

    def to_document(self) -> dict[str, Any]:
        """The profile as plain data."""
        return {
            "trace": self.trace.to_document(),
            "groups": self.groups,
            "work": {
                phase: [[work.flops, work.bytes_moved, work.num_kernels, work.moving_bytes] for work in works]
                for phase, works in self.work.items()
            },
            "assumptions": self.assumptions,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Profile:
        """Back from `to_document`."""
        return cls(
            trace=Trace.from_document(document["trace"]),
            groups=tuple(map(tuple, document["groups"])),
            work={phase: tuple(Work(*numbers) for numbers in works) for phase, works in document["work"].items()},
            assumptions=tuple(document["assumptions"]),
        )


def _joined(blocks: Sequence[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    return Block(
        fqns=tuple(fqn for block in blocks for fqn in block.fqns),
        weights_bytes=sum(block.weights_bytes for block in blocks),
        kv_cache_bytes=sum(block.kv_cache_bytes for block in blocks),
        streamed_bytes=max(block.streamed_bytes for block in blocks),
    )


@dataclass(slots=True)
class _Tensor:
    """What is held by a block, until none of its uses is left."""

    block: int
    num_bytes: int
    num_uses: int = 1


class _Needs:
    """What each block of a trace had at most, with all others elsewhere."""

    def __init__(self, trace: Trace) -> None:
        self._load = trace.conversion_bytes
        self._peaks: dict[str, list[int]] = {}
        self._kv_cache: dict[str, list[int]] = {}
        in_use = [0] * trace.num_blocks
        live = {-index: _Tensor(block, _rounded(size)) for index, (block, size) in enumerate(trace.weights, start=1)}
        number, homes = 0, trace.homes
        source: _Tensor | None = None
        for phase, events in trace.phases.items():
            peaks, kept = list(in_use), [0] * trace.num_blocks
            for event, first, second in events:
                if event == _ALLOCATE:
                    block = homes[first]
                    if source is not None and source.block == block:
                        live[number] = source
                        source.num_uses += 1
                    else:
                        tensor = live[number] = _Tensor(block, _rounded(second))
                        in_use[block] += tensor.num_bytes
                        peaks[block] = max(peaks[block], in_use[block])
                    number, source = number + 1, None
                elif event == _FREE:
                    freed = live.pop(first, None)
                    if freed is not None:
                        freed.num_uses -= 1
                        in_use[freed.block] -= 0 if freed.num_uses else freed.num_bytes
                elif event in _COPIES:
                    source = live.get(first)
                elif event in _PER_DEVICE:
                    number += 1
                elif event == _CACHED:
                    tensor = live[first]
                    kept[tensor.block] += tensor.num_bytes
            self._peaks[phase], self._kv_cache[phase] = peaks, kept
        self._left = in_use

    def added_to(self, block: Block, number: int) -> Block:
        """`block` with what block `number` of the trace needs."""
        last = DECODE if DECODE in self._peaks else PREFILL
        left = max(0, self._left[number])  # weights that were unpacked for good
        kv_cache = self._kv_cache[last][number] + left
        prompt_kv_cache = self._kv_cache[PREFILL][number] + left
        return replace(
            block,
            kv_cache_bytes=kv_cache,
            transient_bytes=max(0, self._peaks[last][number] - kv_cache),
            load_transient_bytes=self._load[number],
            prompt_kv_cache_bytes=prompt_kv_cache,
            prompt_transient_bytes=max(0, self._peaks[PREFILL][number] - prompt_kv_cache),
        )


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
