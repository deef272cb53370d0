"""Records the trace of a model's run, with every block on a device of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from devmap_cli.devices.capability import DEFAULT_CAPABILITY, Capability
from devmap_cli.model.names import parent
from devmap_cli.simulation.memory import UNLIMITED_BYTES
from devmap_cli.simulation.rehearsal import rehearse
from devmap_cli.simulation.trace import Recorder, Trace

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

    Blocks whose tensors meet in the model's code are put together, and it is rehearsed again; where those of a module
    of several blocks meet others, it is no longer taken for one whose inputs come to one device.

    Raises:
        RuntimeError, ValueError, NotImplementedError: what stops the model also on a single device.
    """
    groups = [[index] for index in range(len(blocks))]
    embedding, towers = _towers(model, [fqn for fqns in blocks for fqn in fqns])
    for _ in range(_MAX_BONDS + len(towers)):
        block_of = {fqn: number for number, group in enumerate(groups) for index in group for fqn in blocks[index]}
        recorder = Recorder(block_of, towers, embedding)
        num_devices = recorder.num_devices
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
        if second >= len(groups):
            towers.pop(second - len(groups))
            continue
        groups[first] = sorted(groups[first] + groups.pop(second))
    rehearsal.raise_failure()
    raise AssertionError("a rehearsal without a failure was returned above")


def _towers(model: Any, blocks: Sequence[str]) -> tuple[str, list[str]]:
    """The module with the embedding of tokens, and the root and modules of several blocks without it, outer ones first.

    Where all blocks of such a module are on one device, as those of a vision tower in most maps, accelerate brings its
    inputs there, once for all of them; and those of the root to the main device.
    """
    embedding = model.get_input_embeddings()
    embedded = {id(weight) for weight in embedding.parameters()}
    name_of = next((name for name, module in model.named_modules() if module is embedding), "")
    ancestors: dict[str, None] = {}
    for name in blocks:
        while name := parent(name):
            ancestors.setdefault(name)
    modules = {name: model.get_submodule(name) for name in ancestors}
    beside = [
        name
        for name, module in modules.items()
        if type(module).forward is not nn.Module.forward and embedded.isdisjoint(map(id, module.parameters()))
    ]
    return name_of, ["", *sorted(beside, key=len)]


def _meeting(recorder: Recorder, rehearsal: Rehearsal) -> tuple[int, int] | None:
    """The two blocks or towers whose tensors met, the earlier first; None where something else stopped the run."""
    assert rehearsal.failure is not None
    text = str(rehearsal.failure.error)
    devices = sorted({int(index) for index in _SIMULATED.findall(text)})
    if _MIXED not in text or len(devices) != 2:
        return None
    first, second = sorted(recorder.block_on(device) for device in devices)
    return first, second
