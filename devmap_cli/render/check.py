"""The report of `devmap check`: findings, equal ones of numbered modules in one line, and the predicted peaks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from devmap_cli.checking.check import CheckReport, Repair
from devmap_cli.checking.findings import Finding
from devmap_cli.checking.forecast import DeviceForecast, Forecast, PhasePeak
from devmap_cli.checking.repair import Change
from devmap_cli.mapfile import MapWorkload
from devmap_cli.model.kv_dtypes import AUTO
from devmap_cli.render.plan import holdings
from devmap_cli.render.tree import name_ranges
from devmap_cli.units import format_bytes

_NUMBER = re.compile(r"(?<=[A-Za-z_]\.)\d+(?!\w)")
"""The place of a module in a list: `3` in `model.layers.3.mlp`."""
_SLOT = "\0"
_COLOURS = {"error": "bold red", "warning": "bold yellow"}
_NOTHING = "–"
_WIDE = 1000


def full_report(
    report: CheckReport, repair: Repair | None, target: str | None, workload: MapWorkload
) -> RenderableType:
    """What is wrong with a map; with `repair`, also what was changed, and what is wrong with the repaired one.

    Args:
        target: where the repaired map was written, or None.
    """
    if repair is None:
        return check_report(report, workload)
    if not repair.changes:
        return Group(check_report(report, workload), Text("there is nothing that --fix could mend"))
    title = f"repaired map{f' {target}' if target else ''}:"
    return Group(
        findings_list(report.findings),
        Text(),
        *map(Text, change_lines(repair.changes)),
        Text(),
        Text(title, style="bold"),
        check_report(repair.report, workload),
    )


def check_report(report: CheckReport, workload: MapWorkload) -> RenderableType:
    """Findings, then the table of peaks and what it stands on."""
    parts: list[RenderableType] = [findings_list(report.findings)]
    if report.forecast.devices:
        parts += [Text(), _Peaks(report.forecast.devices)]
    parts += [Text(note, style="dim") for note in notes(report, workload)]
    return Group(*parts)


def findings_list(findings: Sequence[Finding]) -> RenderableType:
    """Three lines for each group of findings: what is wrong, what will happen, and the fix."""
    if not findings:
        return Text("no findings", style="green")
    lines: list[RenderableType] = []
    for finding in grouped(findings):
        lines.append(
            Text.assemble((finding.severity, _COLOURS[finding.severity]), f"  {finding.code}  ", finding.message)
        )
        details = [text for text in (finding.consequence, f"fix: {finding.fix}") if text]
        lines += [Text(f"    {detail}", style="dim") for detail in details]
    return Group(*lines)


def grouped(findings: Sequence[Finding]) -> Iterator[Finding]:
    """`findings`, those of equal text but for one number as one for `layers.0-27`, in the order of the first."""
    numbers: dict[Finding, list[str]] = {}
    for finding in findings:
        number = _NUMBER.search(finding.module)
        pattern = _without_number(finding, number[0]) if number else finding
        numbers.setdefault(pattern, []).extend([number[0]] if number else [])
    for pattern, found in numbers.items():
        told = _with_number(pattern, _ranges(found))
        each = " each" if len(found) > 1 and told.message.endswith(")") else ""
        yield replace(told, message=told.message + each)


def _without_number(finding: Finding, number: str) -> Finding:
    place = re.compile(rf"(?<=[A-Za-z_]\.){number}(?!\w)")
    return _changed(finding, lambda text: place.sub(_SLOT, text))


def _with_number(finding: Finding, number: str) -> Finding:
    return _changed(finding, lambda text: text.replace(_SLOT, number))


def _changed(finding: Finding, change: Callable[[str], str]) -> Finding:
    return Finding(
        finding.code,
        finding.severity,
        change(finding.module),
        change(finding.message),
        change(finding.fix),
        change(finding.consequence),
    )


def _ranges(numbers: Sequence[str]) -> str:
    return name_ranges(tuple(sorted(set(numbers), key=int))) if numbers else ""


def peak_table(devices: Sequence[DeviceForecast]) -> Table:
    """A row per device and phase, whose parts add up to its peak.

    The highest of a device stands beside its budget, which is that peak, the runtime's share and what is free.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("device", no_wrap=True)
    table.add_column("phase", no_wrap=True)
    for name in ("weights", "KV cache", "activations", "overhead", "predicted", "runtime", "budget", "free"):
        table.add_column(name, justify="right", no_wrap=True, min_width=9)
    for device in devices:
        for position, phase in enumerate(device.phases):
            table.add_row(device.device.label if position == 0 else "", *_cells(device, phase))
    return table


@dataclass(frozen=True)
class _Peaks:
    """The table of peaks; on a terminal too narrow for it, a line for each of its rows, which wraps."""

    devices: Sequence[DeviceForecast]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = peak_table(self.devices)
        if console.measure(table, options=options.update(max_width=_WIDE)).maximum <= options.max_width:
            yield table
        else:
            yield from map(Text, peak_lines(self.devices))


def peak_lines(devices: Sequence[DeviceForecast]) -> Iterator[str]:
    """The rows of `peak_table` in words, without parts of which there is nothing."""
    names = ("weights", "KV cache", "activations", "overhead")
    for device in devices:
        for phase in device.phases:
            parts = (phase.weights_bytes, phase.kv_cache_bytes, phase.activation_bytes, phase.overhead_bytes)
            told = " + ".join(f"{format_bytes(size)} {name}" for name, size in zip(names, parts, strict=True) if size)
            line = f"{device.device.label}, {phase.phase}: {format_bytes(phase.peak_bytes)} predicted"
            yield f"{line} = {told}" if told else line
        if device.budget_bytes is not None and device.free_bytes is not None:
            free = format_bytes(device.free_bytes)
            share = device.runtime_overhead_bytes
            runtime = f", runtime {format_bytes(share)}" if share else ""
            yield f"{device.device.label}: budget {format_bytes(device.budget_bytes)}{runtime}, free {free}"


def _cells(device: DeviceForecast, phase: PhasePeak) -> tuple[str, ...]:
    sizes = (phase.weights_bytes, phase.kv_cache_bytes, phase.activation_bytes, phase.overhead_bytes, phase.peak_bytes)
    is_highest = phase == device.highest
    return (
        phase.phase,
        *map(format_bytes, sizes),
        _size(device.runtime_overhead_bytes if is_highest and device.device.is_accelerator else None),
        _size(device.budget_bytes if is_highest else None),
        _size(device.free_bytes if is_highest else None),
    )


def _size(num_bytes: int | None) -> str:
    return _NOTHING if num_bytes is None else format_bytes(num_bytes)


def notes(report: CheckReport, workload: MapWorkload) -> list[str]:
    """What the prediction is for, what it leaves out, and what the rehearsal took for granted."""
    forecast = report.forecast
    if forecast.skipped is not None:
        return [f"not rehearsed, so only weights are known: {forecast.skipped}", *report.notes]
    images = "".join(f" + image {width}x{height}" for height, width in workload.images)
    videos = "".join(f" + video {width}x{height}x{frames}" for height, width, frames in workload.videos)
    kv_cache = "" if workload.kv_dtype == AUTO else f", KV cache in {workload.kv_dtype}"
    said = [
        f"predicted by a rehearsal of {workload.batch_size} × ({_tokens(forecast, workload)} tokens{images}{videos}), "
        f"attention {workload.attention}{kv_cache}",
        *_runtime_note(forecast.devices),
    ]
    if forecast.stopped_in is not None:
        said.append(f"the run ends in {forecast.stopped_in}")
    return [*said, *report.notes, *(f"assumed: {text}" for text in folded(forecast.assumptions))]


def _tokens(forecast: Forecast, workload: MapWorkload) -> str:
    """Tokens of the prompt and new ones; the latter not where the run ends well and decodes nothing."""
    phases = {phase.phase for device in forecast.devices for phase in device.phases}
    is_one_pass = "prefill" in phases and "decode" not in phases and forecast.stopped_in is None
    if is_one_pass and workload.max_new_tokens > 1:
        return f"{workload.prompt_tokens:,}"
    return f"{workload.prompt_tokens:,} + {workload.max_new_tokens:,}"


def folded(texts: Sequence[str]) -> list[str]:
    """`texts`, those of equal text but for the number of a module as one, in the order of the first."""
    numbers: dict[str, list[str]] = {}
    for text in texts:
        number = _NUMBER.search(text)
        pattern = text if number is None else text[: number.start()] + _SLOT + text[number.end() :]
        numbers.setdefault(pattern, []).extend([] if number is None else [number[0]])
    return [pattern.replace(_SLOT, _ranges(found)) for pattern, found in numbers.items()]


def _runtime_note(devices: Sequence[DeviceForecast]) -> list[str]:
    """What the column of the runtime stands on; no line where there is nothing in it."""
    if not any(item.runtime_overhead_bytes for item in devices):
        return []
    return ["runtime: a documented estimate for the driver and its libraries, on top of what is predicted"]


def change_lines(changes: Sequence[Change]) -> list[str]:
    """One line for each device and reason: `fixed  model.layers.0-9 → GPU 0: was …`."""
    alike: dict[tuple[str, str], list[str]] = {}
    for change in changes:
        place = "removed" if change.device is None else f"→ {change.device.label}"
        number = _NUMBER.search(change.module)
        reason = change.reason
        if number is not None:
            reason = re.sub(rf"(?<=[A-Za-z_]\.){number[0]}(?!\w)", _SLOT, reason)
        alike.setdefault((place, reason), []).append(change.module)
    lines = []
    for (place, reason), modules in alike.items():
        ranges = _ranges([number[0] for number in map(_NUMBER.search, modules) if number])
        lines.append(f"fixed  {holdings(modules)} {place}: {reason.replace(_SLOT, ranges)}")
    return lines
