"""The per-device table of a plan, and the bar of its layers over the devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rich.table import Table
from rich.text import Text

from devmap_cli.devices.device import Device
from devmap_cli.mapfile import MapDevice, MapFile
from devmap_cli.model.names import parent
from devmap_cli.model.spec import ModelSpec
from devmap_cli.render.tree import name_ranges
from devmap_cli.units import format_bytes

_COLOURS = ("green", "blue", "magenta", "yellow", "cyan", "red")
_FILLS = "█▓▒░"
_OFFLOAD_COLOURS = {"cpu": "bright_black", "disk": "bright_black"}


def device_table(plan: MapFile, names: Mapping[Device, str] = MappingProxyType({})) -> Table:
    """What each device is planned to take, in the parts that add up to its peak, and which modules it holds.

    Args:
        names: of the cards, where they are known.
    """
    shown = [part for part in ("activation_bytes", "overhead_bytes") if any(getattr(d, part) for d in plan.devices)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("device", no_wrap=True)
    columns = [
        "budget",
        "weights",
        "KV cache",
        *(part.removesuffix("_bytes") for part in shown),
        "peak",
        "free",
    ]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, min_width=9)
    table.add_column("use", justify="right", no_wrap=True, min_width=5)
    table.add_column("holds", overflow="fold")
    for item in plan.devices:
        sizes = [item.budget_bytes, item.weights_bytes, item.kv_cache_bytes]
        sizes += [getattr(item, part) for part in shown] + [item.peak_bytes, item.free_bytes]
        held = [key for key, device in plan.device_map.items() if device == item.device]
        label = f"{item.device.label} {names.get(item.device, '')}".rstrip()
        table.add_row(label, *map(format_bytes, sizes), _use(item), holdings(held) or "nothing")
    return table


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


def layer_bar(plan: MapFile, width: int = 72) -> Text:
    """A bar as long as the model, each device's part as wide as its share of the weights, named below.

    Args:
        width: characters for the whole model.
    """
    weights = {item.device: item.weights_bytes for item in plan.devices if item.weights_bytes}
    cells = _cells(weights, width)
    bar, names = Text(), Text()
    for position, (device, count) in enumerate(cells.items()):
        colour = _OFFLOAD_COLOURS.get(device.kind) or _COLOURS[position % len(_COLOURS)]
        bar.append(_FILLS[position % len(_FILLS)] * count, style=colour)
        names.append(device.label[:count].ljust(count), style=colour)
    return Text("\n").join([bar, names])


def _cells(weights: Mapping[Device, int], width: int) -> dict[Device, int]:
    """Whole characters per device, together `width` where every device gets at least one."""
    total = sum(weights.values()) or 1
    edges, position, before = {}, 0, 0
    for device, size in weights.items():
        before += size
        edge = max(position + 1, round(width * before / total))
        edges[device] = edge - position
        position = edge
    return edges


def plan_notes(spec: ModelSpec, plan: MapFile, *, weights_only: bool) -> list[str]:
    """What the figures stand on, and what a reader should know before a run."""
    workload = plan.workload
    notes = [*spec.notes]
    if weights_only or workload is None:
        notes.append("budgets cap weights alone (--weights-only): KV cache and activations come on top")
    else:
        notes.append(
            f"computed for {workload.batch_size} × ({workload.prompt_tokens:,} + {workload.max_new_tokens:,} tokens): "
            "weights and KV cache; activations come on top, --reserve keeps room for them"
        )
    offloaded = [item for item in plan.devices if item.weights_bytes and not item.device.is_accelerator]
    total = sum(item.weights_bytes for item in plan.devices)
    if offloaded and any(item.device.is_accelerator and item.weights_bytes for item in plan.devices):
        share = sum(item.weights_bytes for item in offloaded) / total
        notes.append(f"{100 * share:.0f} % of the weights are offloaded and cross to a GPU for every token")
    return notes
