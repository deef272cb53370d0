"""The strategies by name, and the one door to all of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import Device
from devmap_cli.errors import RequestError
from devmap_cli.planning.auto import around_window, place_auto
from devmap_cli.planning.balanced import could_hold, overflowing, place_balanced
from devmap_cli.planning.fewest import place_fewest
from devmap_cli.planning.low_first import place_low_first
from devmap_cli.planning.nouns import Block, Infeasible, Placement
from devmap_cli.planning.packing import MAX_STEPS, packed
from devmap_cli.planning.sequential import place_sequential
from devmap_cli.planning.shortage import overfull_by_pins, shortage
from devmap_cli.planning.task import Run, Task

STRATEGIES = {
    "auto": "balanced while all fits on accelerators, else the fewest bytes are offloaded",
    "balanced": "the smallest highest use (peak / budget) over the accelerators",
    "balanced_low_0": "as little as possible on the first accelerator, the rest balanced",
    "sequential": "devices filled in order, each up to its budget",
    "fewest": "the fewest accelerators that hold it, then balanced over those",
}
_PROBE_STEPS = 150
EVEN = ("balanced", "balanced_low_0", "fewest")
"""Strategies to which it doesn't matter which blocks are offloaded, if some must be: as few bytes as can be."""
_PLACERS: dict[str, Callable[[Task], list[Run] | None]] = {
    "auto": place_auto,
    "balanced": place_balanced,
    "balanced_low_0": place_low_first,
    "sequential": place_sequential,
    "fewest": place_fewest,
}


def plan(
    strategy: str,
    blocks: Sequence[Block],
    budgets: Budgets,
    *,
    overhead_bytes: Mapping[Device, int] | None = None,
    gpu_weights: Mapping[Device, Fraction | float] | None = None,
    is_probe: bool = False,
    keeps_spare: bool = False,
) -> Placement | Infeasible:
    """Place blocks by a strategy; pinned ones (`Block.fixed`) stay where they are pinned.

    Args:
        strategy: one of `STRATEGIES`.
        blocks: in execution order.
        budgets: bytes per device, in the order in which devices are filled.
        overhead_bytes: what a device takes beside its blocks once it holds any.
        gpu_weights: what an accelerator counts for where uses are compared; 0.5 counts it as half. 1 where
            not given.
        is_probe: that only whether it fits is asked: the missing bytes are then enough, but not the fewest.
        keeps_spare: that `sequential` leaves room for one more block on the first accelerator, where all fits even so.

    Raises:
        RequestError: an unknown strategy, no budgets, or a pin or weight for a device without a budget.
    """
    weights = {device: Fraction(str(weight)) for device, weight in (gpu_weights or {}).items()}
    _check(strategy, budgets, weights, (block.fixed for block in blocks if block.fixed is not None))
    task = Task.of(blocks, budgets, overhead_bytes or {}, weights, keeps_spare=keeps_spare)
    overfull = overfull_by_pins(strategy, task)
    if overfull is not None:
        return overfull
    runs = (_PLACERS[strategy](task) or _somehow(task)) if task.free else []
    if runs and strategy in EVEN and (offloaded := _offloaded(task, runs)):
        window = around_window(task)
        runs = window if window is not None and _offloaded(task, window) < offloaded else runs
    return (
        shortage(strategy, task, None if is_probe else _is_feasible) if runs is None else task.placement(strategy, runs)
    )


def plan_offloading(
    blocks: Sequence[Block],
    budgets: Budgets,
    stream_limit: int,
    *,
    overhead_bytes: Mapping[Device, int],
    gpu_weights: Mapping[Device, Fraction],
) -> Placement | None:
    """Offload as `auto` does, but no block with a module of more than `stream_limit` bytes; None where that won't do.

    `budgets` must have been planned for before, so that they are known to be right.
    """
    task = Task.of(blocks, budgets, overhead_bytes, gpu_weights)
    if overfull_by_pins("auto", task) is not None or not task.free:
        return None
    runs = around_window(task, stream_limit)
    return None if runs is None else task.placement("auto", runs)


def _check(strategy: str, budgets: Budgets, weights: Mapping[Device, Fraction], pinned: Iterable[Device]) -> None:
    if strategy not in STRATEGIES:
        near = difflib.get_close_matches(strategy, STRATEGIES, 1)
        hint = f"--strategy {near[0]}" if near else f"strategies: {', '.join(STRATEGIES)}"
        raise RequestError(f"unknown strategy {strategy!r}", hint)
    names = ",".join(str(device.map_value) for device in budgets.devices)
    if not names:
        raise RequestError("no device has a budget", "--max-memory 'cpu:16GB,disk:100GB'")
    for word, devices in (("pinned to", pinned), ("--weight names", weights)):
        stray = next((device for device in devices if device not in budgets.devices), None)
        if stray is not None:
            hint = f"devices with a budget: {names}"
            if stray.is_accelerator == any(device.is_accelerator for device in budgets.devices):
                hint += f"; add one: --max-memory '…,{stray.map_value}:10GB'"
            subject = "a module is " if word == "pinned to" else ""
            raise RequestError(f"{subject}{word} {stray.label}, which has no budget", hint)
    for device, weight in weights.items():
        if weight <= 0:
            value = device.map_value
            raise RequestError(f"--weight {value}={weight}: a weight is above 0", f"--weight {value}=0.5")


def _offloaded(task: Task, runs: Sequence[Run]) -> int:
    """Bytes of the blocks that go to cpu and disk."""
    return sum(task.costs.weights(run.start, run.stop) for run in runs if not run.device.is_accelerator)


def _somehow(task: Task, max_steps: int = MAX_STEPS) -> list[Run] | None:
    """Any placement at all, for where a strategy's own ways find none."""
    if not could_hold(task.costs, task.rooms):
        return None
    reason = "no other placement fits"
    return overflowing(task) or around_window(task) or packed(task.costs, task.rooms, reason, max_steps)


def _is_feasible(task: Task) -> bool:
    """Whether any placement is found without a long search; all strategies come down to the same."""
    return _somehow(task, _PROBE_STEPS) is not None
