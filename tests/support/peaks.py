"""Peaks that are not what sums say, to plan by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from devmap_cli.devices.device import Device
from devmap_cli.planning.nouns import Block

BESIDE_BYTES = 3


@dataclass
class Seen:
    """What devices really take: for each block more than is planned with, and something for the largest one."""

    blocks: Sequence[Block]
    more: Sequence[tuple[int, int]]
    looks: int = 0

    def beside_bytes(self, device: Device, budget_bytes: int) -> int:  # noqa: ARG002 - of the protocol
        return BESIDE_BYTES

    def peak_bytes(
        self,
        device: Device,  # noqa: ARG002 - of the protocol
        budget_bytes: int,
        blocks: Sequence[int],
        *,
        is_main: bool = False,
        away: Sequence[int] = (),
    ) -> int | None:
        assert is_main or not away
        self.looks += 1
        held = sum(self.blocks[index].resident_bytes + self.more[index][0] for index in blocks)
        cached = sum(self.blocks[index].kv_cache_bytes for index in away)
        passing = (self.blocks[index].streamed_bytes + self.more[index][1] for index in away)
        peak = BESIDE_BYTES + held + cached + max([*(self.more[index][1] for index in blocks), *passing], default=0)
        return peak if peak <= budget_bytes else None


@dataclass
class Steps(Seen):
    """What devices take where fewer blocks can take more: with some numbers of them another segment is reserved."""

    another: Sequence[int] = ()

    def peak_bytes(
        self,
        device: Device,  # noqa: ARG002 - of the protocol
        budget_bytes: int,
        blocks: Sequence[int],
        *,
        is_main: bool = False,  # noqa: ARG002
        away: Sequence[int] = (),  # noqa: ARG002
    ) -> int | None:
        peak = 10 * len(blocks) + (60 if len(blocks) in self.another else 0)
        return peak if peak <= budget_bytes else None
