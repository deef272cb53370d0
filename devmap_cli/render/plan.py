"""The per-device table of a plan, and the bar of its layers over the devices."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from devmap_cli.devices.device import DISK, Device
from devmap_cli.devices.runtime import RUNTIMES, is_whole_runtime
from devmap_cli.mapfile import MapDevice, MapFile, MapWorkload
from devmap_cli.model.kv_dtypes import AUTO
from devmap_cli.model.names import owner, parent
from devmap_cli.model.spec import ModelSpec
from devmap_cli.planning.nouns import Placement
from devmap_cli.planning.pace import Pace
from devmap_cli.planning.rates import FLOPS_EFFICIENCY, MEMORY_EFFICIENCY, Basis, Rates
from devmap_cli.planning.speed import Speed
from devmap_cli.render.tree import name_ranges
from devmap_cli.units import format_bytes

_COLOURS = ("green", "blue", "magenta", "yellow", "cyan", "red")
BAR_WIDTH = 72
_FILLS = "█▓▒░"
_LEAST_FIRST = ("activation", "overhead", "free", "KV cache", "weights", "budget")
"""Columns in the order in which they are left out of a table that is too wide."""
_UNLIMITED = 10_000
_REASON_WIDTH = 160
_MANY_IDLE = 4
_MANY_OFFLOADED = 3
"""One layer in so many off the accelerators is worth a warning."""
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
    spec: ModelSpec,
    plan: MapFile,
    unused: Sequence[tuple[Device, str]],
    *,
    weights_only: bool,
    reason: str | None = None,
) -> list[str]:
    """What the figures stand on, and what a reader should know before a run.

    Args:
        unused: accelerators that hold nothing, each with the reason.
        reason: why the workload could not be rehearsed.
    """
    workload = plan.workload
    notes = [*spec.notes]
    if weights_only or workload is None:
        notes.append("budgets cap weights alone (--weights-only): KV cache and activations come on top")
    elif reason is not None:
        notes.append(_not_rehearsed(plan, workload, reason))
    else:
        notes.append(f"predicted for {_workload(workload)} by a rehearsal of the model's code{_beside_rehearsal(plan)}")
        loading = _fullest_while_loading(spec, plan)
        notes += [*_while_loading(loading), *_bound_by_activations(plan, workload, but=loading)]
    if workload is not None and spec.max_positions and _longest(spec, workload) > spec.max_positions:
        notes.append(f"more than the {spec.max_positions:,} tokens that the model was made for")
    by_reason: dict[str, list[str]] = {}
    for device, why in unused:
        by_reason.setdefault(why, []).append(device.label)
    notes += [f"{', '.join(labels)} left unused: {why}" for why, labels in by_reason.items()]
    return notes + _offloaded(spec, plan)


def _not_rehearsed(plan: MapFile, workload: MapWorkload, reason: str) -> str:
    """What counts and what does not where the model's code does not get through a rehearsal, and why it does not."""
    kv_cache = "KV cache" if workload.kv_dtype == AUTO else "a KV cache as if it were not quantized"
    shortened = textwrap.shorten(reason, _REASON_WIDTH, placeholder=" …")
    return (
        f"not rehearsed: the model's code does not run here for {_workload(workload)}. Counted: weights, {kv_cache}, "
        f"offloaded weights passing through{_beside_rehearsal(plan)}. Not counted: activations, and what PyTorch's "
        f"allocator keeps; --reserve keeps room for them. The code stopped with: {shortened}"
    )


def _beside_rehearsal(plan: MapFile) -> str:
    """What accelerators take that no rehearsal sees: `, with 640.0 MiB per device for CUDA's context and kernels`."""
    used = [item for item in plan.devices if item.device.kind in RUNTIMES and item.peak_bytes]
    if not used:
        return ""
    runtime = RUNTIMES[used[0].device.kind]
    whole = {is_whole_runtime(item.device.kind, item.budget_bytes) for item in used}
    shares = [f"{format_bytes(runtime.num_bytes)} per device"] if True in whole else []
    shares += ["an eighth of a small budget"] if False in whole else []
    return f", with {' or '.join(shares)} for {runtime.name}"


def _fullest_while_loading(spec: ModelSpec, plan: MapFile) -> list[Device]:
    """The accelerators that take the most before there is a KV cache, which their figures then lack."""
    caching = {owner(cache.fqn, plan.device_map) for cache in spec.kv_cache or () if cache.num_bytes(1)}
    used = {plan.device_map[key] for key in caching if key is not None}
    return [
        item.device
        for item in plan.devices
        if item.device in used and item.device.is_accelerator and item.activation_bytes and not item.kv_cache_bytes
    ]


def _while_loading(devices: Sequence[Device]) -> list[str]:
    labels = ", ".join(device.label for device in devices)
    takes = "takes" if len(devices) == 1 else "take"
    return [f"{labels} {takes} the most while loading, before there is a KV cache"] if devices else []


def _bound_by_activations(plan: MapFile, workload: MapWorkload, but: Sequence[Device]) -> list[str]:
    """Says so of the accelerators of which activations take more than weights do, and what lowers them.

    Args:
        but: those of which it is what loading takes.
    """
    bound = [
        f"{item.device.label} ({format_bytes(item.activation_bytes)} of {format_bytes(item.peak_bytes)})"
        for item in plan.devices
        if item.device.is_accelerator and item.activation_bytes > item.weights_bytes > 0 and item.device not in but
    ]
    if not bound:
        return []
    ways = [name for name, given in (("smaller images", workload.images), ("fewer frames", workload.videos)) if given]
    return [f"activations take the most of {', '.join(bound)}: {' or '.join([*ways, 'a shorter prompt'])} lowers them"]


def _offloaded(spec: ModelSpec, plan: MapFile) -> list[str]:
    """How much lies off the accelerators, with a warning where that decides the speed."""
    held = [item for item in plan.devices if item.weights_bytes]
    offloaded = [item for item in held if not item.device.is_accelerator]
    if not offloaded or len(offloaded) == len(held):
        return []
    share = sum(item.weights_bytes for item in offloaded) / sum(item.weights_bytes for item in held)
    notes = [f"{100 * share:.0f} % of the weights are offloaded and cross to a GPU for every token"]
    layers = [owner(fqn, plan.device_map) for fqn, module in spec.modules() if module.no_split]
    places = [plan.device_map[key] for key in layers if key is not None]
    count = sum(not device.is_accelerator for device in places)
    if count * _MANY_OFFLOADED >= len(places):
        where = " and ".join(item.device.label for item in offloaded)
        way_out = "a smaller dtype, --quantize" if spec.quantization is None else "a smaller model"
        notes.append(
            f"warning: {count} of {len(places)} layers are on {where}, which decides the speed: {way_out} or more GPUs "
            "would help"
        )
    return notes


def speed_note(speed: Speed, pace: Pace, placement: Placement) -> str:
    """The predicted speed, what of it offloaded weights cost, and what the devices are taken to be."""
    per_token = [f"{_seconds(speed.seconds_per_token)} per token", *_bringing(speed, placement)]
    parts = [
        *(per_token if speed.seconds_per_token else []),  # an answer of one token has no others
        f"the first after {_seconds(speed.seconds_to_first_token)}",
        f"{_seconds(speed.load_seconds)} to load from disk",
    ]
    return f"predicted speed: {', '.join(parts)}; {speed_basis(pace, (*placement.used_devices, DISK))}"


def _bringing(speed: Speed, placement: Placement) -> list[str]:
    """What a token waits for weights to come from cpu and disk, in words."""
    if not placement.main_device.is_accelerator:
        return []
    tiers = (device for device in placement.used_devices if not device.is_accelerator)
    costs = {device: speed.devices[device].seconds_per_token for device in tiers}
    texts = [f"{_seconds(seconds)} for the weights on {device.label}" for device, seconds in costs.items() if seconds]
    return [f"of it {' and '.join(texts)}"] if texts else []


def speed_basis(pace: Pace, devices: Iterable[Device]) -> str:
    """What the speed of `devices` was taken from: which figures are stated by makers, measured or assumed.

    Devices of which the same is known share a phrase.
    """
    names: dict[tuple[Basis, str], list[str]] = {}
    for rates in dict.fromkeys(map(pace.rates, devices)):
        names.setdefault((rates.basis, "; ".join(_details(rates))), []).append(rates.name)
    groups = sorted(names.items(), key=lambda group: list(Basis).index(group[0][0]))
    return "; ".join(
        _BASIS_TEXTS[basis].format(_words(same)) + (f" ({details})" if details else "")
        for (basis, details), same in groups
    )


_BASIS_TEXTS = {
    Basis.STATED: "{} by the maker's figures",
    Basis.MEASURED: "{} as measured here",
    Basis.ASSUMED: "assuming {}",
}


def _details(rates: Rates) -> Iterator[str]:
    """What is reached of stated figures, and which figures have another basis than the rest."""
    if rates.basis is Basis.STATED:
        shares = {"bandwidth": MEMORY_EFFICIENCY, "arithmetic": FLOPS_EFFICIENCY}
        yield ", ".join(f"{100 * share:.0f} % of {name}" for name, share in shares.items() if name not in rates.assumed)
    if rates.assumed:
        yield f"{_words(rates.assumed)} assumed"
    if rates.measured:
        yield f"{_words(rates.measured)} measured here"


def _words(names: Sequence[str]) -> str:
    """`T4, A10 and L4`."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


_MINUTES_FROM = 600


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < _MINUTES_FROM else f"{seconds / 60:,.0f} min"


def _longest(spec: ModelSpec, workload: MapWorkload) -> int:
    """Tokens of the longest sequence: an encoder and a decoder have one each."""
    lengths = (workload.prompt_tokens, workload.max_new_tokens)
    names = [name.rpartition(".")[2] for name, _ in spec.modules()]
    return max(lengths) if "encoder" in names and "decoder" in names else sum(lengths)


def _workload(workload: MapWorkload) -> str:
    images = [f"image {width}x{height}" for height, width in workload.images]
    videos = [f"video {width}x{height}x{frames}" for height, width, frames in workload.videos]
    extras = "".join(f", {extra}" for extra in (*images, *videos))
    attention = "" if workload.attention == "sdpa" else f", {workload.attention}"
    kv_cache = "" if workload.kv_dtype == AUTO else f", KV cache in {workload.kv_dtype}"
    tokens = f"{workload.prompt_tokens:,} + {workload.max_new_tokens:,} tokens"
    return f"{workload.batch_size} × ({tokens}{extras}){attention}{kv_cache}"
