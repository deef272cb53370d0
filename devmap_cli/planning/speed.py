"""Predicts how fast a placement runs, from what its blocks have to do and how fast its devices are.

The model is a roofline (Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for
Multicore Architectures", 2009) per block, floored by the time to issue its operators. Blocks run one after the other,
as accelerate's hooks run them, so that seconds add up over devices. A block on cpu or disk computes on the main device,
and its weights are brought there for every forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING

from devmap_cli.devices.device import DISK, Device, main_device
from devmap_cli.planning.rates import HOP_SECONDS, Rates
from devmap_cli.simulation.work import Work

if TYPE_CHECKING:
    from devmap_cli.simulation.machine import Transfer


@dataclass(frozen=True, slots=True)
class BlockWork:
    """What there is to know of a block's speed.

    Args:
        weights_bytes: what is loaded, and brought for every forward if the block is offloaded.
        prefill: of all prompts at once.
        decode: of one step with the cache at its final length, which gives each sequence a token.
        output_bytes_per_token: what it hands to the next block, per token and sequence.
        num_forwards: how often its weights are brought per step if it is offloaded: more than once where modules of
            one block that run at different times share them, such as tied embeddings.
        stored_bytes: what is read of the checkpoint for it, if other than `weights_bytes` (quantized while loading).
    """

    weights_bytes: int
    prefill: Work
    decode: Work
    output_bytes_per_token: int = 0
    num_forwards: int = 1
    stored_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Handover:
    """What block number `target` gets of block number `source` in one phase, if they compute on different devices."""

    source: int
    target: int
    phase: str
    num_bytes: int
    num_copies: int = 1


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """Seconds that one device takes, among them those of bringing what lies there to where it computes."""

    seconds_per_token: float = 0.0
    seconds_to_first_token: float = 0.0
    load_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a placement is: the sums over `devices`.

    Args:
        seconds_per_token: of one decode step, which gives each sequence a token, with the cache at its final length.
        seconds_to_first_token: of the prefill.
        load_seconds: until the weights are in place, read from disk.
        is_assumed: whether rates of any device that takes part are assumptions: good to compare placements by.
    """

    seconds_per_token: float
    seconds_to_first_token: float
    load_seconds: float
    devices: Mapping[Device, DeviceSpeed] = field(default_factory=dict)
    is_assumed: bool = False


class _Phase(IntEnum):
    DECODE = 0
    PREFILL = 1
    LOAD = 2

    def work(self, block: BlockWork) -> Work:
        return block.decode if self is _Phase.DECODE else block.prefill


_STEPS = {"decode": _Phase.DECODE, "prefill": _Phase.PREFILL}
"""The phases that blocks run in, by their names in a rehearsal."""


def predict(
    blocks: Sequence[BlockWork],
    devices: Sequence[Device],
    rates: Mapping[Device, Rates],
    *,
    prompt_tokens: int = 1,
    batch_size: int = 1,
    handovers: Iterable[Handover] | None = None,
) -> Speed:
    """The speed of `blocks`, in execution order, each placed on one of `devices`.

    Args:
        rates: of every device in use, of the disk, which all is loaded from, and, without accelerators, of the cpu.
        prompt_tokens: tokens of each prompt, for what blocks hand on.
        handovers: what blocks get of each other, as `handovers_of` a rehearsal; by default each gets
            `output_bytes_per_token` of the one before it, and the first those of the last.
    """
    main = main_device(devices)
    computing = [place if place.is_accelerator else main for place in devices]
    seconds: dict[Device, list[float]] = {device: [0.0] * len(_Phase) for device in (*devices, *computing)}
    for block, place, runs_on in zip(blocks, devices, computing, strict=True):
        seconds[place][_Phase.LOAD] += load_seconds(block, place, rates)
        for phase in _STEPS.values():
            work = phase.work(block)
            seconds[runs_on][phase] += compute_seconds(work, rates[runs_on])
            seconds[place][phase] += bring_seconds(block, work, place, runs_on, rates)
    if handovers is None:
        handovers = _chained(blocks, prompt_tokens, batch_size)
    for handover in handovers:
        source, target = computing[handover.source], computing[handover.target]
        if source != target:
            taken = hop_seconds(handover.num_bytes, rates[source], rates[target], handover.num_copies)
            seconds[target][_STEPS[handover.phase]] += taken
    return _speed(seconds, is_assumed=any(rates[device].is_assumed for device in (*seconds, DISK)))


def _speed(seconds: Mapping[Device, Sequence[float]], *, is_assumed: bool) -> Speed:
    totals = [math.fsum(taken[phase] for taken in seconds.values()) for phase in _Phase]
    per_token, to_first_token, to_load = totals
    shares = {device: DeviceSpeed(*taken) for device, taken in seconds.items()}
    return Speed(per_token, to_first_token, to_load, shares, is_assumed)


def compute_seconds(work: Work, rates: Rates) -> float:
    """What `work` takes where its weights are: the slowest of memory, arithmetic and issuing operators."""
    return max(
        work.bytes_moved / rates.bytes_per_second,
        work.flops / rates.flops_per_second,
        work.num_kernels * rates.kernel_seconds,
    )


def bring_seconds(
    block: BlockWork, work: Work, place: Device, computing: Device, rates: Mapping[Device, Rates]
) -> float:
    """What it takes to bring a block's weights from `place` to the device `computing` for the `work` of a forward.

    All weights of a module come, also those of experts that get no token; nothing comes for a block that does not run.
    From disk they are read into host memory first (accelerate's OffloadedWeightsLoader), from a cold page cache: that
    memory was too small is why they are on disk.
    """
    if place == computing or place.is_accelerator or work.num_kernels == 0:
        return 0.0
    num_bytes = block.weights_bytes * block.num_forwards
    read = num_bytes / rates[DISK].bytes_per_second if place == DISK else 0.0
    return read + num_bytes / rates[computing].host_bytes_per_second


def load_seconds(block: BlockWork, place: Device, rates: Mapping[Device, Rates]) -> float:
    """What loading a block takes: reading it from a cold page cache, or copying it, whichever is slower.

    transformers loads with up to four threads, which read some weights while others are copied. Weights that stay on
    disk are used from the checkpoint as it is, and take nothing.
    """
    if place == DISK:
        return 0.0
    stored = block.weights_bytes if block.stored_bytes is None else block.stored_bytes
    copied = stored / rates[place].host_bytes_per_second if place.is_accelerator else 0.0
    return max(stored / rates[DISK].bytes_per_second, copied)


def hop_seconds(num_bytes: int, source: Rates, target: Rates, num_copies: int = 1) -> float:
    """What copies between two accelerators take: over their link if both are of one name and have one, else by way of
    the host."""
    links = (source.link_bytes_per_second, target.link_bytes_per_second)
    if source.name == target.name and links[0] is not None and links[1] is not None:
        rate = min(links[0], links[1])
    else:
        rate = min(source.hop_bytes_per_second, target.hop_bytes_per_second)
    return num_copies * HOP_SECONDS + num_bytes / rate


# ---------------------------------------------------------------- between blocks


def handovers_of(transfers: Iterable[Transfer], block_of: Mapping[str, int]) -> tuple[Handover, ...]:
    """What blocks get of each other, from the copies of a rehearsal with each on a device of its own.

    `block_of` is the block on each device by its name in the transfers ("sim:3"); other copies are left out.
    """
    totals: dict[tuple[int, int, str], list[int]] = {}
    for move in transfers:
        source, target = block_of.get(move.source), block_of.get(move.target)
        if source is not None and target is not None and move.phase in _STEPS:
            total = totals.setdefault((source, target, move.phase), [0, 0])
            total[0] += move.num_bytes
            total[1] += 1
    return tuple(Handover(*key, num_bytes, num_copies) for key, (num_bytes, num_copies) in totals.items())


def _chained(blocks: Sequence[BlockWork], prompt_tokens: int, batch_size: int) -> list[Handover]:
    """Each block that runs gets the last one's output, and what made the inputs gets the scores of the last tokens."""
    handovers: list[Handover] = []
    for name, phase in _STEPS.items():
        running = [index for index, block in enumerate(blocks) if phase.work(block).num_kernels]
        num_tokens = batch_size * (prompt_tokens if phase is _Phase.PREFILL else 1)
        for source, target in pairwise(running):
            handovers.append(Handover(source, target, name, blocks[source].output_bytes_per_token * num_tokens))
        if len(running) > 1:
            last, first = running[-1], running[0]
            handovers.append(Handover(last, first, name, blocks[last].output_bytes_per_token * batch_size))
    return handovers
