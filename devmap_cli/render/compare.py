"""Strategies side by side: what each puts on the devices, and how fast that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from devmap_cli.devices.device import Device
from devmap_cli.planning.nouns import Infeasible, Placement
from devmap_cli.planning.speed import Speed
from devmap_cli.units import format_bytes

_MAX_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """One strategy's answer; `speed` where it can be predicted."""

    strategy: str
    answer: Placement | Infeasible
    speed: Speed | None = None

    @property
    def uses(self) -> dict[Device, float]:
        """Peak by budget of each accelerator in use."""
        if isinstance(self.answer, Infeasible):
            return {}
        budgets = self.answer.budgets
        return {
            device: self.answer.memory(device).peak_bytes / budgets[device]
            for device in budgets.accelerators
            if budgets[device]
        }

    def to_document(self) -> dict[str, Any]:
        """The answer as plain data."""
        if isinstance(self.answer, Infeasible):
            device = self.answer.device
            return {
                "strategy": self.strategy,
                "fits": False,
                "device": None if device is None else device.map_value,
                "missing_bytes": self.answer.missing_bytes,
            }
        placement = self.answer
        return {
            "strategy": self.strategy,
            "fits": True,
            "devices": [
                {"device": device.map_value, "budget_bytes": budget, "peak_bytes": placement.memory(device).peak_bytes}
                for device, budget in placement.budgets
            ],
            "highest_use": round(max(self.uses.values(), default=0.0), 4),
            "hops": placement.num_hops,
            "seconds_per_token": None
            if self.speed is None or not self.speed.seconds_per_token
            else float(f"{self.speed.seconds_per_token:.3g}"),
        }


def compare_table(candidates: Sequence[Candidate], names: Mapping[Device, str]) -> Table:
    """A row for each strategy: GiB per device, highest use, hops, and tokens per second."""
    placements = [candidate.answer for candidate in candidates if isinstance(candidate.answer, Placement)]
    budgets = placements[0].budgets if placements else None
    devices = [
        device
        for device in (budgets.devices if budgets else ())
        if device.is_accelerator or any(device in placement.devices for placement in placements)
    ]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("strategy", no_wrap=True)
    shown = devices if len(devices) <= _MAX_COLUMNS else []
    for device in shown:
        table.add_column(f"{device.label} {names.get(device, '')}".rstrip(), justify="right", min_width=9)
    if devices and not shown:
        table.add_column("least to most per device", justify="right", no_wrap=True)
    for column in ("highest use", "hops", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for candidate in candidates:
        table.add_row(candidate.strategy, *_cells(candidate, devices, shown))
    return table


def _cells(candidate: Candidate, devices: Sequence[Device], shown: Sequence[Device]) -> list[str]:
    answer = candidate.answer
    if isinstance(answer, Infeasible):
        where = "" if answer.device is None else f" on {answer.device.label}"
        return [*["–"] * len(shown), f"does not fit{where}, missing {format_bytes(answer.missing_bytes)}"]
    peaks = [answer.memory(device).peak_bytes for device in devices]
    sizes = [format_bytes(peak) for peak in peaks]
    if not shown:
        sizes = [f"{format_bytes(min(peaks))} – {format_bytes(max(peaks))}"] if peaks else []
    use = max(candidate.uses.values(), default=0.0)
    seconds = 0.0 if candidate.speed is None else candidate.speed.seconds_per_token
    speed = f"{1 / seconds:.3g}" if seconds else ""
    return [*sizes, f"{100 * use:.1f} %", str(answer.num_hops), speed]
