"""Traces of a few events, played to devices: what each holds, by hand.

Every request takes a multiple of 512 bytes. Below 1 MiB it comes from a segment of 2 MiB, up to 10 MiB from one of 20.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from devmap_cli.simulation.memory import UNLIMITED_BYTES, DeviceRehearsal
from devmap_cli.simulation.replay import Replay, ReplayFailure, Seat, replay
from devmap_cli.simulation.trace import Event, Holder, Trace

MIB = 1 << 20
Events = Sequence[tuple[int, int, int]]
TOGETHER, APART = [Seat(0), Seat(0)], [Seat(0), Seat(1)]


def traced(
    phases: Events | Mapping[str, Events],
    *,
    weights: Sequence[tuple[int, int]] = (),
    buffers: Sequence[tuple[int, int]] = (),
    conversions: tuple[int, int] = (0, 0),
    holders: Sequence[Holder] = (),
) -> Trace:
    """A trace of two blocks; events alone are those of the prefill."""
    named = phases if isinstance(phases, Mapping) else {"prefill": phases}
    return Trace(
        num_blocks=2,
        weights=tuple(weights),
        buffers=tuple(buffers),
        conversion_bytes=conversions,
        read_bytes=(0, 0),
        holders=tuple(holders),
        phases={name: tuple(events) for name, events in named.items()},
    )


def played(trace: Trace, seats: Sequence[Seat], *capacities: int) -> Replay:
    num_devices = 1 + max(seat.device for seat in seats)
    return replay(trace, seats, capacities or [UNLIMITED_BYTES] * num_devices, 0)


def allocated(trace: Trace, seats: Sequence[Seat], phase: str = "prefill") -> list[int]:
    return [device.allocated_bytes[phase] for device in played(trace, seats).devices]


def only(answer: Replay) -> DeviceRehearsal:
    assert answer.failure is None
    (device,) = answer.devices
    return device


def test_a_copy_is_made_only_where_it_lies_elsewhere() -> None:
    trace = traced([(Event.ALLOCATE, 0, 1024), (Event.COPY, 0, 0), (Event.ALLOCATE, 1, 1024)])
    assert allocated(trace, TOGETHER) == [1024]
    assert allocated(trace, APART) == [1024, 1024]


@pytest.mark.parametrize(
    ("seats", "expected"),
    [
        ([Seat(0), Seat(0), Seat(1)], [0, 2048]),  # tokens are with the first weight, the input is elsewhere: it stays
        ([Seat(0), Seat(1), Seat(1)], [1024, 1024]),  # tokens are elsewhere: it comes to the first weight
        ([Seat(0, is_offloaded=True), Seat(1), Seat(1)], [0, 2048]),  # which is nowhere: it stays
    ],
)
def test_inputs_are_moved_to_the_first_weight_unless_tokens_are_there(seats: list[Seat], expected: list[int]) -> None:
    events = [(Event.ALLOCATE, 2, 1024), (Event.MOVE, 0, 0), (Event.ALLOCATE, 0, 1024), (Event.FREE, 0, 0)]
    trace = replace(traced([*events, (Event.ALLOCATE, 2, 1024)]), num_blocks=3, conversion_bytes=(0, 0, 0), tokens=1)
    assert allocated(trace, seats) == expected


def test_memory_is_free_when_the_last_of_its_copies_is() -> None:
    events = [(Event.ALLOCATE, 0, 1024), (Event.COPY, 0, 0), (Event.ALLOCATE, 1, 1024), (Event.FREE, 0, 0)]
    still_used = traced([*events, (Event.ALLOCATE, 0, 2048)])
    assert allocated(still_used, TOGETHER) == [1024 + 2048]
    assert allocated(still_used, APART) == [2048, 1024]
    given_back = traced([*events, (Event.FREE, 1, 0), (Event.ALLOCATE, 0, 2048)])
    assert allocated(given_back, TOGETHER) == [2048]


def test_a_copy_of_a_copy_is_the_same_memory_again() -> None:
    chain = [(Event.COPY, 0, 0), (Event.ALLOCATE, 1, 512), (Event.COPY, 1, 0), (Event.ALLOCATE, 0, 512)]
    trace = traced([(Event.ALLOCATE, 0, 512), *chain])
    assert allocated(trace, TOGETHER) == [512]
    assert allocated(trace, APART) == [1024, 512]  # there and back again


def test_what_follows_a_copy_is_no_copy() -> None:
    events = [(Event.ALLOCATE, 0, 512), (Event.COPY, 0, 0), (Event.ALLOCATE, 0, 512), (Event.ALLOCATE, 0, 512)]
    assert allocated(traced(events), [Seat(0), Seat(0)]) == [1024]


def test_the_workspace_is_taken_once_on_each_device() -> None:
    trace = traced([(Event.WORKSPACE, 0, 8 * MIB), (Event.WORKSPACE, 1, 8 * MIB)])
    assert allocated(trace, TOGETHER) == [8 * MIB]
    assert allocated(trace, APART) == [8 * MIB, 8 * MIB]
    seen = only(played(trace, TOGETHER))
    assert (seen.peak.activation_bytes, seen.peak.overhead_bytes) == (0, 20 * MIB)


def test_a_shared_buffer_is_made_once_on_each_device_and_numbers_go_on() -> None:
    # 0 and 1 are the buffer, 2 is given back by its number
    events = [(Event.ONCE, 0, 512), (Event.ONCE, 1, 512), (Event.ALLOCATE, 0, 1024), (Event.FREE, 2, 0)]
    trace = traced([*events, (Event.ALLOCATE, 1, 2048)])
    assert allocated(trace, TOGETHER) == [512 + 2048]
    assert allocated(trace, APART) == [512 + 1024, 512 + 2048]


def test_offloaded_weights_come_and_go_module_by_module() -> None:
    holders = [Holder("first", 1, (1000, 3000)), Holder("second", 1, (5000,))]
    events = [
        (Event.ENTER, 0, 0),
        (Event.ALLOCATE, 1, 512),
        (Event.LEAVE, 0, 0),
        (Event.ENTER, 1, 0),
        (Event.LEAVE, 1, 0),
    ]
    weights = [(0, 512), (1, 1000), (1, 3000), (1, 5000)]
    trace = traced(events, weights=weights, holders=holders)
    offloaded = [Seat(0), Seat(0, is_offloaded=True)]
    # 512 of block 0 and of the activation, then 1000 and 3000 rounded up, or 5000
    assert allocated(trace, offloaded, "load") == [512]
    assert allocated(trace, offloaded) == [max(512 + 1024 + 3072 + 512, 512 + 512 + 5120)]
    assert allocated(trace, TOGETHER) == [512 + 1024 + 3072 + 5120 + 512]
    seen = only(played(trace, offloaded))
    assert seen.peak.weights_bytes == 512
    assert seen.peak.activation_bytes == 512 + 5120


def test_a_holder_may_be_entered_while_it_is_in_use() -> None:
    holders = [Holder("first", 0, (512,))]
    trace = traced([(Event.ENTER, 0, 0), (Event.ENTER, 0, 0), (Event.LEAVE, 0, 0)], holders=holders)
    assert allocated(trace, [Seat(0, is_offloaded=True)] * 2) == [1024]


def test_buffers_of_an_offloaded_block_stay_where_it_computes() -> None:
    trace = traced([], weights=[(0, 512), (1, 4096), (1, 1024)], buffers=[(1, 1024)])
    assert allocated(trace, [Seat(0), Seat(0, is_offloaded=True)], "load") == [512 + 1024]


def test_merging_takes_its_largest_result_once_more_per_device() -> None:
    trace = traced([], weights=[(0, 4096), (1, 2048)], conversions=(1024, 2048))
    assert allocated(trace, TOGETHER, "load") == [4096 + 2048 + 2048]
    assert allocated(trace, APART, "load") == [4096 + 1024, 2048 + 2048]
    assert allocated(trace, [Seat(0), Seat(0, is_offloaded=True)], "load") == [4096 + 1024]


def test_all_weights_of_a_device_come_from_one_piece() -> None:
    # 4 weights of 3 MiB: one by one they would come from a segment of 20 MiB
    trace = traced([], weights=[(0, 3 * MIB)] * 4)
    assert only(played(trace, TOGETHER)).phases["load"].reserved_bytes == 12 * MIB


def test_the_cache_is_what_is_in_it_at_the_end_of_a_phase() -> None:
    phases = {
        "prefill": [(Event.ALLOCATE, 0, 500), (Event.ALLOCATE, 1, 700), (Event.CACHED, 0, 0), (Event.CACHED, 1, 0)],
        "decode": [(Event.FREE, 0, 0), (Event.ALLOCATE, 0, 4000), (Event.CACHED, 1, 0), (Event.CACHED, 2, 0)],
    }
    first, second = played(traced(phases), APART).devices
    assert [first.phases[phase].kv_cache_bytes for phase in ("load", "prefill", "decode")] == [0, 512, 4096]
    assert [second.phases[phase].kv_cache_bytes for phase in ("load", "prefill", "decode")] == [0, 1024, 1024]
    assert (first.peak_phase, first.peak.activation_bytes) == ("decode", 0)


@pytest.mark.parametrize(
    ("capacities", "failure"),
    [
        ((4 * MIB, 4 * MIB), None),
        ((MIB, 4 * MIB), ReplayFailure(0, "load", "")),
        ((4 * MIB, 2 * MIB - 1), ReplayFailure(1, "load", "")),
        ((2 * MIB, 4 * MIB), ReplayFailure(0, "prefill", "first")),
        ((4 * MIB, 2 * MIB), ReplayFailure(1, "decode", "second")),
    ],
)
def test_it_runs_out_of_memory_where_the_run_would(capacities: tuple[int, int], failure: ReplayFailure | None) -> None:
    # device 0 needs a second segment for the prompt, device 1 for the answer
    phases = {
        "prefill": [(Event.ENTER, 0, 0), (Event.ALLOCATE, 0, MIB - 1), (Event.ALLOCATE, 0, MIB - 1)],
        "decode": [(Event.ENTER, 1, 0), (Event.ALLOCATE, 1, MIB - 1), (Event.ALLOCATE, 1, MIB - 1)],
    }
    holders = [Holder("first", 0, (512,)), Holder("second", 1, (512,))]
    trace = traced(phases, weights=[(0, 512), (1, 512)], holders=holders)
    answer = played(trace, APART, *capacities)
    assert answer.failure == failure
    last = failure.phase if failure else "decode"
    assert list(answer.devices[0].phases)[-1] == last


def test_weights_that_pass_through_may_be_too_much() -> None:
    trace = traced([(Event.ENTER, 0, 0)], weights=[(0, 512), (1, 3 * MIB)], holders=[Holder("big", 1, (3 * MIB,))])
    answer = played(trace, [Seat(0), Seat(0, is_offloaded=True)], 16 * MIB)
    assert answer.failure == ReplayFailure(0, "prefill", "big")


def test_a_device_without_blocks_holds_nothing() -> None:
    trace = traced([(Event.ALLOCATE, 0, 512)], weights=[(0, 512), (1, 512)])
    answer = replay(trace, [Seat(1), Seat(1)], [UNLIMITED_BYTES] * 3, 1)
    assert [device.allocated_bytes["prefill"] for device in answer.devices] == [0, 1536, 0]
    assert [device.index for device in answer.devices] == [0, 1, 2]
