"""The decisions of a placement in words, at several widths."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import CPU, DISK, Device
from devmap_cli.planning.nouns import Block, Placement
from devmap_cli.planning.strategies import plan
from devmap_cli.render.explanation import Explanation

GPUS = [Device("cuda", index) for index in range(4)]
MIB = 2**20
TIES = (("model.embed_tokens.weight", "lm_head.weight"),)


def layers(*sizes: int, fixed: Device | None = None, start: int = 0) -> list[Block]:
    """Layers of so many MiB."""
    return [Block((f"model.layers.{start + index}",), size * MIB, fixed=fixed) for index, size in enumerate(sizes)]


# embedding of 20 MiB that shares its weights with the head, eight layers of 10 MiB, norm of 1 MiB: 101 MiB
MODEL = [Block(("model.embed_tokens", "lm_head"), 20 * MIB), *layers(*[10] * 8), Block(("model.norm",), MIB)]


def placed(blocks: Sequence[Block] = MODEL, strategy: str = "sequential", *sizes: int, cpu: int = 0) -> Placement:
    budgets = {device: size * MIB for device, size in zip(GPUS, sizes or (60, 60), strict=False)}
    answer = plan(strategy, blocks, Budgets.of(budgets | ({CPU: cpu * MIB} if cpu else {})))
    assert isinstance(answer, Placement)
    return answer


def shown(explanation: Explanation, width: int = 200, *, terminal: bool = False) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=terminal, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(explanation)
    return captured.get()


def lines(explanation: Explanation, width: int = 200) -> list[str]:
    """Its lines, each with single blanks between words."""
    return [" ".join(line.split()) for line in shown(explanation, width).splitlines()]


def test_each_decision_with_its_bytes_before_and_after() -> None:
    # 20 + 4 · 10 = 60 of 60 on the first GPU, 4 · 10 + 1 = 41 of 60 on the second
    assert lines(Explanation(placed(), {GPUS[0]: "T4"}, TIES)) == [
        "sequential: 10 blocks in execution order on 2 of 2 devices",
        "",
        "GPU 0 T4 (budget 60.0 MiB): next in order, each device as far as its budget goes",
        "model.embed_tokens +20.0 MiB 0 B → 20.0 MiB 33 % shares weights with lm_head",
        "model.layers.0-3 +40.0 MiB 20.0 MiB → 60.0 MiB 100 % 4 × 10.0 MiB",
        "",
        "GPU 1 (budget 60.0 MiB): next in order, each device as far as its budget goes",
        "model.layers.4-7 +40.0 MiB 0 B → 40.0 MiB 67 % 4 × 10.0 MiB",
        "model.norm +1.0 MiB 40.0 MiB → 41.0 MiB 68 %",
    ]


def test_layers_of_other_sizes_are_lines_of_their_own() -> None:
    found = lines(Explanation(placed(layers(1, 1, 9, 9, 9), "sequential", 60)))
    assert found[3:] == [
        "model.layers.0-1 +2.0 MiB 0 B → 2.0 MiB 3 % 2 × 1.0 MiB",
        "model.layers.2-4 +27.0 MiB 2.0 MiB → 29.0 MiB 48 % 3 × 9.0 MiB",
    ]


def test_layers_that_alternate_are_one_line() -> None:
    found = lines(Explanation(placed(layers(*[1, 2] * 6), "sequential", 60)))
    assert found[3:] == ["model.layers.0-11 +18.0 MiB 0 B → 18.0 MiB 30 % 12 × 1.0 MiB to 2.0 MiB"]


def test_pins_are_marked() -> None:
    found = lines(Explanation(placed([*layers(10, 10, fixed=GPUS[1]), *layers(10, 10, start=2)])))
    assert found[2:4] == [
        "GPU 1 (budget 60.0 MiB): pinned",
        "model.layers.0-1 +20.0 MiB 0 B → 20.0 MiB 33 % 2 × 10.0 MiB",
    ]
    assert found[-1] == "model.layers.2-3 +20.0 MiB 0 B → 20.0 MiB 33 % 2 × 10.0 MiB"


@pytest.mark.parametrize(
    ("fqns", "ties", "text"),
    [
        (("a.embed", "head"), (("a.embed.weight", "head.weight"),), "shares weights with head"),
        (("a.embed", "head"), (), "as one with head"),
        (("a.token", "a.position"), (), "as one with position"),
        (("a.b", "c", "d.e"), (("a.b.weight", "c.weight"),), "shares weights with c; as one with d.e"),
    ],
)
def test_why_modules_go_together(fqns: tuple[str, ...], ties: tuple[tuple[str, ...], ...], text: str) -> None:
    found = lines(Explanation(placed([Block(fqns, MIB)], "sequential", 60), ties=ties))
    assert found[3] == f"{fqns[0]} +1.0 MiB 0 B → 1.0 MiB 2 % {text}"


def test_unused_devices_have_a_reason() -> None:
    found = lines(Explanation(placed(MODEL, "sequential", 200, 200, 200, cpu=100)))
    assert found[-2:] == ["GPU 1-2 unused: the devices before it hold all", "cpu unused: all fits on the accelerators"]


def test_what_offloading_adds_is_told() -> None:
    # each layer takes 10 MiB and 1 MiB of KV cache: two of four on GPU 0, 22 MiB; it also keeps the cache of the others
    # and has one of them at a time passing through: 20 + 4 + 10 = 34
    blocks = [Block((f"layers.{index}",), 10 * MIB, MIB, streamed_bytes=10 * MIB) for index in range(4)]
    answer = placed(blocks, "sequential", 24, cpu=20)
    assert [answer.memory(device).peak_bytes for device in answer.used_devices] == [34 * MIB, 20 * MIB]
    assert lines(Explanation(answer))[-1] == (
        "GPU 0: 22.0 MiB by these decisions, peak 34.0 MiB: the KV cache and the passing weights of what is offloaded "
        "come on top"
    )


def test_what_lies_on_disk_computes_on_cpu_where_nothing_else_does() -> None:
    blocks = [Block((f"layers.{index}",), 10 * MIB, MIB, streamed_bytes=10 * MIB) for index in range(4)]
    answer = plan("sequential", blocks, Budgets.of({CPU: 24 * MIB, DISK: 100 * MIB}))
    assert isinstance(answer, Placement)
    assert lines(Explanation(answer))[-2:] == [
        "cpu: 22.0 MiB by these decisions, peak 34.0 MiB: the KV cache and the passing weights of what is offloaded "
        "come on top",
        "disk: 22.0 MiB by these decisions, peak 20.0 MiB: what it holds computes, and keeps its KV cache, on cpu",
    ]


def test_what_is_reserved_stands_beside_the_budget() -> None:
    budgets = Budgets.of({GPUS[0]: 100 * MIB}, {GPUS[0]: 20 * MIB})
    answer = plan("sequential", MODEL[1:], budgets)
    assert isinstance(answer, Placement)
    assert lines(Explanation(answer))[2].startswith("GPU 0 (budget 100.0 MiB beside 20.0 MiB reserved): ")


def test_what_no_rehearsal_sees_is_told_with_its_source() -> None:
    budgets = Budgets.of({GPUS[0]: 5200 * MIB, GPUS[1]: 5200 * MIB, GPUS[2]: 800 * MIB})
    blocks = layers(*[5000] * 2, 600)
    answer = plan("sequential", blocks, budgets, overhead_bytes=dict.fromkeys(GPUS[:3], 100 * MIB))
    assert isinstance(answer, Placement)
    # an eighth of 800 MiB is 100
    assert lines(Explanation(answer))[-2:] == [
        "GPU 0-1: 640.0 MiB of each peak for CUDA's context and kernels: 635.8 MiB were measured with all of PyTorch's "
        "kernels loaded",
        "GPU 2: 100.0 MiB of the peak for CUDA's context and kernels: an eighth of the budget, as small models load "
        "few of them",
    ]


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_any_width_holds_whole_names_and_figures(width: int) -> None:
    text = shown(Explanation(placed(), {GPUS[0]: "T4"}, TIES), width)
    assert max(map(len, text.splitlines())) <= width
    for word in ("model.embed_tokens", "model.layers.0-3", "20.0 MiB → 60.0 MiB", "100 %", "4 × 10.0 MiB", "lm_head"):
        assert word in text


def test_a_narrow_terminal_has_figures_below_names() -> None:
    found = shown(Explanation(placed()), 40).splitlines()
    row = next(number for number, line in enumerate(found) if "layers.0-3" in line)
    assert [line.rstrip() for line in found[row : row + 3]] == [
        "  model.layers.0-3",
        "    20.0 MiB → 60.0 MiB, 100 %",
        "    +40.0 MiB: 4 × 10.0 MiB",
    ]


def test_a_name_wider_than_the_terminal_is_folded_not_cut() -> None:
    name = "x" * 100
    text = shown(Explanation(placed([Block((name,), MIB)], "sequential", 60)), 40)
    assert "".join(text.split()).count("x") >= 100
    assert max(map(len, text.splitlines())) <= 40


def test_colour_only_on_a_terminal() -> None:
    assert "\x1b" not in shown(Explanation(placed()))
    assert "\x1b[1m" in shown(Explanation(placed()), terminal=True)


def test_nothing_placed_is_no_failure() -> None:
    assert lines(Explanation(Placement("auto", (), (), Budgets.of({GPUS[0]: MIB}))))[0].startswith("auto: 0 blocks")


def test_a_peak_below_what_the_decisions_add_up_to_is_told() -> None:
    # 101 MiB are held; a peak counted by phases may be less than the largest needs of all blocks together
    placement = placed(MODEL, "sequential", 200)
    after = placement.decisions[-1].bytes_after
    assert after == 101 * MIB
    larger = replace(placement.decisions[-1], bytes_after=after + 5 * MIB)
    found = lines(Explanation(replace(placement, decisions=(*placement.decisions[:-1], larger))))
    assert found[-1] == (
        "GPU 0: 106.0 MiB by these decisions, peak 101.0 MiB: its blocks do not all need most at the same time"
    )
