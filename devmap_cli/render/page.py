"""The page of a report: the picture, its figures as tables, and the modules of each device, in one HTML file."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

from devmap_cli.render.canvas import printable
from devmap_cli.render.report_device import PARTS
from devmap_cli.render.svg import picture
from devmap_cli.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from devmap_cli.render.report import Report
    from devmap_cli.render.report_device import ReportDevice

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_MOST_OPEN = 8
_COLUMNS = ("budget", *(name for part, name in PARTS.items() if part != "free"), "peak", "free")
_LEFT = ("card", "to")
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; color: #1b1f23;
  background: #ffffff; max-width: 1000px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 24px; margin: 0 0 12px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 32px 0 8px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 20px; margin: 0 0 20px; }
dt { color: #57606a; }
dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 0 -16px; overflow-x: auto; }
figure svg { width: 100%; min-width: 720px; height: auto; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 14px 4px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid #d8dee4; }
th { color: #57606a; font-weight: 600; }
th:first-child, td:first-child, .name, .short { text-align: left; }
td.name { white-space: normal; overflow-wrap: anywhere; }
tfoot td { font-weight: 600; border-bottom: none; }
.warning { color: #b3261e; font-weight: 600; }
details { margin: 6px 0; }
summary { cursor: pointer; font-weight: 600; }
details table { margin: 4px 0 12px 18px; font-size: 0.93em; }
@media print { body { font-size: 10px; padding: 0; } }
@media (prefers-color-scheme: dark) {
  body { color: #e6edf3; background: #0f1419; }
  dt, th { color: #9da7b1; }
  th, td { border-color: #2d353d; }
  .warning { color: #ff8a80; }
}
"""


def page_bytes(report: Report) -> bytes:
    """The page as a file: no scripts, no fonts, nothing from elsewhere."""
    html = ET.Element("html", lang="en")
    head = ET.SubElement(html, "head")
    ET.SubElement(head, "meta", charset="utf-8")
    ET.SubElement(head, "meta", {"http-equiv": "Content-Security-Policy", "content": _POLICY})
    ET.SubElement(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    _add(head, "title", f"{report.title}: memory plan")
    ET.SubElement(head, "style").text = _STYLE
    body = ET.SubElement(html, "body")
    _add(body, "h1", report.title)
    facts = ET.SubElement(body, "dl")
    for name, text in report.facts():
        _add(facts, "dt", name)
        _add(facts, "dd", text)
    ET.SubElement(body, "figure").append(picture(report, alone=False))
    _figures(body, report)
    _transfers(body, report)
    _modules(body, report)
    ET.indent(html)
    text = ET.tostring(html, encoding="unicode", method="html")
    return f"<!DOCTYPE html>\n{text}\n".encode()


def _figures(body: ET.Element, report: Report) -> None:
    _add(body, "h2", "Memory of each device")
    has_cards = any(device.card for device in report.devices)
    table = _table(body, ["device", *(["card"] if has_cards else []), *_COLUMNS, "use"])
    rows = ET.SubElement(table, "tbody")
    for device in report.devices:
        row = ET.SubElement(rows, "tr")
        _add(row, "td", device.label)
        if has_cards:
            _add(row, "td", device.card, "short")
        for num_bytes in _sizes(device):
            _add_bytes(row, num_bytes)
        _add(row, "td", device.use, "warning" if device.over_bytes else "")
    if len(report.devices) > 1:
        total = ET.SubElement(ET.SubElement(table, "tfoot"), "tr")
        _add(total, "td", "together")
        if has_cards:
            _add(total, "td", "")
        for column in zip(*map(_sizes, report.devices), strict=True):
            _add_bytes(total, sum(column))
        _add(total, "td", "")


def _sizes(device: ReportDevice) -> list[int]:
    """Bytes in the order of `_COLUMNS`."""
    memory = device.memory
    parts = [size for part, size in device.parts.items() if part != "free"]
    return [memory.budget_bytes, *parts, memory.peak_bytes, memory.free_bytes if memory.budget_bytes else 0]


def _transfers(body: ET.Element, report: Report) -> None:
    _add(body, "h2", "Activations that cross between devices")
    if not report.transfers:
        _add(body, "p", "None.")
        return
    rows = ET.SubElement(_table(body, ["from", "to", "bytes per token"]), "tbody")
    for item in report.transfers:
        row = ET.SubElement(rows, "tr")
        _add(row, "td", item.source.label)
        _add(row, "td", item.target.label, "short")
        _add_bytes(row, item.bytes_per_token)


def _modules(body: ET.Element, report: Report) -> None:
    _add(body, "h2", "Modules of each device")
    for device in report.devices:
        count = len(device.modules)
        held = f"{count:,} module{'s' if count != 1 else ''}, {format_bytes(device.memory.weights_bytes)}"
        name = f"{device.label} {device.card}".rstrip()
        if not count:
            _add(body, "p", f"{name} holds nothing.")
            continue
        details = ET.SubElement(body, "details")
        if len(report.devices) <= _MOST_OPEN:
            details.set("open", "open")
        _add(details, "summary", f"{name}: {held}")
        rows = ET.SubElement(_table(details, ["module", "size", "bytes"]), "tbody")
        for module in device.modules:
            row = ET.SubElement(rows, "tr")
            shared = f" (shares weights with {module.shared_with})" if module.shared_with else ""
            _add(row, "td", (module.name or "the whole model") + shared, "name")
            _add_bytes(row, module.num_bytes)
            _add(row, "td", f"{module.num_bytes:,}")


def _table(parent: ET.Element, columns: Sequence[str]) -> ET.Element:
    table = ET.SubElement(ET.SubElement(parent, "div", {"class": "wide"}), "table")
    _row_of_names(ET.SubElement(ET.SubElement(table, "thead"), "tr"), columns)
    return table


def _row_of_names(row: ET.Element, names: Iterable[str]) -> None:
    for name in names:
        _add(row, "th", name, "short" if name in _LEFT else "").set("scope", "col")


def _add_bytes(row: ET.Element, num_bytes: int) -> None:
    """A cell with a size, the exact figure as its tooltip; what is below zero is marked."""
    cell = _add(row, "td", format_bytes(num_bytes), "warning" if num_bytes < 0 else "")
    cell.set("title", f"{num_bytes:,} bytes")


def _add(parent: ET.Element, tag: str, text: str, style: str = "") -> ET.Element:
    element = ET.SubElement(parent, tag, {"class": style} if style else {})
    element.text = printable(text)
    return element
