"""Why each block of a placement went where it went, decision by decision, with the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from devmap_cli.devices.device import Device
from devmap_cli.devices.runtime import RUNTIMES, is_whole_runtime, runtime_overhead_bytes
from devmap_cli.model.names import is_ancestor, parent
from devmap_cli.planning.explaining import unused_reasons
from devmap_cli.planning.nouns import Block, Decision, Placement
from devmap_cli.render.tree import name_ranges
from devmap_cli.units import format_bytes

_MANY_KINDS = 4
"""Layers that differ in more ways than this are one line nevertheless: every second one may be different."""
_INDENT = 2
_LEAST_REMARK = 24


@dataclass(frozen=True, slots=True)
class _Line:
    """Decisions that are told as one: blocks that follow each other on one device for one reason."""

    blocks: tuple[Block, ...]
    decisions: tuple[Decision, ...]

    @property
    def device(self) -> Device:
        return self.decisions[0].device

    @property
    def reason(self) -> str:
        return self.decisions[0].reason

    @property
    def name(self) -> str:
        """`model.layers.0-13`, `lm_head`."""
        first = self.decisions[0].block
        if len(self.decisions) == 1:
            return first or "the whole model"
        numbers = tuple(decision.block.rpartition(".")[2] for decision in self.decisions)
        stack = parent(first)
        return f"{stack}.{name_ranges(numbers)}" if stack else name_ranges(numbers)

    @property
    def bytes_before(self) -> int:
        return self.decisions[0].bytes_before

    @property
    def bytes_after(self) -> int:
        return self.decisions[-1].bytes_after

    @property
    def is_pinned(self) -> bool:
        return any(block.fixed is not None for block in self.blocks)

    @property
    def each(self) -> str:
        """What each of several blocks takes: `14 × 444.5 MiB`, `14 × 51.7 MiB to 53.4 MiB`; nothing for one block."""
        if len(self.blocks) == 1:
            return ""
        sizes = sorted({decision.held_bytes for decision in self.decisions})
        low, high = format_bytes(sizes[0]), format_bytes(sizes[-1])
        return f"{len(self.blocks)} × {low}" if low == high else f"{len(self.blocks)} × {low} to {high}"


class _Cells(NamedTuple):
    """The texts of one line.

    `added` is what it takes, `steps` the device's bytes before and after, `use` the latter's share of the budget,
    `remark` what it is made of.
    """

    name: str
    added: str
    steps: str
    use: str
    remark: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Each decision of a placement in order: what was placed, where and why, and the device's bytes before and after.

    Equal layers that follow each other are one line. Where the console is narrow, the figures stand below the names.

    Args:
        names: of the cards, where they are known.
        ties: groups of tensor names that share weights (`ModelSpec.ties`), to tell why blocks go together.
    """

    placement: Placement
    names: Mapping[Device, str] = field(default_factory=dict)
    ties: Sequence[Sequence[str]] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        placement = self.placement
        used = len(placement.used_devices)
        yield Text(
            f"{placement.strategy}: {_count(len(placement.blocks), 'block')} "
            f"in execution order on {used} of {_count(len(placement.budgets.devices), 'device')}"
        )
        rows = [(line, self._cells(line)) for line in _lines(placement)]
        columns = _columns([cells for _, cells in rows], options.max_width)
        for _, group in groupby(rows, key=lambda row: (row[0].device, row[0].reason, row[0].is_pinned)):
            section = list(group)
            yield Text()
            yield self._heading(section[0][0])
            texts = [cells for _, cells in section]
            yield Padding(_table(texts, columns) if columns else _stacked(texts), (0, 0, 0, _INDENT), expand=False)
        remarks = [*self._beside_decisions([line for line, _ in rows]), *self._runtime(), *self._unused()]
        if remarks:
            yield Text()
        yield from remarks

    def _heading(self, line: _Line) -> Text:
        budgets = self.placement.budgets
        budget, reserved = budgets.get(line.device), budgets.whole(line.device) - budgets.get(line.device)
        text = Text(f"{line.device.label} {self.names.get(line.device, '')}".rstrip(), style="bold")
        beside = f" beside {format_bytes(reserved)} reserved" if reserved else ""
        text.append(f" (budget {format_bytes(budget)}{beside}): ", style="not bold")
        if line.is_pinned:
            text.append("pinned" if line.reason == "pinned" else f"pinned, {line.reason}", style="not bold yellow")
        else:
            text.append(line.reason, style="not bold")
        return text

    def _cells(self, line: _Line) -> _Cells:
        budget = self.placement.budgets.get(line.device)
        bonds = [self._bond(block) for block in line.blocks if block.fqns[1:]]
        return _Cells(
            name=line.name,
            added=f"+{format_bytes(line.bytes_after - line.bytes_before)}",
            steps=f"{format_bytes(line.bytes_before)} → {format_bytes(line.bytes_after)}",
            use=f"{100 * line.bytes_after / budget:.0f} %" if budget else "",
            remark=", ".join(filter(None, [line.each, *bonds])),
        )

    def _bond(self, block: Block) -> str:
        """Why a block has several modules, or several tensors of one."""
        first, *others = block.fqns
        tied = [name for name in others if self._tied(first, name)]
        rest = [name for name in others if name not in tied]
        if all(parent(name) == parent(first) for name in rest):
            rest = [name.rpartition(".")[2] for name in rest]
        texts = [f"shares weights with {', '.join(tied)}"] if tied else []
        return "; ".join([*texts, *([f"as one with {', '.join(rest)}"] if rest else [])])

    def _tied(self, one: str, other: str) -> bool:
        """Whether the modules have a tensor in common."""
        return any(
            any(is_ancestor(one, name) for name in tie) and any(is_ancestor(other, name) for name in tie)
            for tie in self.ties
        )

    def _beside_decisions(self, lines: Sequence[_Line]) -> Iterator[Text]:
        """Where a device's peak is not what its last decision left, and why.

        What is offloaded computes on another device, the blocks of a device may need most in different phases, and the
        allocator keeps memory that tensors gave back.
        """
        after = {line.device: line.bytes_after for line in lines}
        main = self.placement.main_device
        for device in dict.fromkeys([*self.placement.used_devices, main]):
            peak, decided = self.placement.memory(device).peak_bytes, after.get(device, 0)
            if peak == decided:
                continue
            if device != main and not device.is_accelerator:
                why = f"what it holds computes, and keeps its KV cache, on {main.label}"
            elif peak > decided and all(place.is_accelerator for place in self.placement.devices):
                why = "what the allocator keeps for later comes on top"
            elif device == main and peak > decided:
                why = "the KV cache and the passing weights of what is offloaded come on top"
            else:
                why = "its blocks do not all need most at the same time"
            yield Text(f"{device.label}: {format_bytes(decided)} by these decisions, peak {format_bytes(peak)}: {why}")

    def _runtime(self) -> Iterator[Text]:
        """What of the peaks no rehearsal sees, and what that figure stands on."""
        by_share: dict[tuple[str, int, bool], list[Device]] = {}
        for device in self.placement.used_devices:
            if device.kind in RUNTIMES and self.placement.overhead_bytes.get(device):
                budget = self.placement.budgets.get(device)
                share = runtime_overhead_bytes(device.kind, budget)
                by_share.setdefault((device.kind, share, is_whole_runtime(device.kind, budget)), []).append(device)
        for (kind, share, is_whole), devices in by_share.items():
            runtime = RUNTIMES[kind]
            size = f"{format_bytes(share)} of {'each' if len(devices) > 1 else 'the'} peak"
            why = runtime.source if is_whole else "an eighth of the budget, as small models load few of them"
            yield Text(f"{_labels(devices)}: {size} for {runtime.name}: {why}")

    def _unused(self) -> Iterator[Text]:
        by_reason: dict[str, list[Device]] = {}
        for device, reason in unused_reasons(self.placement):
            by_reason.setdefault(reason, []).append(device)
        for reason, devices in by_reason.items():
            yield Text(f"{_labels(devices)} unused: {reason}")


def _columns(rows: Sequence[_Cells], max_width: int) -> dict[str, int]:
    """The columns for which there is room and their widths, the last one's the least; none where not enough fit."""
    if not rows:
        return {}
    widths = {
        name: max(cell_len(text) for text in texts)
        for name, texts in zip(_Cells._fields, zip(*rows, strict=True), strict=True)
    }
    widths["remark"] = min(widths["remark"], _LEAST_REMARK)
    for left_out in ((), ("added",)):
        columns = {name: width for name, width in widths.items() if name not in left_out}
        if _INDENT + sum(columns.values()) + 2 * (len(columns) - 1) <= max_width:
            return columns
    return {}


def _table(rows: Sequence[_Cells], columns: Mapping[str, int]) -> Table:
    """One line for each row; a remark may be folded."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, width in columns.items():
        if name == "remark":
            table.add_column(overflow="fold", style="dim")
        else:
            table.add_column(no_wrap=True, min_width=width, justify="left" if name == "name" else "right")
    for cells in rows:
        table.add_row(*(getattr(cells, name) for name in columns))
    return table


def _stacked(rows: Sequence[_Cells]) -> Group:
    """Two or three lines for each row: the name, and its figures below it."""
    parts: list[RenderableType] = []
    for cells in rows:
        parts.append(Text(cells.name, overflow="fold"))
        figures = ", ".join(filter(None, [cells.steps, cells.use]))
        parts.append(Padding(Text(figures), (0, 0, 0, _INDENT), expand=False))
        if cells.remark:
            remark = Text(f"{cells.added}: {cells.remark}", style="dim", overflow="fold")
            parts.append(Padding(remark, (0, 0, 0, _INDENT), expand=False))
    return Group(*parts)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _labels(devices: Sequence[Device]) -> str:
    """`GPU 1-3,5, cpu`."""
    texts = []
    for kind, group in groupby(devices, key=lambda device: device.label.rstrip("0123456789")):
        numbers = tuple(str(device.index) for device in group if device.index is not None)
        texts.append(kind + name_ranges(numbers) if numbers else kind)
    return ", ".join(texts)


def _lines(placement: Placement) -> Iterator[_Line]:
    """The decisions in order, list elements that follow each other folded."""
    blocks = {block.fqns[0]: block for block in placement.blocks}
    stretch: list[Decision] = []
    for decision in placement.decisions:
        if stretch and not _goes_on(stretch[-1], decision, blocks):
            yield from _folded(stretch, blocks)
            stretch = []
        stretch.append(decision)
    yield from _folded(stretch, blocks)


def _goes_on(before: Decision, decision: Decision, blocks: Mapping[str, Block]) -> bool:
    """Whether a decision is about the list element after the one before, with the same device and reason."""
    stack, _, number = decision.block.rpartition(".")
    last = before.block.rpartition(".")[2]
    pair = (blocks[before.block], blocks[decision.block])
    return (
        (before.device, before.reason, pair[0].fixed) == (decision.device, decision.reason, pair[1].fixed)
        and all(len(block.fqns) == 1 for block in pair)
        and number.isdecimal()
        and last.isdecimal()
        and parent(before.block) == stack
        and int(number) == int(last) + 1
    )


def _folded(stretch: Sequence[Decision], blocks: Mapping[str, Block]) -> Iterator[_Line]:
    """Equal blocks of a stretch together; all of it where it has many kinds."""
    groups = [tuple(group) for _, group in groupby(stretch, key=lambda step: replace(blocks[step.block], fqns=()))]
    for group in groups if len(groups) <= _MANY_KINDS else [tuple(stretch)]:
        if group:
            yield _Line(tuple(blocks[decision.block] for decision in group), group)
