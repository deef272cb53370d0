"""Segment costs against the definition, and the exact search on hand-computed sequences."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from devmap_cli.devices.device import Device
from devmap_cli.planning.costs import Room, SegmentCosts
from devmap_cli.planning.partition import balanced, fill, least_use

COSTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12)


def room(index: int, budget: int, **fields: Any) -> Room:
    plain = Room(Device("cuda", index), budget, budget)
    return replace(plain, is_held=bool(fields.get("held_resident_bytes")), **fields)


@given(COSTS, st.integers(0, 60), st.integers(0, 3), st.integers(0, 5), st.data())
def test_reach_is_the_furthest_affordable_stop(
    pairs: list[tuple[int, int]], cap: int, overhead: int, held: int, data: st.DataObject
) -> None:
    costs = SegmentCosts([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    start = data.draw(st.integers(0, len(pairs)))
    place = room(0, cap, overhead_bytes=overhead, held_resident_bytes=held)

    def cost(stop: int) -> int:
        transient = max((pair[1] for pair in pairs[start:stop]), default=0)
        return overhead + held + sum(pair[0] for pair in pairs[start:stop]) + transient

    affordable = [stop for stop in range(start + 1, len(pairs) + 1) if cost(stop) <= cap]
    assert costs.reach(place, start, cap) == max(affordable, default=start)
    for stop in range(start + 1, len(pairs) + 1):
        assert costs.on(place, start, stop) == cost(stop)


def test_the_result_is_exact_where_floats_would_round() -> None:
    # 10**18 + 1 against 10**18 differ by less than a float can tell
    big = 10**18
    costs = SegmentCosts([big, 1, big], [0, 0, 0])
    rooms = [room(0, 2 * big), room(1, 2 * big - 1)]
    found = least_use(costs, rooms, lambda use: fill(costs, rooms, use))
    assert found is not None
    # [big, 1 | big] or [big | 1, big]: the 1 goes where the budget is larger, so the other one is the highest
    assert found[0] == min(
        max(Fraction(big + 1, 2 * big), Fraction(big, 2 * big - 1)),
        max(Fraction(big, 2 * big), Fraction(big + 1, 2 * big - 1)),
    )


def test_cuts_are_evened_within_the_optimum() -> None:
    # 50 decides; the four tens are shared 20 and 20, not 40 and 0 or 30 and 10
    costs = SegmentCosts([10, 10, 10, 10, 50], [0] * 5)
    segments = balanced(costs, [room(index, 100) for index in range(3)])
    assert segments is not None
    assert segments.cuts == (0, 2, 4, 5)


def test_what_does_not_fit_is_none() -> None:
    costs = SegmentCosts([10, 10], [0, 0])
    assert balanced(costs, [room(0, 10), room(1, 9)]) is None
    assert balanced(costs, []) is None


def test_pinned_bytes_count_first() -> None:
    costs = SegmentCosts([10] * 4, [0] * 4)
    segments = balanced(costs, [room(0, 100, held_resident_bytes=40), room(1, 100)])
    assert segments is not None
    assert segments.cuts == (0, 0, 4)


def test_of_more_rooms_than_blocks_the_first_are_used() -> None:
    segments = balanced(SegmentCosts([5, 5, 5], [0] * 3), [room(index, 10) for index in range(9)])
    assert segments is not None
    assert segments.cuts == (0, 1, 2, 3, 3, 3, 3, 3, 3, 3)
