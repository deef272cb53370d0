"""The inverse questions on toy workloads whose memory is known at every value."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import Device
from devmap_cli.planning.nouns import Block, Infeasible, Placement
from devmap_cli.planning.searching import Largest, fewest, largest, shares, smallest

GPU = Device("sim", 0)
Takes = Callable[[int], int]


class Attempts:
    """Plans for a device of `budget` bytes, 1,000 of them weights, and counts how often it is asked."""

    def __init__(self, takes: Takes, budget: int, tells_missing: bool = True) -> None:
        self._takes, self._budget, self._tells_missing = takes, budget, tells_missing
        self.values: list[int] = []

    def __call__(self, value: int) -> Placement | Infeasible:
        self.values.append(value)
        needed = 1000 + self._takes(value)
        if needed > self._budget:
            needed = needed if self._tells_missing else self._budget
            return Infeasible("auto", "it is too small", needed, self._budget, GPU)
        block = Block(("a",), 1000, kv_cache_bytes=self._takes(value))
        return Placement("auto", (block,), (GPU,), Budgets.of({GPU: self._budget}))


def linear(value: int) -> int:
    return 50_000 + 300 * value


def quadratic(value: int) -> int:
    return 100 * value + value * value // 40


def in_segments(value: int) -> int:
    # as an allocator takes it
    return -(-300 * value // 2_000) * 2_000


@pytest.mark.parametrize("takes", [linear, quadratic, in_segments])
@pytest.mark.parametrize("budget", [60_000, 500_000, 12_345_678, 987_654_321])
@pytest.mark.parametrize("first", [1, 2048])
def test_a_handful_of_attempts_find_the_largest(takes: Takes, budget: int, first: int) -> None:
    attempt = Attempts(takes, budget)
    found = largest(attempt, first, 1 << 24)
    assert isinstance(found, Largest)
    assert found.next_value is not None
    assert found.refusal is not None
    assert {found.value, found.next_value} <= set(attempt.values)
    assert 1000 + takes(found.value) <= budget < 1000 + takes(found.next_value)
    assert found.next_value - found.value <= max(1, found.next_value // 256)
    assert len(attempt.values) == len(set(attempt.values)) <= 11


@pytest.mark.parametrize("off_by", [0, 3, -3, 40, -40])
@pytest.mark.parametrize("takes", [linear, quadratic, in_segments])
def test_what_is_foreseen_is_found_to_one(takes: Takes, off_by: int) -> None:
    budget = 12_345_678
    most = smallest(lambda value: 1000 + takes(value) > budget, 0, 1 << 24) - 1
    attempt = Attempts(takes, budget)
    found = largest(attempt, 2048, 1 << 24, lambda _known: most + off_by)
    assert isinstance(found, Largest)
    assert (found.value, found.next_value) == (most, most + 1)
    assert len(attempt.values) == len(set(attempt.values)) <= (6 if off_by == 0 else 20)


def test_polynomials_through_what_is_known() -> None:
    def curve(value: int) -> int:
        return 5 + 3 * value + 7 * value * value

    known = [2048, 9000, 3000]
    shared = zip(shares(known, 4471), map(curve, known), strict=True)
    assert sum(share * at for share, at in shared) == pytest.approx(curve(4471))
    assert shares([10, 20], 15) == [0.5, 0.5]
    assert shares([10, 20], 10) == [1, 0]


def test_it_is_found_without_margins_too() -> None:
    attempt = Attempts(linear, 12_345_678, tells_missing=False)
    found = largest(attempt, 2048, 1 << 24)
    assert isinstance(found, Largest)
    assert found.next_value is not None
    assert 1000 + linear(found.value) <= 12_345_678 < 1000 + linear(found.next_value)


def test_nothing_fits_and_all_fits() -> None:
    refused = largest(Attempts(linear, 51_299), 2048, 1 << 24)
    assert isinstance(refused, Infeasible)
    assert refused.missing_bytes == 1  # of what a single one takes
    all_fits = largest(Attempts(linear, 1 << 40), 100, 5000)
    assert isinstance(all_fits, Largest)
    assert (all_fits.value, all_fits.next_value, all_fits.refusal) == (5000, None, None)


@pytest.mark.parametrize("number", [1, 2, 3, 64, 100])
def test_the_fewest_that_suffice(number: int) -> None:
    found = fewest(lambda count: Attempts(lambda _: 0, 1000 if count >= number else 999)(count), 100)
    assert not isinstance(found, Infeasible)
    assert found[0] == number


def test_no_number_suffices() -> None:
    attempt = Attempts(lambda _: 0, 999)
    assert isinstance(fewest(attempt, 100), Infeasible)
    assert attempt.values[-1] == 100


def test_the_smallest_within_a_step() -> None:
    assert smallest(lambda value: value >= 37, 0, 100) == 37
    assert 37 <= smallest(lambda value: value >= 37, 0, 100, step=10) <= 46
