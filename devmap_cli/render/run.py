"""The report of `devmap run`: memory per device, planned beside measured, and times."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from devmap_cli.running.report import DeviceReport, RunReport
from devmap_cli.units import format_bytes, format_seconds

_NOTHING = "–"
_COLUMNS = ("Device", "Budget", "Planned", "Weights", "Peak allocated", "Peak reserved", "Free")


def run_report(report: RunReport) -> RenderableType:
    """A row per device, and the times below; what is planned and what is measured is said under the table."""
    return Group(memory_table(report), Text(_legend(report), style="dim"), Text(), speed_lines(report))


def memory_table(report: RunReport) -> Table:
    """Budget and Planned as in the map, the rest as measured."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "Device" else "right", no_wrap=True)
    for item in report.devices:
        table.add_row(*_cells(item))
    return table


def speed_lines(report: RunReport) -> Table:
    """Load time, time to first token and tokens per second."""
    generation = report.generation
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_row("Load time", format_seconds(report.load_seconds))
    first = f"{format_seconds(generation.seconds_to_first_token)} for {generation.num_prompt_tokens:,} prompt tokens"
    table.add_row("Time to first token", first)
    table.add_row("Tokens/s", _speed(report))
    table.add_row("New tokens", f"{generation.num_new_tokens:,}, {generation.stop_reason}")
    return table


def _cells(item: DeviceReport) -> tuple[str, ...]:
    planned, memory = item.planned, item.memory
    return (
        item.device.label,
        _size(None if planned is None else planned.budget_bytes),
        _size(None if planned is None else planned.peak_bytes),
        _size(item.weights_bytes),
        _size(memory.peak_allocated_bytes),
        _size(memory.peak_reserved_bytes),
        _size(memory.free_bytes),
    )


def _size(num_bytes: int | None) -> str:
    return _NOTHING if num_bytes is None else format_bytes(num_bytes)


def _legend(report: RunReport) -> str:
    """What the figures count, once for each kind of device."""
    devices_by_basis: dict[str, list[str]] = {}
    for item in report.devices:
        devices_by_basis.setdefault(item.basis, []).append(item.device.label)
    counts = "; ".join(f"{', '.join(devices)}: {basis}" for basis, devices in devices_by_basis.items())
    return f"Budget and Planned are the map's, the rest is measured ({counts})"


def _speed(report: RunReport) -> str:
    speed = report.generation.decode_tokens_per_second
    if speed is None:
        return f"{_NOTHING} (a second token is needed to measure it)"
    return f"{speed:.1f}" + (f" over {report.batch_size} sequences" if report.batch_size > 1 else "")
