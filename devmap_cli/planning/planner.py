"""From a described model and budgets to a placement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count, islice
from typing import TYPE_CHECKING

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import DISK, Device, main_device
from devmap_cli.model.quantization.scheme import needs_accelerator, off_gpu
from devmap_cli.model.spec import ModelSpec
from devmap_cli.planning.blocks import blocks_of
from devmap_cli.planning.judging import Judge, Replaying, Verdict
from devmap_cli.planning.mapping import places_of
from devmap_cli.planning.means import Means, PlanRequest, needs
from devmap_cli.planning.nouns import Block, Infeasible, Placement
from devmap_cli.planning.pace import Pace
from devmap_cli.planning.pins import apply_pins
from devmap_cli.planning.profile import Profile
from devmap_cli.planning.recutting import recut
from devmap_cli.planning.refilling import Limited, offloading, on_accelerators
from devmap_cli.planning.searching import smallest
from devmap_cli.planning.shortage import disk_alone, reason_of
from devmap_cli.planning.strategies import EVEN, plan, plan_offloading
from devmap_cli.planning.task import Run, Task

if TYPE_CHECKING:
    pass

_FINENESS = 4096
"""What is kept free grows by at least this part of a budget."""
_MAX_STREAM_LIMITS = 3
_MAX_CONFIRMED = 4
_LESS_LOOKS = 12
"""Part of what is looked at where there is a placement already that offloads little more than it must."""
_MAX_GROWTHS, _GROWTH_FINENESS, _LEAST_GROWTH_BYTES = 14, 256, 1 << 20
"""How often a budget is tried that is larger, and by which part of it at least, twice as much each time."""


def make_plan(
    spec: ModelSpec,
    request: PlanRequest,
    profile: Profile | None = None,
    missing: Callable[[Mapping[str, Device]], Mapping[Device, int]] | None = None,
    pace: Pace | None = None,
    *,
    confirm: Callable[[Mapping[str, Device]], Mapping[Device, int]] | None = None,
    is_probe: bool = False,
) -> Placement | Infeasible:
    """Place the blocks of `spec` as `request` says.

    With the `profile` of the workload all that a run takes counts, else weights and KV cache alone. `missing` tells for
    a device map what each device lacks in a rehearsal (bytes); what it lets pass is taken. `confirm` tells the same,
    and is asked only where nothing else fits and a placement does but for the margin that is kept free. `pace` tells
    which of several placements with offloaded blocks is the fastest; without it the one that offloads least is taken.
    With `is_probe` an answer "no" does not say how little would be enough.

    Raises:
        RequestError: a pin, a weight or the strategy does not go with the model or the budgets.
    """
    if not request.budgets.accelerators and needs_accelerator(spec.quantization):
        return _without_accelerator(spec, request)
    only_accelerators = off_gpu(spec.quantization)
    if only_accelerators is not None and request.budgets.accelerators:
        request = replace(request, budgets=request.budgets.without_tiers())
    blocks, means = needs(spec, request, profile, missing, pace, is_probe=is_probe)
    if confirm is not None:
        means = replace(means, confirm=lambda placement: confirm(places_of(spec, placement)))
    answer = _Planner(request, apply_pins(blocks, request.pins, spec), means).plan()
    if isinstance(answer, Infeasible) and only_accelerators is not None:
        return replace(answer, reason=f"{answer.reason}; {only_accelerators}")
    return answer


class _Planner:
    """Plans, has it judged, and plans again with room kept for what was missing."""

    def __init__(self, request: PlanRequest, blocks: tuple[Block, ...], means: Means) -> None:
        self._request = request
        self._blocks = blocks
        self._means = means
        self._overhead = means.overhead(request.budgets)
        self._close: dict[tuple[Device, ...], Placement] = {}
        self._verdicts: dict[tuple[bool, tuple[Device, ...]], Verdict] = {}

    def plan(self) -> Placement | Infeasible:
        """Plan by what blocks add up to, then move cuts by what devices are seen to take."""
        answer = self._planned()
        return self._recut(answer) if isinstance(answer, Placement) and not self._means.is_probe else answer

    def _recut(self, placement: Placement) -> Placement:
        """The placement with better cuts, where there are any that are judged to fit."""
        request, replaying = self._request, self._means.replaying
        if replaying is None or not request.budgets.accelerators:
            return placement
        task = Task.of(self._blocks, request.budgets, self._overhead, request.gpu_weights)
        runs = recut(task, placement, replaying)
        if runs is None:
            return placement
        better = task.placement(placement.strategy, runs)
        verdict = self._verdict(self._means.judge, better)
        return placement if verdict.missing else replace(better, measured=verdict.memory)

    def _planned(self) -> Placement | Infeasible:
        """Plan, and where this leaves all accelerators empty, offload as `auto` does: it skips blocks at the front."""
        request = self._request
        answer = self._plan_judged(request.strategy)
        if request.budgets.accelerators and not self._means.is_probe and _is_short(answer):
            answer = self._searched(answer) or answer
        if _is_short(answer):
            answer = self._confirmed(answer) or answer
        if isinstance(answer, Infeasible):
            return answer if self._means.is_probe else self._with_enough(answer)
        if set(answer.devices) == {DISK}:
            return disk_alone(answer) if self._means.is_probe else self._with_enough(disk_alone(answer))
        idle = not any(device.is_accelerator for device in answer.devices)
        if idle and request.budgets.accelerators and request.strategy == "sequential":
            other = self._plan_judged("auto")
            if isinstance(other, Placement) and any(device.is_accelerator for device in other.devices):
                return replace(other, strategy=request.strategy)
        return answer

    def _searched(self, answer: Placement | Infeasible) -> Placement | None:
        """A placement that sums don't find: one that offloads nothing, else one that is better than the answer."""
        replaying, known = self._means.replaying, answer if isinstance(answer, Placement) else None
        if replaying is None:
            return None
        found = self._filled(replaying, known)
        if found is None and self._means.confirm is not None:
            return self._filled(replaying.without_margin(), known)  # what fits but for that is remembered
        return found

    def _filled(self, replaying: Replaying, known: Placement | None) -> Placement | None:
        """The same, with devices filled as they are replayed."""
        request, num_looks = self._request, self._num_looks(known)
        is_sequential = request.strategy == "sequential"
        alone = Task.of(self._blocks, request.budgets.without_tiers(), self._overhead, request.gpu_weights)
        found = self._judged(self._fitting(alone, on_accelerators(alone, Limited(replaying, num_looks))))
        task = Task.of(self._blocks, request.budgets, self._overhead, request.gpu_weights)
        ways = ([True, False] if known is None else [True]) if is_sequential else [False]
        for in_order in ways if found is None else ():
            tried = offloading(task, Limited(replaying, num_looks), known, in_order=in_order)
            better = sorted(self._fitting(task, tried), key=self._price)
            found = self._judged(each for each in better if known is None or self._price(each) < self._price(known))
            if found is not None:
                break
        return found

    def _num_looks(self, known: Placement | None) -> int:
        """How many parts are replayed: few where a placement is known that offloads little more than it must."""
        num_looks = self._means.num_looks
        if known is None or self._request.strategy == "sequential":
            return num_looks
        weights = sum(block.weights_bytes for block in self._blocks)
        held = sum(block.resident_bytes for block in self._blocks) + sum(self._overhead.values())
        must = max(0, held - sum(map(self._request.budgets.get, self._request.budgets.accelerators)))
        is_good = known.offloaded_bytes <= must * 5 // 4 + weights // 16
        return num_looks // _LESS_LOOKS if is_good else num_looks

    def _price(self, placement: Placement) -> tuple[float, int]:
        """What of two placements with offloaded blocks the better one has less of."""
        return self._slowness(placement) if self._request.strategy == "auto" else (0.0, placement.offloaded_bytes)

    def _judged(self, placements: Iterable[Placement]) -> Placement | None:
        """The first of a few that the judge lets pass too, if it rehearses."""
        if self._means.unrehearsed is None:
            return next(iter(placements), None)
        judged = ((placement, self._verdict(self._means.judge, placement)) for placement in placements)
        few = islice(judged, _MAX_CONFIRMED)
        return next((replace(placement, measured=seen.memory) for placement, seen in few if not seen.missing), None)

    def _fitting(self, task: Task, tried: Iterable[list[Run]]) -> Iterator[Placement]:
        """The placements that fit as far as can be told without a rehearsal."""
        judge = self._means.unrehearsed or self._means.judge
        for runs in tried:
            placement = replace(task.placement(self._request.strategy, runs), budgets=self._request.budgets)
            if placement.overfull_stores:
                return  # by pins, so that it is the same with all
            verdict = self._verdict(judge, placement)
            if not verdict.missing:
                yield replace(placement, measured=verdict.memory)

    def _verdict(self, judge: Judge, placement: Placement) -> Verdict:
        """A judge's verdict, once for each placement; what fits but for a margin is remembered."""
        key = judge is self._means.judge, placement.devices
        if key in self._verdicts:
            return self._verdicts[key]
        verdict = self._verdicts[key] = judge.verdict(placement, self._request.budgets)
        if verdict.is_close:
            close = replace(placement, budgets=self._request.budgets, measured=verdict.memory)
            self._close.setdefault(placement.devices, close)
        return verdict

    def _confirmed(self, answer: Placement | Infeasible) -> Placement | None:
        """A placement that fits but for a margin, got through a rehearsal, and is better than a short answer."""
        confirm = self._means.confirm
        if confirm is None:
            return None
        better = [each for each in self._close.values() if isinstance(answer, Infeasible) or not each.offloaded_bytes]
        return next((close for close in better[:_MAX_CONFIRMED] if not confirm(close)), None)

    def _with_enough(self, answer: Infeasible) -> Infeasible:
        """The answer with as many bytes missing as are just enough for the judge, if so many are found."""
        device, missing = answer.device, answer.missing_bytes
        if device is None:
            return answer
        budget = self._request.budgets.get(device)
        least, too_few = max(_LEAST_GROWTH_BYTES, budget // _GROWTH_FINENESS), 0
        for number in range(_MAX_GROWTHS):
            tried = self._with_more(device, missing)
            if isinstance(tried, Placement):
                break
            too_few, missing = missing, missing + max(tried.missing_bytes, least << number)
        else:
            return answer
        if too_few:
            step = max(1, budget // _FINENESS)
            missing = smallest(
                lambda size: isinstance(self._with_more(device, size), Placement), too_few, missing, step
            )
        return replace(answer, needed_bytes=budget + missing, budget_bytes=budget)

    def _with_more(self, device: Device, num_bytes: int) -> Placement | Infeasible:
        """Whether it fits with so much more on one device, which may have had no budget."""
        budgets = self._request.budgets
        grown = Budgets.of({**dict(budgets), device: budgets.get(device) + num_bytes}, dict(budgets.reserved))
        judge = self._means.unrehearsed or self._means.judge
        means = replace(self._means, judge=judge, confirm=None, is_probe=True)
        return _Planner(replace(self._request, budgets=grown), self._blocks, means).plan()

    def _plan_judged(self, strategy: str) -> Placement | Infeasible:
        """A plan that was judged to fit; where `auto` offloads, the fastest of several, and others offload no more.

        What passes through the main device needs room there, as much as the largest module that is offloaded: with less
        room kept, larger modules stay where they are.
        """
        answer = self._settled(strategy)
        assert answer is not None
        if not self._request.budgets.accelerators or not _is_short(answer):
            return answer
        if strategy == "auto":
            answers = [answer, *(self._settled(strategy, limit) for limit in self._stream_limits())]
            return min(_placements(answers), key=self._slowness, default=answer)
        if strategy in EVEN:
            found = _placements([answer, self._plan_judged("auto")])
            best = min(found, key=lambda placement: placement.offloaded_bytes, default=None)
            return answer if best is None else replace(best, strategy=strategy)
        return answer

    def _slowness(self, placement: Placement) -> tuple[float, int]:
        seconds = 0.0 if self._means.pace is None else self._means.pace.of(placement).seconds_per_token
        return seconds, placement.offloaded_bytes

    def _stream_limits(self) -> list[int]:
        """Sizes of modules up to which blocks may be offloaded, at most a few."""
        sizes = sorted({block.streamed_bytes for block in self._blocks})
        steps = [
            size
            for size, larger in zip(sizes, [*sizes[1:], None], strict=True)
            if larger is None or larger > 1.2 * size
        ]
        return steps[-_MAX_STREAM_LIMITS - 1 : -1]

    def _first_sight(self, strategy: str, budgets: Budgets, stream_limit: int | None) -> Placement | Infeasible | None:
        overhead, weights = self._overhead, self._request.gpu_weights
        if stream_limit is None:
            return plan(
                strategy,
                self._blocks,
                budgets,
                overhead_bytes=overhead,
                gpu_weights=weights,
                is_probe=self._means.is_probe,
                keeps_spare=self._request.weights_only,
            )
        return plan_offloading(self._blocks, budgets, stream_limit, overhead_bytes=overhead, gpu_weights=weights)

    def _settled(self, strategy: str, stream_limit: int | None = None) -> Placement | Infeasible | None:
        """A plan that was judged to fit, with room kept for what was missing before.

        What is kept only grows, and by more with every round, so that it ends.
        """
        budgets = self._request.budgets
        kept: dict[Device, int] = {}
        if stream_limit is not None:
            kept[main_device(budgets.accelerators)] = stream_limit
        for number in count():
            answer = self._first_sight(strategy, budgets.less(kept), stream_limit)
            if answer is None:
                return None
            if isinstance(answer, Infeasible):
                return self._for_whole_budgets(answer, kept)
            if set(answer.devices) == {DISK}:
                return replace(answer, budgets=budgets)  # nothing computes: there is no room left to keep
            verdict = self._verdict(self._means.judge, answer)
            if not verdict.missing:
                return replace(answer, budgets=budgets, measured=verdict.memory)
            for device, missing in verdict.missing.items():
                unseen = budgets.get(device) + missing - self._counted(answer, device)
                step = 1 + budgets.get(device) // _FINENESS << number
                kept[device] = max(unseen, kept.get(device, 0) + step)
        raise AssertionError("counting does not end")

    def _counted(self, placement: Placement, device: Device) -> int:
        """What a first sight counts of a device."""
        memory = placement.memory(device, held_only=True)
        is_store = self._request.budgets.accelerators and not device.is_accelerator
        return memory.weights_bytes if is_store else memory.peak_bytes

    def _for_whole_budgets(self, answer: Infeasible, kept: Mapping[Device, int]) -> Infeasible:
        """The answer for budgets of which nothing is kept free: what was kept is needed too."""
        if answer.device is None or not kept:
            return answer
        budgets = self._request.budgets
        is_by_sums = answer.reason == reason_of(self._blocks, budgets.less(kept))
        more = budgets.get(answer.device) - answer.budget_bytes
        return replace(
            answer,
            reason=reason_of(self._blocks, budgets) if is_by_sums else answer.reason,
            needed_bytes=answer.needed_bytes + more,
            budget_bytes=answer.budget_bytes + more,
        )


def _is_short(answer: Placement | Infeasible) -> bool:
    return isinstance(answer, Infeasible) or answer.offloaded_bytes > 0


def _placements(answers: Iterable[Placement | Infeasible | None]) -> list[Placement]:
    return [answer for answer in answers if isinstance(answer, Placement)]


def _without_accelerator(spec: ModelSpec, request: PlanRequest) -> Infeasible:
    """The answer for weights that need an accelerator where none has a budget."""
    needed = sum(block.weights_bytes for block in blocks_of(spec, 0, 1))
    return Infeasible(request.strategy, str(off_gpu(spec.quantization)), needed, 0)
