"""How long planning alone takes, on made-up models and machines far larger than any: seconds of one core."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random

from rich.console import Console
from rich.table import Table

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import CPU, Device
from devmap_cli.planning.nouns import Block, Infeasible
from devmap_cli.planning.strategies import STRATEGIES, plan

SIZES = ((1_000, 64, 0.2), (10_000, 512, 5.0))
"""Blocks, devices, and the seconds that a plan is to stay below."""
ROUNDS = 3
MIB = 1 << 20
ROOM, SCARCE, TOO_SMALL = 1.15, 1.01, 0.9
"""All budgets together, beside what all blocks together take."""


def run(console: Console, seed: int) -> bool:
    """Print the seconds of each strategy; True, as nothing here must hold: other work on the machine counts too."""
    table = Table("blocks × devices", "costs", "budgets", *STRATEGIES, "goal", title="C: seconds of planning alone")
    for num_blocks, num_devices, goal in SIZES:
        for costs, blocks in _models(num_blocks, Random(seed)):
            for shape, budgets in _machines(blocks, num_devices, Random(seed)):
                seen = [_seconds(strategy, blocks, budgets) for strategy in STRATEGIES]
                cells = [_cell(seconds, goal, found=found) for seconds, found in seen]
                table.add_row(f"{num_blocks:,} × {num_devices}", costs, shape, *cells, f"< {goal}")
    console.print(table)
    console.print("the best of up to three rounds; ! above the goal, – refused")
    return True


def _cell(seconds: float, goal: float, *, found: bool) -> str:
    return f"{seconds:.3f}{'' if seconds < goal else ' !'}{'' if found else ' –'}"


def _seconds(strategy: str, blocks: list[Block], budgets: Budgets) -> tuple[float, bool]:
    best = float("inf")
    found = False
    for _ in range(ROUNDS):
        start = time.process_time()
        found = not isinstance(plan(strategy, blocks, budgets), Infeasible)
        best = min(best, time.process_time() - start)
        if best > 1:
            break
    return best, found


def _models(num_blocks: int, random: Random) -> Iterator[tuple[str, list[Block]]]:
    """Blocks of equal layers, of unlike ones, and of unlike ones that need more while they load or read the prompt."""
    ends = (num_blocks // 100, num_blocks - 1)
    equal = [
        Block((str(index),), (900 if index in ends else 400) * MIB + 8192, kv_cache_bytes=9 * MIB)
        for index in range(num_blocks)
    ]
    yield "equal layers", equal
    unlike = [
        Block(
            (str(index),),
            random.randrange(100 * MIB, 800 * MIB),
            kv_cache_bytes=random.randrange(30 * MIB),
            transient_bytes=random.randrange(200 * MIB),
        )
        for index in range(num_blocks)
    ]
    yield "unlike layers", unlike
    yield (
        "with phases",
        [
            Block(
                block.fqns,
                block.weights_bytes,
                block.kv_cache_bytes,
                block.transient_bytes,
                load_transient_bytes=random.randrange(400 * MIB),
                prompt_kv_cache_bytes=block.kv_cache_bytes * 3 // 4,
                prompt_transient_bytes=random.randrange(400 * MIB),
            )
            for block in unlike
        ],
    )


def _machines(blocks: list[Block], num_devices: int, random: Random) -> Iterator[tuple[str, Budgets]]:
    """Devices with room for all, of one size, four, or as many as there are; then unequal ones with too little room."""
    resident = sum(block.resident_bytes for block in blocks)
    need = resident * ROOM + num_devices * max(block.largest_transient_bytes for block in blocks)
    kinds = [random.choice((1, 1.5, 2, 5)) for _ in range(num_devices)]
    own = [random.uniform(0.5, 2) for _ in range(num_devices)]
    for shape, shares, total, tiers in (
        ("equal", [1.0] * num_devices, need, {}),
        ("four kinds", kinds, need, {}),
        ("all unequal", own, need, {}),
        ("scarce", own, resident * SCARCE, {}),
        ("too small, cpu", own, resident * TOO_SMALL, {CPU: resident}),
        ("too small", own, resident * TOO_SMALL, {}),
    ):
        sizes = {Device("cuda", index): int(total * share / sum(shares)) for index, share in enumerate(shares)}
        yield shape, Budgets.of({**sizes, **tiers})
