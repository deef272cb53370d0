"""The per-device table of a plan, and the bar of its layers over the devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from devmap_cli.devices.device import Device
from devmap_cli.mapfile import MapDevice, MapFile
from devmap_cli.model.names import parent
from devmap_cli.model.spec import ModelSpec
from devmap_cli.render.tree import name_ranges
from devmap_cli.units import format_bytes

_COLOURS = ("green", "blue", "magenta", "yellow", "cyan", "red")
BAR_WIDTH = 72
_FILLS = "█▓▒░"
_LEAST_FIRST = ("activation", "overhead", "free", "KV cache", "weights", "budget")
"""Columns in the order in which they are left out of a table that is too wide."""
_UNLIMITED = 10_000
_MANY_IDLE = 4
_OFFLOAD_COLOURS = {"cpu": "bright_black", "disk": "bright_black"}


@dataclass(frozen=True, slots=True)
class DeviceTable:
    """What each device is planned to take, in the parts that add up to its peak, and which modules it holds.

    Where the console is narrow, what is held stands below the table, and columns that tell least are left out.

    Args:
        names: of the cards, where they are known.
    """

    plan: MapFile
    names: Mapping[Device, str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, unused = _used_and_unused(self.plan)
        parts = [part for part in ("activation", "overhead") if any(_bytes(part, item) for item in shown)]
        columns = ["budget", "weights", "KV cache", *parts, "peak", "free"]
        held = {item.device: self._held_by(item) for item in shown}
        widest = max((cell_len(name) for text in held.values() for name in text.split(", ")), default=0)

        def fits(extra_columns: int) -> bool:
            table = self._table(shown, columns)
            return Measurement.get(console, options.update(width=_UNLIMITED), table).minimum + extra_columns <= (
                options.max_width
            )

        if fits(widest + 2):
            yield self._table(shown, columns, held)
        else:
            left_out = []
            for column in _LEAST_FIRST:
                if column in columns and not fits(0):
                    columns.remove(column)
                    left_out.append(column)
            yield self._table(shown, columns)
            if left_out:
                yield Text(f"a wider terminal shows {', '.join(left_out)} too", style="dim")
            for device, text in held.items():
                yield Text(f"{device.label} holds")
                yield Padding(Text(text, overflow="fold"), (0, 0, 0, 2))
        if unused:
            yield Text(f"{unused} hold nothing")

    def _held_by(self, item: MapDevice) -> str:
        keys = [key for key, device in self.plan.device_map.items() if device == item.device]
        return holdings(keys) or "nothing"

    def _table(
        self, shown: Sequence[MapDevice], columns: Sequence[str], held: Mapping[Device, str] | None = None
    ) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("device", no_wrap=True)
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True, min_width=9)
        table.add_column("use", justify="right", no_wrap=True, min_width=5)
        if held is not None:
            table.add_column("holds", overflow="fold")
        for item in shown:
            label = f"{item.device.label} {self.names.get(item.device, '')}".rstrip()
            sizes = [format_bytes(_bytes(column, item)) for column in columns]
            table.add_row(label, *sizes, _use(item), *([] if held is None else [held[item.device]]))
        return table


def _bytes(column: str, item: MapDevice) -> int:
    return int(getattr(item, f"{column.lower().replace(' ', '_')}_bytes"))


def _used_and_unused(plan: MapFile) -> tuple[list[MapDevice], str]:
    """The devices to show, and the accelerators that hold nothing in words, where those would fill the screen."""
    held = set(plan.device_map.values())
    idle = [item for item in plan.devices if item.device.is_accelerator and item.device not in held]
    if len(idle) < _MANY_IDLE:
        return list(plan.devices), ""
    numbers = tuple(str(item.device.index) for item in idle)
    kind = idle[0].device.label.removesuffix(numbers[0])
    return [item for item in plan.devices if item not in idle], f"{kind}{name_ranges(numbers)}"


def _use(item: MapDevice) -> str:
    return f"{100 * item.peak_bytes / item.budget_bytes:.0f} %" if item.budget_bytes else ""


def holdings(keys: Sequence[str]) -> str:
    """Module names in few words: `model.visual, model.language_model.layers.0-9, lm_head`."""
    parts: dict[tuple[str, bool], list[str]] = {}
    for key in keys:
        name = key.rpartition(".")[2]
        parts.setdefault((parent(key), True) if name.isdigit() else (key, False), []).append(name)
    texts = []
    for (prefix, numbered), names in parts.items():
        texts.append(f"{prefix}.{name_ranges(tuple(names))}" if numbered else prefix or "the whole model")
    return ", ".join(texts)


def layer_bar(plan: MapFile, width: int = BAR_WIDTH) -> Text:
    """A bar as long as the model, each device's part as wide as its share of the weights, named below.

    A part that is narrower than its name has none; more devices than characters have no bar.

    Args:
        width: characters for the whole model.
    """
    weights = {item.device: item.weights_bytes for item in plan.devices if item.weights_bytes}
    if len(weights) > width:
        return Text()
    cells = _cells(weights, width)
    bar, names = Text(), Text()
    for position, (device, count) in enumerate(cells.items()):
        colour = _OFFLOAD_COLOURS.get(device.kind) or _COLOURS[position % len(_COLOURS)]
        bar.append(_FILLS[position % len(_FILLS)] * count, style=colour)
        is_last = position == len(cells) - 1
        label = device.label if len(device.label) < count + is_last else ""
        names.append(label.ljust(count), style=colour)
    return Text("\n").join([bar, names])


def _cells(weights: Mapping[Device, int], width: int) -> dict[Device, int]:
    """Whole characters per device, together `width`; every device gets at least one."""
    total = sum(weights.values()) or 1
    edges, position, before = {}, 0, 0
    for number, (device, size) in enumerate(weights.items(), start=1):
        before += size
        edge = min(max(position + 1, round(width * before / total)), width - len(weights) + number)
        edges[device] = edge - position
        position = edge
    return edges


def plan_notes(
    spec: ModelSpec, plan: MapFile, unused: Sequence[tuple[Device, str]], *, weights_only: bool
) -> list[str]:
    """What the figures stand on, and what a reader should know before a run.

    Args:
        unused: accelerators that hold nothing, each with the reason.
    """
    workload = plan.workload
    notes = [*spec.notes]
    if weights_only or workload is None:
        notes.append("budgets cap weights alone (--weights-only): KV cache and activations come on top")
    else:
        notes.append(
            f"computed for {workload.batch_size} × ({workload.prompt_tokens:,} + {workload.max_new_tokens:,} tokens): "
            "weights, KV cache, and offloaded weights passing through; other activations come on top: "
            "--reserve keeps room, devmap check predicts them"
        )
    by_reason: dict[str, list[str]] = {}
    for device, reason in unused:
        by_reason.setdefault(reason, []).append(device.label)
    notes += [f"{', '.join(labels)} left unused: {reason}" for reason, labels in by_reason.items()]
    offloaded = [item for item in plan.devices if item.weights_bytes and not item.device.is_accelerator]
    total = sum(item.weights_bytes for item in plan.devices)
    if offloaded and any(item.device.is_accelerator and item.weights_bytes for item in plan.devices):
        share = sum(item.weights_bytes for item in offloaded) / total
        notes.append(f"{100 * share:.0f} % of the weights are offloaded and cross to a GPU for every token")
    return notes
