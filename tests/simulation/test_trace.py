"""What a recorder makes of a machine's allocations."""

from __future__ import annotations

import json

import pytest

from devmap_cli.simulation.trace import MAIN, MAX_DEVICES, Event, Holder, Recorder, Tower, Trace, are_alike, mixed

BLOCKS = {"embed": 0, "layers.0": 1, "layers.1": 2}


def recorder_in(phase: str) -> Recorder:
    recorder = Recorder(BLOCKS)
    recorder.phase(phase)
    return recorder


def test_each_block_has_a_device_of_its_own() -> None:
    assert Recorder(BLOCKS).device_map() == {"embed": 0, "layers.0": 1, "layers.1": 2}


def test_a_name_belongs_to_the_block_of_its_closest_ancestor() -> None:
    recorder = Recorder({**BLOCKS, "layers.10": 3})
    assert recorder.block_of("layers.1.mlp.weight") == 2
    assert recorder.block_of("layers.10.mlp") == 3
    assert recorder.block_of("layers") is None
    assert recorder.block_of("") is None


def test_weights_in_the_order_of_loading_and_the_largest_conversion() -> None:
    recorder = Recorder(BLOCKS)
    recorder.weight("layers.1.experts", 600, is_buffer=False, conversion_bytes=600, read_bytes=600)
    recorder.weight("layers.1.more", 500, is_buffer=False, conversion_bytes=800, read_bytes=1000)
    recorder.weight("embed.weight", 100, is_buffer=False, conversion_bytes=0, read_bytes=100)
    recorder.weight("embed.scale", 4, is_buffer=True, conversion_bytes=0, read_bytes=0)
    recorder.weight("nowhere.weight", 9, is_buffer=False, conversion_bytes=9, read_bytes=9)
    recorder.holder("layers.1", [600, 800])
    recorder.holder("nowhere", [9])
    recorder.holder("embed", [])
    trace = recorder.trace()
    assert trace.weights == ((2, 600), (2, 500), (0, 100), (0, 4))
    assert trace.buffers == ((0, 4),)
    assert trace.conversion_bytes == (0, 0, 800)
    assert trace.read_bytes == (100, 0, 1600)
    assert trace.holders == (Holder("layers.1", 2, (600, 800)),)


def test_allocations_are_numbered_through_all_phases() -> None:
    recorder = Recorder(BLOCKS)
    assert recorder.allocated(0, 64) is None  # loading is no phase
    recorder.phase("prefill")
    first = recorder.allocated(0, 64)
    second = recorder.allocated(1, 64, copy_of=first)
    recorder.freed(first)
    recorder.phase("decode")
    third = recorder.allocated(2, 32, is_workspace=True)
    recorder.freed(None)
    recorder.cached([second] if second is not None else [])
    recorder.stop()
    recorder.freed(second)
    assert recorder.allocated(0, 8) is None
    assert (first, second, third) == (0, 1, 2)
    assert recorder.trace().phases == {
        "prefill": ((Event.ALLOCATE, 0, 64), (Event.COPY, 0, 0), (Event.ALLOCATE, 1, 64), (Event.FREE, 0, 0)),
        "decode": ((Event.WORKSPACE, 2, 32), (Event.CACHED, 1, 0)),
    }


def test_what_is_made_once_is_marked_wherever_it_was_allocated() -> None:
    recorder = recorder_in("prefill")
    recorder.allocated(0, 64)
    table = recorder.allocated(1, 32)
    recorder.phase("decode")
    recorder.allocated(1, 16)
    recorder.once(table)
    recorder.once(None)
    assert recorder.trace().phases == {
        "prefill": ((Event.ALLOCATE, 0, 64), (Event.ONCE, 1, 32)),
        "decode": ((Event.ALLOCATE, 1, 16),),
    }


def test_only_modules_that_hold_weights_are_entered_and_left() -> None:
    recorder = Recorder(BLOCKS)
    recorder.holder("layers.0.mlp", [10])
    recorder.phase("prefill")
    for fqn in ("layers.0", "layers.0.mlp"):
        recorder.entered(fqn)
        recorder.left(fqn)
    assert recorder.trace().phases == {"prefill": ((Event.ENTER, 0, 0), (Event.LEAVE, 0, 0))}


def test_more_blocks_than_devices_share_them_in_turns() -> None:
    blocks = {f"layers.{index}": index for index in range(MAX_DEVICES + 2)}
    recorder = Recorder(blocks)
    assert recorder.device_map()[f"layers.{MAX_DEVICES}"] == recorder.device_map()["layers.0"] == 0
    recorder.phase("prefill")
    first = recorder.allocated(0, 64)
    recorder.entered(f"layers.{MAX_DEVICES}")
    recorder.allocated(0, 64)
    assert recorder.block_on(0) == MAX_DEVICES
    recorder.working_for(first)
    recorder.allocated(0, 64)
    recorder.allocated(1, 64)
    assert [block for _, block, _ in recorder.trace().phases["prefill"]] == [0, MAX_DEVICES, 0, 1]


VISION = {"visual.patches.proj": 0, "visual.blocks.0": 1, "visual.blocks.1": 2, "embed": 3}


def test_the_code_of_a_tower_is_told_from_that_of_its_blocks() -> None:
    recorder = Recorder(VISION, ["visual", "visual.patches"], "embed")
    assert recorder.num_devices == 6
    recorder.phase("prefill")
    recorder.allocated(recorder.device_of(recorder.towers["visual.patches"]), 64)
    trace = recorder.trace()
    assert trace.phases["prefill"] == ((Event.ALLOCATE, 5, 64),)
    assert trace.towers == (Tower(3, (0, 1, 2)), Tower(4, (0,)))
    assert trace.homes == [0, 1, 2, 3, 0, 0]


@pytest.mark.parametrize(
    ("places", "towers"),
    [
        ("aaab", "aa"),  # the tower whole: it has its inputs there
        ("abab", "ba"),  # in pieces: it has them where the embedding is, its whole part does not
        ("cabb", "bc"),
    ],
)
def test_a_tower_runs_where_its_blocks_are_if_they_are_together(places: str, towers: str) -> None:
    trace = Recorder(VISION, ["visual", "visual.patches"], "embed").trace()
    assert trace.with_towers(list(places), "m") == [*places, *towers]
    assert trace.cut_towers(places) == ([] if places == "aaab" else [4])
    assert Trace.from_document(json.loads(json.dumps(trace.to_document()))) == trace


@pytest.mark.parametrize(("places", "root"), [("aaaa", "a"), ("aaab", "m"), ("baaa", "m")])
def test_the_inputs_of_the_root_come_to_the_main_device(places: str, root: str) -> None:
    trace = Recorder(VISION, ["", "visual"], "embed").trace()
    assert trace.towers == (Tower(MAIN, (0, 1, 2, 3)), Tower(3, (0, 1, 2)))
    assert trace.with_towers(list(places), "m")[4] == root
    assert not trace.cut_towers("aaab")


def test_where_towers_share_devices_it_is_theirs_between_their_blocks() -> None:
    blocks = {f"visual.blocks.{index}": index for index in range(MAX_DEVICES)}
    recorder = Recorder(blocks, ["visual"], "visual.blocks.0")
    recorder.phase("prefill")
    for step, fqn in (("in", "visual"), ("in", "visual.blocks.0"), ("out", "visual.blocks.0"), ("out", "visual")):
        (recorder.entered if step == "in" else recorder.left)(fqn)
        recorder.allocated(0, 64)
    assert [block for _, block, _ in recorder.trace().phases["prefill"]] == [MAX_DEVICES, 0, MAX_DEVICES, MAX_DEVICES]


def sized(*sizes: int, weights: tuple[tuple[int, int], ...] = ((0, 100),), event: Event = Event.FREE) -> Trace:
    events = (*((Event.ALLOCATE, 0, size) for size in sizes), (event, 0, 0))
    return Trace(1, weights, (), (0,), (100,), (), {"prefill": events})


def test_traces_mix_size_by_size() -> None:
    assert mixed([sized(10, 1000), sized(30, 2000)], [0.25, 0.75]) == sized(25, 1750)
    assert mixed([sized(10, 1000), sized(30, 2000), sized(20, 1200)], [1, 1, -1]) == sized(20, 1800)
    assert mixed([sized(10), sized(40)], [2, -1]) == sized(1)  # never nothing


def test_traces_are_alike_whatever_their_sizes() -> None:
    assert are_alike(sized(10, 20), sized(30, 40))
    assert not are_alike(sized(10), sized(10, 20))
    assert not are_alike(sized(10), sized(10, event=Event.CACHED))
    assert not are_alike(sized(10), sized(10, weights=((0, 101),)))


def test_a_trace_survives_json() -> None:
    trace = Trace(
        num_blocks=2,
        weights=((0, 100), (1, 200)),
        buffers=((1, 8),),
        conversion_bytes=(0, 200),
        read_bytes=(100, 400),
        holders=(Holder("a", 0, (60, 40)), Holder("b", 1, (200,))),
        phases={"prefill": ((Event.ALLOCATE, 0, 64), (Event.COPY, 0, 0), (Event.ALLOCATE, 1, 64)), "decode": ()},
    )
    assert Trace.from_document(json.loads(json.dumps(trace.to_document()))) == trace
