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

from devmap_cli.devices.device import DISK, Device, main_device
from devmap_cli.planning.rates import HOP_SECONDS, Rates
from devmap_cli.simulation.work import Work


@dataclass(frozen=True, slots=True)
class BlockWork:
    """What there is to know of a block's speed.

    Args:
        weights_bytes: what is loaded, and brought for every forward if the block is offloaded.
        prefill: of all prompts at once.
        decode: of one step with the cache at its final length, which gives each sequence a token.
        read_bytes: what the checkpoint holds of it.
        num_forwards: how often its weights are brought per step if it is offloaded: more than once where modules of
            one block that run at different times share them, such as tied embeddings.
    """

    weights_bytes: int
    prefill: Work
    decode: Work
    read_bytes: int
    num_forwards: int = 1


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
    """

    seconds_per_token: float
    seconds_to_first_token: float
    load_seconds: float
    devices: Mapping[Device, DeviceSpeed] = field(default_factory=dict)


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
    handovers: Iterable[Handover] = (),
) -> Speed:
    """The speed of `blocks`, in execution order, each placed on one of `devices`.

    Args:
        rates: of every device in use, of the disk, which all is loaded from, and, without accelerators, of the cpu.
        handovers: what blocks get of each other.
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
    for handover in handovers:
        source, target = computing[handover.source], computing[handover.target]
        if source != target:
            taken = hop_seconds(handover.num_bytes, rates[source], rates[target], handover.num_copies)
            seconds[target][_STEPS[handover.phase]] += taken
    totals = [math.fsum(taken[phase] for taken in seconds.values()) for phase in _Phase]
    per_token, to_first_token, to_load = totals
    shares = {device: DeviceSpeed(*taken) for device, taken in seconds.items()}
    return Speed(per_token, to_first_token, to_load, shares)


def compute_seconds(work: Work, rates: Rates) -> float:
    """What `work` takes where its weights are: the slower of issuing operators and running them.

    Kernels that compute take as long as the slower of memory and arithmetic; those that only move bytes come beside.
    """
    moving = work.moving_bytes / rates.bytes_per_second
    computing = max(
        (work.bytes_moved - work.moving_bytes) / rates.bytes_per_second, work.flops / rates.flops_per_second
    )
    return max(moving + computing, work.num_kernels * rates.kernel_seconds)


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
    disk are used from the checkpoint as it is, and take nothing. What is converted while it is loaded is converted on
    the device, so that the checkpoint's bytes are copied.
    """
    if place == DISK:
        return 0.0
    copied = block.read_bytes / rates[place].host_bytes_per_second if place.is_accelerator else 0.0
    return max(block.read_bytes / rates[DISK].bytes_per_second, copied)


def hop_seconds(num_bytes: int, source: Rates, target: Rates, num_copies: int = 1) -> float:
    """What copies between two accelerators take: over their link if both are of one name and have one, else by way of
    the host."""
    links = (source.link_bytes_per_second, target.link_bytes_per_second)
    if source.name == target.name and links[0] is not None and links[1] is not None:
        rate = min(links[0], links[1])
    else:
        rate = min(source.hop_bytes_per_second, target.hop_bytes_per_second)
    return num_copies * HOP_SECONDS + num_bytes / rate
