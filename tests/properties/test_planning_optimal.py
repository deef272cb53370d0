"""Placements against an independent brute force on small instances, for each strategy's own measure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations_with_replacement, pairwise, permutations, product

from hypothesis import given, settings
from hypothesis import strategies as st

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import CPU, DISK, Device
from devmap_cli.planning.nouns import Block, Infeasible, Placement
from devmap_cli.planning.strategies import STRATEGIES, plan

Assignment = tuple[Device, ...]


def block_lists(max_size: int = 6) -> st.SearchStrategy[list[Block]]:
    sizes = st.tuples(st.integers(1, 9), st.sampled_from([0, 0, 1, 4]))
    return st.lists(sizes, min_size=1, max_size=max_size).map(
        lambda items: [
            Block((f"b{index}",), size, transient_bytes=transient) for index, (size, transient) in enumerate(items)
        ]
    )


def phased_block_lists(max_size: int = 5) -> st.SearchStrategy[list[Block]]:
    """Blocks that need most while they are loaded, or while the prompt runs, or at the end."""
    few, many = st.sampled_from([0, 0, 1, 3]), st.sampled_from([0, 0, 2, 6])
    sizes = st.tuples(st.integers(1, 6), few, few, many, few, many)

    def block(index: int, item: tuple[int, int, int, int, int, int]) -> Block:
        weights, kv_cache, transient, load, prompt_kv_cache, prompt = item
        return Block(
            (f"b{index}",),
            weights,
            kv_cache,
            transient,
            load_transient_bytes=load,
            prompt_kv_cache_bytes=min(prompt_kv_cache, kv_cache),
            prompt_transient_bytes=prompt,
        )

    return st.lists(sizes, min_size=1, max_size=max_size).map(
        lambda items: [block(index, item) for index, item in enumerate(items)]
    )


def budget_maps(max_gpus: int = 3, max_bytes: int = 20) -> st.SearchStrategy[dict[Device, int]]:
    gpus = st.lists(st.integers(0, max_bytes), min_size=0, max_size=max_gpus).map(
        lambda sizes: {Device("cuda", 3 - index): size for index, size in enumerate(sizes)}
    )
    tiers = st.sampled_from([{}, {CPU: 8}, {CPU: 5, DISK: 30}, {DISK: 40}, {CPU: 1, DISK: 10}])
    return st.tuples(gpus, tiers).map(lambda pair: pair[0] | pair[1]).filter(bool)


overheads = st.sampled_from([0, 0, 2])


class Instance:
    """A planning question, with costs spelled out the slow way."""

    def __init__(self, blocks: Sequence[Block], budgets: Mapping[Device, int], overhead: int) -> None:
        self.blocks = list(blocks)
        self.budgets = dict(budgets)
        self.overhead = {device: overhead for device in budgets if device.is_accelerator}
        self.gpus = [device for device in budgets if device.is_accelerator]
        self.tiers = [device for device in (CPU, DISK) if device in budgets]

    def plan(self, strategy: str, more: Mapping[Device, int] | None = None) -> Placement | Infeasible:
        budgets = {device: size + (more or {}).get(device, 0) for device, size in self.budgets.items()}
        return plan(strategy, self.blocks, Budgets.of(budgets), overhead_bytes=self.overhead)

    def peak(self, assignment: Sequence[Device | None], device: Device) -> int:
        held = [block for block, place in zip(self.blocks, assignment, strict=True) if place == device]
        if not held:
            return 0
        weights = sum(block.weights_bytes for block in held)
        if self.gpus and not device.is_accelerator:
            return weights + self._load(held)  # what lies there computes elsewhere
        return weights + max(self._load(held), self._prefill(held), self._end(held)) + self.overhead.get(device, 0)

    @staticmethod
    def _load(held: Sequence[Block]) -> int:
        return max(block.load_transient_bytes for block in held)

    @staticmethod
    def _prefill(held: Sequence[Block]) -> int:
        """Blocks run one after the other, and what each caches stays."""
        highest = kv_cache = 0
        for block in held:
            kv_cache += block.prompt_kv_cache_bytes
            highest = max(highest, kv_cache + block.prompt_transient_bytes)
        return highest

    @staticmethod
    def _end(held: Sequence[Block]) -> int:
        return sum(block.kv_cache_bytes for block in held) + max(block.transient_bytes for block in held)

    def fits(self, assignment: Sequence[Device | None], but: Device | None = None) -> bool:
        return all(self.peak(assignment, device) <= size for device, size in self.budgets.items() if device != but)

    def use(self, assignment: Sequence[Device | None], but: Device | None = None) -> Fraction:
        uses = [
            Fraction(peak, self.budgets[device])
            for device in self.gpus
            if device != but and (peak := self.peak(assignment, device))
        ]
        return max(uses, default=Fraction(0))

    def load(self, assignment: Sequence[Device], device: Device) -> int:
        return sum(b.weights_bytes for b, place in zip(self.blocks, assignment, strict=True) if place == device)

    def contiguous(self, order: Sequence[Device]) -> Iterator[Assignment]:
        """All fitting assignments of all blocks to devices in this order."""
        if not order:
            return
        num_blocks = len(self.blocks)
        for cuts in combinations_with_replacement(range(num_blocks + 1), len(order) - 1):
            assignment: list[Device] = []
            for device, (start, stop) in zip(order, pairwise((0, *cuts, num_blocks)), strict=True):
                assignment += [device] * (stop - start)
            if self.fits(assignment):
                yield tuple(assignment)

    def any_order(self) -> Iterator[Assignment]:
        for order in permutations(self.gpus):
            yield from self.contiguous(order)

    def all_fitting(self, devices: Sequence[Device]) -> Iterator[Assignment]:
        for assignment in product(devices, repeat=len(self.blocks)):
            if self.fits(assignment):
                yield assignment

    def windows(self) -> Iterator[tuple[int, int, int]]:
        """Bytes, start and stop of all windows that can go to cpu and disk so that the rest fits in order."""
        for start in range(len(self.blocks) + 1):
            for stop in range(start, len(self.blocks) + 1):
                if self._window_fits(start, stop):
                    yield sum(block.weights_bytes for block in self.blocks[start:stop]), -start, stop

    def _window_fits(self, start: int, stop: int) -> bool:
        rest = Instance([*self.blocks[:start], *self.blocks[stop:]], self.budgets, 0)
        rest.overhead = self.overhead
        window = Instance(self.blocks[start:stop], self.budgets, 0)
        rest_fits = not rest.blocks or any(rest.contiguous(rest.gpus))
        return rest_fits and (not window.blocks or any(window.contiguous(window.tiers)))


def instances(max_blocks: int = 6, max_gpus: int = 3) -> st.SearchStrategy[Instance]:
    return st.builds(Instance, block_lists(max_blocks), budget_maps(max_gpus), overheads)


@given(instances(5), st.sampled_from(sorted(STRATEGIES)))
@settings(max_examples=80, deadline=None)
def test_a_placement_is_found_exactly_where_one_exists(instance: Instance, strategy: str) -> None:
    exists = any(True for _ in instance.all_fitting(list(instance.budgets)))
    answer = instance.plan(strategy)
    assert isinstance(answer, Placement) == exists
    if isinstance(answer, Placement):
        assert instance.fits(answer.devices)


@given(instances(), st.sampled_from(sorted(STRATEGIES)))
@settings(max_examples=80, deadline=None)
def test_nothing_is_offloaded_where_the_accelerators_hold_all(instance: Instance, strategy: str) -> None:
    if any(True for _ in instance.all_fitting(instance.gpus)):
        answer = instance.plan(strategy)
        assert isinstance(answer, Placement)
        assert all(device.is_accelerator for device in answer.devices)


@given(instances(), st.sampled_from(["balanced", "auto"]))
@settings(max_examples=80, deadline=None)
def test_balanced_has_the_smallest_highest_use(instance: Instance, strategy: str) -> None:
    candidates = list(instance.contiguous(instance.gpus)) or list(instance.any_order())
    if candidates:
        answer = instance.plan(strategy)
        assert isinstance(answer, Placement)
        assert instance.use(answer.devices) == min(map(instance.use, candidates))


@given(instances())
@settings(max_examples=80, deadline=None)
def test_auto_offloads_the_window_with_the_fewest_bytes(instance: Instance) -> None:
    if any(True for _ in instance.all_fitting(instance.gpus)):
        return
    windows = sorted(instance.windows())
    if windows:
        answer = instance.plan("auto")
        assert isinstance(answer, Placement)
        num_bytes, start, stop = windows[0]
        offloaded = [index for index, device in enumerate(answer.devices) if not device.is_accelerator]
        assert sum(instance.blocks[index].weights_bytes for index in offloaded) == num_bytes
        assert offloaded == list(range(-start, stop))


@given(instances())
@settings(max_examples=80, deadline=None)
def test_balanced_low_0_loads_the_first_accelerator_least(instance: Instance) -> None:
    if not instance.gpus:
        return
    first, *others = instance.gpus
    orders = [(first, *order) for order in permutations(others)]
    in_front = [assignment for order in orders for assignment in instance.contiguous(order)]
    elsewhere = [] if in_front else list(instance.any_order())
    if in_front or elsewhere:
        answer = instance.plan("balanced_low_0")
        assert isinstance(answer, Placement)
        if elsewhere:  # which part it takes is open, so that transients count
            assert instance.peak(answer.devices, first) == min(instance.peak(each, first) for each in elsewhere)
        else:
            least = min(instance.load(each, first) for each in in_front)
            assert instance.load(answer.devices, first) == least
            best = [c for c in instance.contiguous(instance.gpus) if instance.load(c, first) == least]
            best = best or [c for c in in_front if instance.load(c, first) == least]
            assert instance.use(answer.devices, first) == min(instance.use(c, first) for c in best)


@given(instances())
@settings(max_examples=80, deadline=None)
def test_fewest_uses_the_fewest_accelerators_and_balances_them(instance: Instance) -> None:
    candidates = list(instance.any_order())
    if candidates:
        answer = instance.plan("fewest")
        assert isinstance(answer, Placement)
        fewest = min(len(set(candidate)) for candidate in candidates)
        assert len(set(answer.devices)) == fewest
        in_order = [c for c in instance.contiguous(instance.gpus) if len(set(c)) == fewest]
        if in_order:
            assert instance.use(answer.devices) == min(map(instance.use, in_order))


@given(instances())
@settings(max_examples=80, deadline=None)
def test_sequential_fills_each_device_before_the_next(instance: Instance) -> None:
    order = [*instance.gpus, *instance.tiers]
    candidates = list(instance.contiguous(instance.gpus))
    if not candidates and not any(True for _ in instance.all_fitting(instance.gpus)):
        candidates = list(instance.contiguous(order))
    if candidates:
        answer = instance.plan("sequential")
        assert isinstance(answer, Placement)
        positions = [order.index(device) for device in answer.devices]
        assert positions == min([order.index(device) for device in candidate] for candidate in candidates)


@given(instances())
@settings(max_examples=150, deadline=None)
def test_sequential_with_a_spare_leaves_room_for_the_largest_block_to_come(instance: Instance) -> None:
    filled = instance.plan("sequential")
    answer = plan(
        "sequential",
        instance.blocks,
        Budgets.of(instance.budgets),
        overhead_bytes=instance.overhead,
        keeps_spare=True,
    )
    assert isinstance(answer, Placement) == isinstance(filled, Placement)
    candidates = [c for c in instance.contiguous(instance.gpus) if _has_spare(instance, c)]
    first = min(candidates, key=lambda c: [instance.gpus.index(device) for device in c], default=None)
    if first is not None and isinstance(filled, Placement) and instance.use(first) < instance.use(filled.devices):
        assert isinstance(answer, Placement)
        assert answer.devices == first
    else:
        assert answer == filled


def _has_spare(instance: Instance, assignment: Assignment) -> bool:
    """Whether the first GPU has room for any later block each time that it gets one."""
    first = instance.gpus[0]
    sizes = [block.weights_bytes for block in instance.blocks]
    return all(
        instance.peak([*assignment[:stop], *[None] * (len(sizes) - stop)], first) + max(sizes[stop:], default=0)
        <= instance.budgets[first]
        for stop in range(1, assignment.count(first) + 1)
    )


@given(instances(5), st.sampled_from(sorted(STRATEGIES)))
@settings(max_examples=60, deadline=None)
def test_the_missing_bytes_are_the_fewest_that_make_it_fit(instance: Instance, strategy: str) -> None:
    answer = instance.plan(strategy)
    if isinstance(answer, Infeasible):
        assert answer.device is not None
        grown = instance.plan(strategy, {answer.device: answer.missing_bytes})
        assert isinstance(grown, Placement)
        for device in instance.budgets:
            less = instance.plan(strategy, {device: answer.missing_bytes - 1})
            assert isinstance(less, Infeasible)


@given(instances(), st.sampled_from(sorted(STRATEGIES)), st.data())
@settings(max_examples=80, deadline=None)
def test_more_memory_never_makes_a_plan_fail_or_get_worse(
    instance: Instance, strategy: str, data: st.DataObject
) -> None:
    before = instance.plan(strategy)
    if isinstance(before, Infeasible):
        return
    reasons = {decision.reason for decision in before.decisions}
    is_last_resort = "no other placement fits" in reasons or (
        strategy == "sequential" and not any(reason.startswith("next in order") for reason in reasons)
    )
    device = data.draw(st.sampled_from(sorted(instance.budgets)))
    more = {device: data.draw(st.integers(1, 9))}
    after = instance.plan(strategy, more)
    assert isinstance(after, Placement)
    # pieces anywhere may offload less than the run of blocks, or the devices filled in order, that more memory allows
    assert is_last_resort or _offloaded_bytes(after) <= _offloaded_bytes(before)
    grown = Instance(instance.blocks, {d: s + more.get(d, 0) for d, s in instance.budgets.items()}, 0)
    grown.overhead = instance.overhead
    if strategy == "balanced" and any(True for _ in instance.contiguous(instance.gpus)):
        assert grown.use(after.devices) <= instance.use(before.devices)


def _offloaded_bytes(placement: Placement) -> int:
    pairs = zip(placement.blocks, placement.devices, strict=True)
    return sum(block.weights_bytes for block, device in pairs if not device.is_accelerator)


@given(instances(), st.sampled_from(sorted(STRATEGIES)))
@settings(max_examples=80, deadline=None)
def test_the_same_question_has_the_same_answer(instance: Instance, strategy: str) -> None:
    assert instance.plan(strategy) == instance.plan(strategy)


@given(block_lists(), budget_maps(), overheads, st.sampled_from(sorted(STRATEGIES)), st.data())
@settings(max_examples=80, deadline=None)
def test_pinned_blocks_stay_and_the_budgets_hold(
    blocks: list[Block], budgets: dict[Device, int], overhead: int, strategy: str, data: st.DataObject
) -> None:
    places = st.sampled_from([None, None, *budgets])
    blocks = [Block(block.fqns, block.weights_bytes, 0, block.transient_bytes, data.draw(places)) for block in blocks]
    instance = Instance(blocks, budgets, overhead)
    answer = instance.plan(strategy)
    if isinstance(answer, Placement):
        assert instance.fits(answer.devices)
        assert all(b.fixed in (None, device) for b, device in zip(blocks, answer.devices, strict=True))
        if all(device.is_accelerator for device in answer.devices):
            for device in budgets:
                assert answer.memory(device).peak_bytes == instance.peak(answer.devices, device)
        total = sum(answer.memory(device).weights_bytes for device in budgets)
        assert total == sum(block.weights_bytes for block in blocks)
    else:
        choices = product(*[[block.fixed] if block.fixed else list(budgets) for block in blocks])
        assert not any(instance.fits(choice) for choice in choices)


# ---------------------------------------------------------------- phases before the end


phased_instances = st.builds(Instance, phased_block_lists(), budget_maps(), overheads)


@given(phased_instances, st.sampled_from(sorted(STRATEGIES)))
@settings(max_examples=150, deadline=None)
def test_all_phases_stay_within_the_budgets(instance: Instance, strategy: str) -> None:
    answer = instance.plan(strategy)
    if isinstance(answer, Placement):
        assert instance.fits(answer.devices)


@given(phased_instances, st.sampled_from(sorted(STRATEGIES)))
@settings(max_examples=150, deadline=None)
def test_a_placement_in_runs_is_found_whatever_phase_is_the_highest(instance: Instance, strategy: str) -> None:
    # pieces anywhere are searched by what blocks need in any company, so that some are missed
    if any(True for _ in instance.any_order()):
        answer = instance.plan(strategy)
        assert isinstance(answer, Placement)
        assert all(device.is_accelerator for device in answer.devices)


@given(phased_instances, st.sampled_from(["balanced", "auto"]))
@settings(max_examples=150, deadline=None)
def test_balanced_has_the_smallest_highest_use_of_all_phases(instance: Instance, strategy: str) -> None:
    candidates = list(instance.contiguous(instance.gpus)) or list(instance.any_order())
    if candidates:
        answer = instance.plan(strategy)
        assert isinstance(answer, Placement)
        assert instance.use(answer.devices) == min(map(instance.use, candidates))


@given(phased_instances)
@settings(max_examples=150, deadline=None)
def test_sequential_fills_by_the_highest_phase(instance: Instance) -> None:
    candidates = list(instance.contiguous(instance.gpus))
    if candidates:
        answer = instance.plan("sequential")
        assert isinstance(answer, Placement)
        positions = [instance.gpus.index(device) for device in answer.devices]
        assert positions == min([instance.gpus.index(device) for device in candidate] for candidate in candidates)


@given(phased_instances, st.sampled_from(sorted(STRATEGIES)))
@settings(max_examples=100, deadline=None)
def test_the_figures_of_a_placement_are_those_of_its_highest_phase(instance: Instance, strategy: str) -> None:
    answer = instance.plan(strategy)
    if isinstance(answer, Placement) and all(device.is_accelerator for device in answer.devices):
        for device in instance.budgets:
            assert answer.memory(device).peak_bytes == instance.peak(answer.devices, device)


@given(phased_instances, st.data())
@settings(max_examples=100, deadline=None)
def test_pinned_blocks_of_any_phase_stay_and_the_budgets_hold(instance: Instance, data: st.DataObject) -> None:
    places = st.sampled_from([None, None, *instance.budgets])
    blocks = [replace(block, fixed=data.draw(places)) for block in instance.blocks]
    pinned = Instance(blocks, instance.budgets, 0)
    pinned.overhead = instance.overhead
    answer = pinned.plan(data.draw(st.sampled_from(sorted(STRATEGIES))))
    if isinstance(answer, Placement):
        assert pinned.fits(answer.devices)
        assert all(b.fixed in (None, device) for b, device in zip(blocks, answer.devices, strict=True))
