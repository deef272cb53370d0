"""The bars of a picture: what each device takes, as wide as it is large, under the scale of its panel."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from devmap_cli.render.canvas import CELL, LABEL_SIZE, MARGIN, WIDTH, Canvas, cut, printable, px, text_width
from devmap_cli.render.plan import holdings
from devmap_cli.render.report_device import PARTS
from devmap_cli.units import format_bytes

if TYPE_CHECKING:
    from devmap_cli.render.report_device import ModuleRun, ReportDevice

BAR_LEFT = 168
_BAR_WIDTH = 650
_MANY_DEVICES = 16
_OWN_SCALE = 2
"""From this much difference on, cpu and disk have a scale of their own."""
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_MOST_TICKS = 10
_LEAST_LETTERS = 6
_LONGEST_NAME = 72


def draw_bars(canvas: Canvas, devices: Sequence[ReportDevice]) -> None:
    """A bar for each device, in panels of one scale."""
    bars = _Bars(canvas, is_compact=len(devices) > _MANY_DEVICES)
    for panel in _panels(devices):
        bars.draw(panel)


@dataclass(frozen=True, slots=True)
class _Panel:
    """Devices that share one scale, which ends at `extent_bytes`."""

    title: str
    devices: tuple[ReportDevice, ...]

    @property
    def extent_bytes(self) -> int:
        return max(1, *(device.extent_bytes for device in self.devices))

    def at(self, num_bytes: int) -> float:
        return BAR_LEFT + _BAR_WIDTH * num_bytes / self.extent_bytes


def _panels(devices: Sequence[ReportDevice]) -> list[_Panel]:
    """Accelerators on one scale; cpu and disk on it too unless they dwarf what is there before them."""
    groups: list[list[ReportDevice]] = []
    accelerators = [device for device in devices if device.memory.device.is_accelerator]
    if accelerators:
        groups.append(accelerators)
    for device in devices:
        if device.memory.device.is_accelerator:
            continue
        extent = max((other.extent_bytes for other in groups[-1]), default=0) if groups else 0
        if groups and device.extent_bytes <= _OWN_SCALE * extent:
            groups[-1].append(device)
        else:
            groups.append([device])
    return [_Panel("own scale" if number else "", tuple(group)) for number, group in enumerate(groups)]


class _Bars:
    """Draws the bars of devices where the canvas goes on; many are drawn closer together."""

    def __init__(self, canvas: Canvas, *, is_compact: bool) -> None:
        self._canvas = canvas
        self._is_compact = is_compact

    def draw(self, panel: _Panel) -> None:
        """The devices of a panel, one below the other."""
        height = 20 if self._is_compact else 30
        pitch = height + (6 if self._is_compact else 32)
        axis = self._canvas.y + 16
        tops = [axis + 10 + pitch * number for number in range(len(panel.devices))]
        self._axis(panel, axis)
        self._marks(panel, [top - 3 for top in tops], height + 6)
        self._canvas.y = axis + 10
        for device in panel.devices:
            self._device(panel, device, height)
            self._canvas.y += pitch
        self._canvas.y += 10

    def _axis(self, panel: _Panel, axis: float) -> None:
        """The scale above a panel."""
        unit, ticks = _ticks(panel.extent_bytes)
        if panel.title:
            self._canvas.text(MARGIN, axis - 4, panel.title, size=LABEL_SIZE, style="muted")
        self._canvas.text(BAR_LEFT - 10, axis - 4, unit, size=LABEL_SIZE, style="muted", anchor="end")
        for label, num_bytes in ticks:
            x = panel.at(num_bytes)
            self._canvas.text(x, axis - 4, label, size=LABEL_SIZE, style="muted", anchor="middle")
            ET.SubElement(self._canvas.root, "path", {"class": "grid", "d": f"M{px(x)} {px(axis)}v5"})

    def _marks(self, panel: _Panel, tops: Sequence[float], height: float) -> None:
        """The marks of the scale at each bar, as far as the bar goes: none runs through a text."""
        path = "".join(
            f"M{px(panel.at(num_bytes))} {px(top)}v{px(height)}"
            for device, top in zip(panel.devices, tops, strict=True)
            for _, num_bytes in _ticks(panel.extent_bytes)[1]
            if num_bytes <= device.extent_bytes
        )
        ET.SubElement(self._canvas.root, "path", {"class": "grid", "d": path})

    def _device(self, panel: _Panel, device: ReportDevice, height: float) -> None:
        group = ET.SubElement(self._canvas.root, "g", {"data-device": str(device.memory.device)})
        ET.SubElement(group, "title").text = printable(sentence(device))
        self._names(group, device, height)
        start = device.memory.weights_bytes
        self._weights(group, panel, device, height)
        for part, num_bytes in device.parts.items():
            if part == "weights" or not num_bytes:
                continue
            x, end = panel.at(start), panel.at(start + num_bytes)
            rect = self._canvas.rect(group, part, x, self._canvas.y, end, height, num_bytes)
            ET.SubElement(rect, "title").text = f"{PARTS[part]}: {format_bytes(num_bytes)} ({num_bytes:,} bytes)"
            labels = (f"{format_bytes(num_bytes)} free", "free") if part == "free" else (PARTS[part],)
            self._label(group, labels, x, end, height, "muted" if part == "free" else "on-part")
            start += num_bytes
        if device.memory.budget_bytes:
            end = panel.at(device.memory.budget_bytes)
            self._canvas.rect(group, "budget", BAR_LEFT, self._canvas.y, end, height).set("pointer-events", "none")
        if device.over_bytes:
            x, end = panel.at(device.memory.budget_bytes), panel.at(device.memory.peak_bytes)
            self._canvas.rect(group, "over", x, self._canvas.y, end, height).set("pointer-events", "none")
        self._figures(group, device, panel.at(device.extent_bytes) + 10, height)
        if not self._is_compact:
            room = (WIDTH - BAR_LEFT - MARGIN) / LABEL_SIZE
            held = cut(_held(device), room)
            self._canvas.text(BAR_LEFT, self._canvas.y + height + 14, held, size=LABEL_SIZE, style="muted", to=group)

    def _names(self, group: ET.Element, device: ReportDevice, height: float) -> None:
        middle = self._canvas.y + height / 2 + 4
        room = (BAR_LEFT - MARGIN - 10) / LABEL_SIZE
        if self._is_compact:
            self._canvas.text(MARGIN, middle, device.label, size=LABEL_SIZE, weight="600", to=group)
            indent = 54
            card = cut(device.card, room - indent / LABEL_SIZE)
            self._canvas.text(MARGIN + indent, middle, card, size=LABEL_SIZE, style="muted", to=group)
            return
        self._canvas.text(MARGIN, middle - (7 if device.card else 0), device.label, size=13, weight="600", to=group)
        if device.card:
            self._canvas.text(MARGIN, middle + 8, cut(device.card, room), size=LABEL_SIZE, style="muted", to=group)

    def _weights(self, group: ET.Element, panel: _Panel, device: ReportDevice, height: float) -> None:
        """The modules of a device one after another, with cuts between them, and what else its weights are."""
        start, limit = 0, device.memory.weights_bytes
        labels = []
        for run in device.runs:
            style = "layers" if run.is_numbered else "module"
            first = start
            edges = []
            for module in run.modules:
                stop = min(limit, start + module.num_bytes)  # a map by hand may state less than its modules hold
                x, end = panel.at(start), panel.at(stop)
                rect = self._canvas.rect(group, f"weights {style}", x, self._canvas.y, end, height, stop - start)
                ET.SubElement(rect, "title").text = printable(module.text)
                edges.append(end)
                start = stop
            x, end = panel.at(first), panel.at(start)
            self._cuts(group, edges[:-1], height, min(0.8, 0.18 * (end - x) / len(edges)))
            self._cuts(group, edges[-1:], height, min(1.6, 0.3 * (end - x)))
            labels.append((_run_labels(run, end - x - 8), x, end, "on-layers" if run.is_numbered else "on-part"))
        if limit > start:
            rect = self._canvas.rect(
                group, "weights module", panel.at(start), self._canvas.y, panel.at(limit), height, limit - start
            )
            ET.SubElement(rect, "title").text = f"other weights: {format_bytes(limit - start)}"
        for texts, x, end, style in labels:
            self._label(group, texts, x, end, height, style)

    def _cuts(self, group: ET.Element, edges: Sequence[float], height: float, width: float) -> None:
        if edges and width >= 0.05:
            path = "".join(f"M{px(x)} {px(self._canvas.y)}v{px(height)}" for x in edges)
            attributes = {"class": "cut", "d": path, "stroke-width": px(width), "pointer-events": "none"}
            ET.SubElement(group, "path", attributes)

    def _label(self, group: ET.Element, texts: Sequence[str], x: float, end: float, height: float, style: str) -> None:
        """The first of `texts` that fits between `x` and `end`, in the middle; else none."""
        text = next((text for text in texts if text_width(text, LABEL_SIZE) + 8 <= end - x), None)
        if text is not None:
            middle, half = self._canvas.y + height / 2 + 4, text_width(text, LABEL_SIZE) / 2 + 2
            if style == "on-layers":  # the cuts would run through the letters
                left, right = (x + end) / 2 - half, (x + end) / 2 + half
                patch = self._canvas.rect(group, "layers", left, middle - 11, right, 15)
                patch.set("pointer-events", "none")
            label = self._canvas.text(
                (x + end) / 2, middle, text, size=LABEL_SIZE, style=style, anchor="middle", to=group
            )
            label.set("pointer-events", "none")

    def _figures(self, group: ET.Element, device: ReportDevice, x: float, height: float) -> None:
        memory = device.memory
        peak = _of(memory.peak_bytes, memory.budget_bytes)
        style = "warning" if device.over_bytes else ""
        if self._is_compact:
            text = f"{peak}, {device.use}" if device.use else peak
            self._canvas.text(x, self._canvas.y + height / 2 + 4, text, size=LABEL_SIZE, style=style, to=group)
            return
        self._canvas.text(x, self._canvas.y + 12, peak, weight="600", style=style, to=group)
        if device.over_bytes:
            rest = f"{device.use}, {format_bytes(device.over_bytes)} too much"
        else:
            rest = f"{device.use}, {format_bytes(memory.free_bytes)} free" if device.use else "no budget"
        self._canvas.text(x, self._canvas.y + 27, rest, size=LABEL_SIZE, style=style or "muted", to=group)


def sentence(device: ReportDevice) -> str:
    """One device in words: for a tooltip, and for who cannot see the bar."""
    memory = device.memory
    name = f"{device.label} ({device.card})" if device.card else device.label
    parts = ", ".join(f"{PARTS[part]} {format_bytes(size)}" for part, size in device.parts.items() if size)
    over = f", {format_bytes(device.over_bytes)} over its budget" if device.over_bytes else ""
    held = holdings([module.name for module in device.modules]) or "nothing"
    return f"{name}: peak {_of(memory.peak_bytes, memory.budget_bytes)}{over} ({parts or 'empty'}); holds {held}."


def _held(device: ReportDevice) -> str:
    """What a device holds, the middle left out of very long names."""
    names = holdings([module.name for module in device.modules]).split(", ")
    half = _LONGEST_NAME // 2
    short = [name if len(name) <= _LONGEST_NAME else f"{name[:half]}…{name[1 - half :]}" for name in names]
    return ", ".join(short) or "holds nothing"


def _of(peak_bytes: int, budget_bytes: int) -> str:
    """`7.98 of 9.31 GiB`, or the peak alone without a budget."""
    peak, budget = format_bytes(peak_bytes), format_bytes(budget_bytes)
    if not budget_bytes:
        return peak
    same = peak.rpartition(" ")[2] == budget.rpartition(" ")[2]
    return f"{peak.rpartition(' ')[0] if same else peak} of {budget}"


def _run_labels(run: ModuleRun, room: float) -> list[str]:
    """What a run may be called in a room of so many pixels, longest first: `layers.0-13`, `0-13`; `embed_…`."""
    name = run.short_name
    if run.is_numbered:
        return [name, name.rpartition(".")[2]]
    return [name, cut(name, room / LABEL_SIZE)] if room >= _LEAST_LETTERS * LABEL_SIZE * CELL else [name]


def _ticks(extent_bytes: int) -> tuple[str, list[tuple[str, int]]]:
    """The unit of an axis, and its marks: label and bytes, in steps of 1, 2 or 5 times a power of ten."""
    unit, scale = next((name, size) for name, size in _UNITS if extent_bytes >= size)
    exponent = -3
    while True:
        for digit in (1, 2, 5):
            step = digit * 10.0**exponent
            if extent_bytes / scale <= _MOST_TICKS * step:
                count = int(extent_bytes / scale / step)
                decimals = max(0, -exponent)
                return unit, [(f"{mark * step:,.{decimals}f}", round(mark * step * scale)) for mark in range(count + 1)]
        exponent += 1
