"""The picture of a report: a bar for each device, in SVG that needs nothing from elsewhere."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len, chop_cells, set_cell_size

from devmap_cli.render.plan import holdings
from devmap_cli.render.report import PARTS
from devmap_cli.units import format_bytes

if TYPE_CHECKING:
    from devmap_cli.render.report import ModuleRun, Report, ReportDevice

WIDTH = 1000
_MARGIN = 24
_BAR_LEFT = 168
_BAR_WIDTH = 650
_CELL = 0.58
"""Width of a character in units of its font's size, rather too much than too little for a sans-serif."""
_LABEL_SIZE, _TEXT_SIZE = 11, 12
_MANY_DEVICES = 16
_OWN_SCALE = 2
"""From this much difference on, cpu and disk have a scale of their own."""
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_MOST_TICKS = 10
_LEAST_LETTERS = 6
_LONGEST_NAME = 72
_LEGEND = {
    "layers": "weights: layers",
    "module": "weights: other modules",
    "kv_cache": "KV cache",
    "activation": "activations",
    "overhead": "overhead",
    "free": "free",
    "budget": "budget",
    "over": "over budget",
}
# Okabe and Ito's palette, told apart with every kind of colour vision, on white and on black.
_STYLE = """
svg.devmap { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
svg.devmap .page { fill: #ffffff; }
svg.devmap text { fill: #1b1f23; }
svg.devmap .muted { fill: #57606a; }
svg.devmap .grid { stroke: #d8dee4; fill: none; }
svg.devmap .cut { stroke: #ffffff; fill: none; }
svg.devmap .layers { fill: #0072b2; }
svg.devmap .module { fill: #56b4e9; }
svg.devmap .kv_cache { fill: #e69f00; }
svg.devmap .activation { fill: #009e73; }
svg.devmap .overhead { fill: #cc79a7; }
svg.devmap .free { fill: #e8ecf0; }
svg.devmap .budget { fill: none; stroke: #1b1f23; }
svg.devmap .over { fill: url(#devmap-hatch); stroke: #b3261e; }
svg.devmap .hatch { stroke: #b3261e; }
svg.devmap .on-layers { fill: #ffffff; }
svg.devmap .on-part { fill: #10161c; }
svg.devmap .warning { fill: #b3261e; }
@media (prefers-color-scheme: dark) {
  svg.devmap .page { fill: #0f1419; }
  svg.devmap text { fill: #e6edf3; }
  svg.devmap .muted { fill: #9da7b1; }
  svg.devmap .grid { stroke: #2d353d; }
  svg.devmap .cut { stroke: #0f1419; }
  svg.devmap .free { fill: #1c232b; }
  svg.devmap .budget { stroke: #e6edf3; }
  svg.devmap .over { stroke: #ff8a80; }
  svg.devmap .hatch { stroke: #ff8a80; }
  svg.devmap .on-layers { fill: #ffffff; }
  svg.devmap .on-part { fill: #10161c; }
  svg.devmap .warning { fill: #ff8a80; }
}
"""


def svg_bytes(report: Report) -> bytes:
    """The picture as a file of its own, with the facts below the bars."""
    element = picture(report, alone=True)
    ET.indent(element)
    text = ET.tostring(element, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'.encode()


def picture(report: Report, *, alone: bool) -> ET.Element:
    """The picture as an element.

    Args:
        alone: with a heading and the facts, for where no page around it says them.
    """
    return _Drawing(report).draw(alone=alone)


def printable(text: str) -> str:
    """`text` without what no XML may hold: control characters and halves of characters."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


@dataclass(frozen=True, slots=True)
class _Panel:
    """Devices that share one scale, which ends at `extent_bytes`."""

    title: str
    devices: tuple[ReportDevice, ...]

    @property
    def extent_bytes(self) -> int:
        return max(1, *(device.extent_bytes for device in self.devices))

    def at(self, num_bytes: int) -> float:
        return _BAR_LEFT + _BAR_WIDTH * num_bytes / self.extent_bytes


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


class _Drawing:
    """One picture in the making; `y` is where the next thing goes."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.y = float(_MARGIN)
        self.is_compact = len(report.devices) > _MANY_DEVICES
        self.root = ET.Element("svg")

    def draw(self, *, alone: bool) -> ET.Element:
        root = self.root
        ET.SubElement(root, "title", id="devmap-title").text = f"Memory plan of {printable(self.report.title)}"
        ET.SubElement(root, "desc", id="devmap-desc").text = printable(" ".join(map(_sentence, self.report.devices)))
        ET.SubElement(root, "style").text = _STYLE
        self._hatch()
        page = ET.SubElement(root, "rect", {"class": "page"})
        if alone:
            self._heading()
        self._legend()
        for panel in _panels(self.report.devices):
            self._panel(panel)
        if alone:
            self._facts()
        height = _px(self.y + _MARGIN / 2)
        page.attrib |= {"width": str(WIDTH), "height": height}
        root.attrib |= {
            "xmlns": "http://www.w3.org/2000/svg",
            "class": "devmap",
            "viewBox": f"0 0 {WIDTH} {height}",
            "width": str(WIDTH),
            "height": height,
            "role": "img",
            "aria-labelledby": "devmap-title devmap-desc",
        }
        return root

    def _hatch(self) -> None:
        if any(device.over_bytes for device in self.report.devices):
            definitions = ET.SubElement(self.root, "defs")
            place = {"id": "devmap-hatch", "width": "6", "height": "6", "patternUnits": "userSpaceOnUse"}
            pattern = ET.SubElement(definitions, "pattern", place)
            ET.SubElement(pattern, "path", {"class": "hatch", "d": "M0 6L6 0", "stroke-width": "1.5"})

    def _heading(self) -> None:
        facts = dict(self.report.facts())
        count = len(self.report.devices)
        devices = f"{count} device{'s' if count != 1 else ''}"
        words = [facts.get("class", ""), facts.get("dtype", ""), facts.get("strategy", ""), devices]
        self.y += 14
        title = _cut(self.report.title, (WIDTH - 2 * _MARGIN) / 20)
        self._text(_MARGIN, self.y, title, size=20, weight="600")
        self.y += 22
        line = _cut(" · ".join(filter(None, words)), (WIDTH - 2 * _MARGIN) / 13)
        self._text(_MARGIN, self.y, line, size=13, style="muted")
        self.y += 20

    def _legend(self) -> None:
        x = float(_MARGIN)
        for style in _shown_in_legend(self.report):
            width = 26 + _width(_LEGEND[style], _TEXT_SIZE) + 18
            if x + width > WIDTH - _MARGIN:
                x, self.y = float(_MARGIN), self.y + 20
            self._rect(self.root, style, x, self.y, x + 18, 12)
            self._text(x + 25, self.y + 10.5, _LEGEND[style])
            x += width
        self.y += 30

    def _panel(self, panel: _Panel) -> None:
        height = 20 if self.is_compact else 30
        pitch = height + (6 if self.is_compact else 32)
        axis = self.y + 16
        tops = [axis + 10 + pitch * number for number in range(len(panel.devices))]
        self._axis(panel, axis)
        self._marks(panel, [top - 3 for top in tops], height + 6)
        self.y = axis + 10
        for device in panel.devices:
            self._device(panel, device, height)
            self.y += pitch
        self.y += 10

    def _axis(self, panel: _Panel, axis: float) -> None:
        """The scale above a panel."""
        unit, ticks = _ticks(panel.extent_bytes)
        if panel.title:
            self._text(_MARGIN, axis - 4, panel.title, size=_LABEL_SIZE, style="muted")
        self._text(_BAR_LEFT - 10, axis - 4, unit, size=_LABEL_SIZE, style="muted", anchor="end")
        for label, num_bytes in ticks:
            x = panel.at(num_bytes)
            self._text(x, axis - 4, label, size=_LABEL_SIZE, style="muted", anchor="middle")
            ET.SubElement(self.root, "path", {"class": "grid", "d": f"M{_px(x)} {_px(axis)}v5"})

    def _marks(self, panel: _Panel, tops: Sequence[float], height: float) -> None:
        """The marks of the scale at each bar, as far as the bar goes: none runs through a text."""
        path = "".join(
            f"M{_px(panel.at(num_bytes))} {_px(top)}v{_px(height)}"
            for device, top in zip(panel.devices, tops, strict=True)
            for _, num_bytes in _ticks(panel.extent_bytes)[1]
            if num_bytes <= device.extent_bytes
        )
        ET.SubElement(self.root, "path", {"class": "grid", "d": path})

    def _device(self, panel: _Panel, device: ReportDevice, height: float) -> None:
        group = ET.SubElement(self.root, "g", {"data-device": str(device.memory.device)})
        ET.SubElement(group, "title").text = printable(_sentence(device))
        self._names(group, device, height)
        start = device.memory.weights_bytes
        self._weights(group, panel, device, height)
        for part, num_bytes in device.parts.items():
            if part == "weights" or not num_bytes:
                continue
            x, end = panel.at(start), panel.at(start + num_bytes)
            rect = self._rect(group, part, x, self.y, end, height, num_bytes)
            ET.SubElement(rect, "title").text = f"{PARTS[part]}: {format_bytes(num_bytes)} ({num_bytes:,} bytes)"
            labels = (f"{format_bytes(num_bytes)} free", "free") if part == "free" else (PARTS[part],)
            self._label(group, labels, x, end, height, "muted" if part == "free" else "on-part")
            start += num_bytes
        if device.memory.budget_bytes:
            end = panel.at(device.memory.budget_bytes)
            self._rect(group, "budget", _BAR_LEFT, self.y, end, height).set("pointer-events", "none")
        if device.over_bytes:
            x, end = panel.at(device.memory.budget_bytes), panel.at(device.memory.peak_bytes)
            self._rect(group, "over", x, self.y, end, height).set("pointer-events", "none")
        self._figures(group, device, panel.at(device.extent_bytes) + 10, height)
        if not self.is_compact:
            room = (WIDTH - _BAR_LEFT - _MARGIN) / _LABEL_SIZE
            held = _cut(_held(device), room)
            self._text(_BAR_LEFT, self.y + height + 14, held, size=_LABEL_SIZE, style="muted", to=group)

    def _names(self, group: ET.Element, device: ReportDevice, height: float) -> None:
        middle = self.y + height / 2 + 4
        room = (_BAR_LEFT - _MARGIN - 10) / _LABEL_SIZE
        if self.is_compact:
            self._text(_MARGIN, middle, device.label, size=_LABEL_SIZE, weight="600", to=group)
            indent = 54
            card = _cut(device.card, room - indent / _LABEL_SIZE)
            self._text(_MARGIN + indent, middle, card, size=_LABEL_SIZE, style="muted", to=group)
            return
        self._text(_MARGIN, middle - (7 if device.card else 0), device.label, size=13, weight="600", to=group)
        if device.card:
            self._text(_MARGIN, middle + 8, _cut(device.card, room), size=_LABEL_SIZE, style="muted", to=group)

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
                rect = self._rect(group, f"weights {style}", x, self.y, end, height, stop - start)
                ET.SubElement(rect, "title").text = printable(module.text)
                edges.append(end)
                start = stop
            x, end = panel.at(first), panel.at(start)
            self._cuts(group, edges[:-1], height, min(0.8, 0.18 * (end - x) / len(edges)))
            self._cuts(group, edges[-1:], height, min(1.6, 0.3 * (end - x)))
            labels.append((_run_labels(run, end - x - 8), x, end, "on-layers" if run.is_numbered else "on-part"))
        if limit > start:
            rect = self._rect(group, "weights module", panel.at(start), self.y, panel.at(limit), height, limit - start)
            ET.SubElement(rect, "title").text = f"other weights: {format_bytes(limit - start)}"
        for texts, x, end, style in labels:
            self._label(group, texts, x, end, height, style)

    def _cuts(self, group: ET.Element, edges: Sequence[float], height: float, width: float) -> None:
        if edges and width >= 0.05:
            path = "".join(f"M{_px(x)} {_px(self.y)}v{_px(height)}" for x in edges)
            attributes = {"class": "cut", "d": path, "stroke-width": _px(width), "pointer-events": "none"}
            ET.SubElement(group, "path", attributes)

    def _label(self, group: ET.Element, texts: Sequence[str], x: float, end: float, height: float, style: str) -> None:
        """The first of `texts` that fits between `x` and `end`, in the middle; else none."""
        text = next((text for text in texts if _width(text, _LABEL_SIZE) + 8 <= end - x), None)
        if text is not None:
            middle, half = self.y + height / 2 + 4, _width(text, _LABEL_SIZE) / 2 + 2
            if style == "on-layers":  # the cuts would run through the letters
                left, right = (x + end) / 2 - half, (x + end) / 2 + half
                patch = self._rect(group, "layers", left, middle - 11, right, 15)
                patch.set("pointer-events", "none")
            label = self._text((x + end) / 2, middle, text, size=_LABEL_SIZE, style=style, anchor="middle", to=group)
            label.set("pointer-events", "none")

    def _figures(self, group: ET.Element, device: ReportDevice, x: float, height: float) -> None:
        memory = device.memory
        peak = _of(memory.peak_bytes, memory.budget_bytes)
        style = "warning" if device.over_bytes else ""
        if self.is_compact:
            text = f"{peak}, {device.use}" if device.use else peak
            self._text(x, self.y + height / 2 + 4, text, size=_LABEL_SIZE, style=style, to=group)
            return
        self._text(x, self.y + 12, peak, weight="600", style=style, to=group)
        if device.over_bytes:
            rest = f"{device.use}, {format_bytes(device.over_bytes)} too much"
        else:
            rest = f"{device.use}, {format_bytes(memory.free_bytes)} free" if device.use else "no budget"
        self._text(x, self.y + 27, rest, size=_LABEL_SIZE, style=style or "muted", to=group)

    def _facts(self) -> None:
        ET.SubElement(self.root, "path", {"class": "grid", "d": f"M{_MARGIN} {_px(self.y)}H{WIDTH - _MARGIN}"})
        self.y += 22
        before = ""
        for name, text in self.report.facts():
            if name != before:
                self._text(_MARGIN, self.y, name, style="muted")
            before = name
            for line in _wrapped(text, int((WIDTH - _BAR_LEFT - _MARGIN) / (_TEXT_SIZE * _CELL))):
                self._text(_BAR_LEFT, self.y, line)
                self.y += 19

    def _rect(
        self,
        parent: ET.Element,
        style: str,
        x: float,
        y: float,
        end: float,
        height: float,
        num_bytes: int | None = None,
    ) -> ET.Element:
        attributes = {"class": style, "x": _px(x), "y": _px(y), "width": _px(end - x), "height": _px(height)}
        if num_bytes is not None:
            attributes["data-bytes"] = str(num_bytes)
        return ET.SubElement(parent, "rect", attributes)

    def _text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = _TEXT_SIZE,
        style: str = "",
        weight: str = "",
        anchor: str = "",
        to: ET.Element | None = None,
    ) -> ET.Element:
        named = {"class": style, "font-weight": weight, "text-anchor": anchor}
        attributes = {"x": _px(x), "y": _px(y), "font-size": str(size)}
        attributes |= {name: value for name, value in named.items() if value}
        element = ET.SubElement(self.root if to is None else to, "text", attributes)
        element.text = printable(text)
        return element


def _shown_in_legend(report: Report) -> Iterator[str]:
    """The styles that the bars use."""
    devices = report.devices
    kinds = {run.is_numbered for device in devices for run in device.runs if run.num_bytes}
    for style in _LEGEND:
        if style in ("layers", "module"):
            shown = (style == "layers") in kinds
        elif style == "budget":
            shown = any(device.memory.budget_bytes for device in devices)
        elif style == "over":
            shown = any(device.over_bytes for device in devices)
        else:
            shown = any(device.parts[style] for device in devices)
        if shown:
            yield style


def _sentence(device: ReportDevice) -> str:
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
    return [name, _cut(name, room / _LABEL_SIZE)] if room >= _LEAST_LETTERS * _LABEL_SIZE * _CELL else [name]


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


def _px(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


def _width(text: str, size: int) -> float:
    return cell_len(text) * size * _CELL


def _cut(text: str, room: float) -> str:
    """`text` cut to `room`, in units of its font's size."""
    text, cells = printable(text), int(room / _CELL)
    return text if cell_len(text) <= cells else set_cell_size(text, cells - 1).rstrip() + "…"


def _wrapped(text: str, cells: int) -> list[str]:
    """Lines of at most `cells`, broken between words, and inside a word only where it is longer than a line."""
    lines = [""]
    for word in printable(text).split(" "):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(joined) <= cells:
            lines[-1] = joined
            continue
        pieces = chop_cells(word, cells)
        lines[-1:] = [lines[-1], *pieces] if lines[-1] else pieces
    return lines
