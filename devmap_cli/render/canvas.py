"""What a picture is drawn on: rectangles and texts in SVG, how wide texts are, and the colours of all that is shown."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from rich.cells import cell_len, chop_cells, set_cell_size

WIDTH = 1000
MARGIN = 24
LABEL_SIZE, TEXT_SIZE = 11, 12
CELL = 0.58
"""Width of a character in units of its font's size, rather too much than too little for a sans-serif."""
# Okabe and Ito's palette, told apart with every kind of colour vision, on white and on black.
STYLE = """
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


class Canvas:
    """A picture in the making; `y` is where the next thing goes."""

    def __init__(self) -> None:
        self.root = ET.Element("svg")
        self.y = float(MARGIN)

    def rect(
        self,
        parent: ET.Element,
        style: str,
        x: float,
        y: float,
        end: float,
        height: float,
        num_bytes: int | None = None,
    ) -> ET.Element:
        """A rectangle from `x` to `end`; `num_bytes` is what it stands for."""
        attributes = {"class": style, "x": px(x), "y": px(y), "width": px(end - x), "height": px(height)}
        if num_bytes is not None:
            attributes["data-bytes"] = str(num_bytes)
        return ET.SubElement(parent, "rect", attributes)

    def text(
        self,
        x: float,
        y: float,
        content: str,
        *,
        size: int = TEXT_SIZE,
        style: str = "",
        weight: str = "",
        anchor: str = "",
        to: ET.Element | None = None,
    ) -> ET.Element:
        """A line of text in an element, the picture's root by default."""
        named = {"class": style, "font-weight": weight, "text-anchor": anchor}
        attributes = {"x": px(x), "y": px(y), "font-size": str(size)}
        attributes |= {name: value for name, value in named.items() if value}
        element = ET.SubElement(self.root if to is None else to, "text", attributes)
        element.text = printable(content)
        return element


def printable(text: str) -> str:
    """`text` without what no XML may hold: control characters and halves of characters."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def px(value: float) -> str:
    """A length in as few digits as tell it to a thousandth of a pixel."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


def text_width(text: str, size: int) -> float:
    """About how many pixels a text takes."""
    return cell_len(text) * size * CELL


def cut(text: str, room: float) -> str:
    """`text` cut to `room`, in units of its font's size."""
    text, cells = printable(text), int(room / CELL)
    return text if cell_len(text) <= cells else set_cell_size(text, cells - 1).rstrip() + "…"


def wrapped(text: str, cells: int) -> list[str]:
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
