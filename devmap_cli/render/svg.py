"""The picture of a report: a bar for each device, in SVG that needs nothing from elsewhere."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import TYPE_CHECKING

from devmap_cli.render.bars import BAR_LEFT, draw_bars, sentence
from devmap_cli.render.canvas import (
    CELL,
    MARGIN,
    STYLE,
    TEXT_SIZE,
    WIDTH,
    Canvas,
    cut,
    printable,
    px,
    text_width,
    wrapped,
)

if TYPE_CHECKING:
    from devmap_cli.render.report import Report

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
    canvas = Canvas()
    root = canvas.root
    ET.SubElement(root, "title", id="devmap-title").text = f"Memory plan of {printable(report.title)}"
    ET.SubElement(root, "desc", id="devmap-desc").text = printable(" ".join(map(sentence, report.devices)))
    ET.SubElement(root, "style").text = STYLE
    if any(device.over_bytes for device in report.devices):
        _define_hatch(root)
    page = ET.SubElement(root, "rect", {"class": "page"})
    if alone:
        _draw_heading(canvas, report)
    _draw_legend(canvas, report)
    draw_bars(canvas, report.devices)
    if alone:
        _draw_facts(canvas, report)
    height = px(canvas.y + MARGIN / 2)
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


def _define_hatch(root: ET.Element) -> None:
    """The pattern of what is over a budget."""
    place = {"id": "devmap-hatch", "width": "6", "height": "6", "patternUnits": "userSpaceOnUse"}
    pattern = ET.SubElement(ET.SubElement(root, "defs"), "pattern", place)
    ET.SubElement(pattern, "path", {"class": "hatch", "d": "M0 6L6 0", "stroke-width": "1.5"})


def _draw_heading(canvas: Canvas, report: Report) -> None:
    facts = dict(report.facts())
    count = len(report.devices)
    devices = f"{count} device{'s' if count != 1 else ''}"
    words = [facts.get("class", ""), facts.get("dtype", ""), facts.get("strategy", ""), devices]
    canvas.y += 14
    title = cut(report.title, (WIDTH - 2 * MARGIN) / 20)
    canvas.text(MARGIN, canvas.y, title, size=20, weight="600")
    canvas.y += 22
    line = cut(" · ".join(filter(None, words)), (WIDTH - 2 * MARGIN) / 13)
    canvas.text(MARGIN, canvas.y, line, size=13, style="muted")
    canvas.y += 20


def _draw_legend(canvas: Canvas, report: Report) -> None:
    x = float(MARGIN)
    for style in _shown_in_legend(report):
        width = 26 + text_width(_LEGEND[style], TEXT_SIZE) + 18
        if x + width > WIDTH - MARGIN:
            x, canvas.y = float(MARGIN), canvas.y + 20
        canvas.rect(canvas.root, style, x, canvas.y, x + 18, 12)
        canvas.text(x + 25, canvas.y + 10.5, _LEGEND[style])
        x += width
    canvas.y += 30


def _draw_facts(canvas: Canvas, report: Report) -> None:
    ET.SubElement(canvas.root, "path", {"class": "grid", "d": f"M{MARGIN} {px(canvas.y)}H{WIDTH - MARGIN}"})
    canvas.y += 22
    before = ""
    for name, text in report.facts():
        if name != before:
            canvas.text(MARGIN, canvas.y, name, style="muted")
        before = name
        for line in wrapped(text, int((WIDTH - BAR_LEFT - MARGIN) / (TEXT_SIZE * CELL))):
            canvas.text(BAR_LEFT, canvas.y, line)
            canvas.y += 19


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
