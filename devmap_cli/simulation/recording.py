"""Records the trace of a model's run, with every block on a device of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from devmap_cli.devices.capability import DEFAULT_CAPABILITY, Capability
from devmap_cli.simulation.memory import UNLIMITED_BYTES
from devmap_cli.simulation.rehearsal import rehearse
from devmap_cli.simulation.trace import MAX_DEVICES, Recorder, Trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from devmap_cli.simulation.rehearsal import Rehearsal
    from devmap_cli.simulation.workload import Workload

_MAX_BONDS = 12
_MIXED = "same device"
_SIMULATED = re.compile(r"\bsim:(\d+)\b")


@dataclass(frozen=True, slots=True)
class Recording:
    """A trace of which block i is the union of `groups[i]`, blocks that must be on one device for the model's code."""

    trace: Trace
    groups: tuple[tuple[int, ...], ...]
    rehearsal: Rehearsal


def record(
    model: Any,
    blocks: Sequence[Sequence[str]],
    workload: Workload,
    *,
    compute_capability: Capability = DEFAULT_CAPABILITY,
) -> Recording:
    """Rehearse `model`, made on the meta device, with each of `blocks` (names of modules or tensors) by itself.

    Blocks whose tensors meet in the model's code are put together, and it is rehearsed again.

    Raises:
        RuntimeError, ValueError, NotImplementedError: what stops the model also on a single device.
    """
    groups = [[index] for index in range(len(blocks))]
    for _ in range(_MAX_BONDS):
        block_of = {fqn: number for number, group in enumerate(groups) for index in group for fqn in blocks[index]}
        recorder = Recorder(block_of)
        num_devices = min(len(groups), MAX_DEVICES)
        rehearsal = rehearse(
            model,
            recorder.device_map(),
            workload,
            [UNLIMITED_BYTES] * num_devices,
            compute_capabilities=[compute_capability] * num_devices,
            recorder=recorder,
        )
        if rehearsal.failure is None:
            return Recording(recorder.trace(), tuple(map(tuple, groups)), rehearsal)
        pair = _meeting(recorder, rehearsal)
        if pair is None:
            break
        first, second = pair
        groups[first] = sorted(groups[first] + groups.pop(second))
    rehearsal.raise_failure()
    raise AssertionError("a rehearsal without a failure was returned above")


def _meeting(recorder: Recorder, rehearsal: Rehearsal) -> tuple[int, int] | None:
    """The two blocks whose tensors met, the earlier first; None where something else stopped the run."""
    assert rehearsal.failure is not None
    text = str(rehearsal.failure.error)
    devices = sorted({int(index) for index in _SIMULATED.findall(text)})
    if _MIXED not in text or len(devices) != 2:
        return None
    first, second = sorted(recorder.block_on(device) for device in devices)
    return first, second
