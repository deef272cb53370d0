"""The report of a plan: what a picture and a page of it show, and the file that they are written to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from devmap_cli.devices.device import Device
from devmap_cli.errors import RequestError
from devmap_cli.files import atomic_write
from devmap_cli.mapfile import MapDevice, MapFile, MapModel, MapTransfer, MapWorkload
from devmap_cli.model.names import parent
from devmap_cli.model.spec import ModelSpec
from devmap_cli.render.tree import name_ranges
from devmap_cli.units import format_bytes

PARTS = {
    "weights": "weights",
    "kv_cache": "KV cache",
    "activation": "activations",
    "overhead": "overhead",
    "free": "free",
}
"""What the bytes of a device are for, in the order of a bar, and how each part is called."""
_FORMATS = (".svg", ".html")
_MANY_HOPS = 4
_MOST_LINES = 8


@dataclass(frozen=True, slots=True)
class ReportModule:
    """One key of a device map and its bytes; `shared_with` is the key that holds weights which it shares."""

    name: str
    num_bytes: int
    shared_with: str = ""

    @property
    def text(self) -> str:
        """Name and size: `lm_head: 0 B, shares weights with model.embed_tokens`."""
        exact = f" ({self.num_bytes:,} bytes)" if self.num_bytes >= 1024 else ""
        shared = f", shares weights with {self.shared_with}" if self.shared_with else ""
        return f"{self.name or 'the whole model'}: {format_bytes(self.num_bytes)}{exact}{shared}"


@dataclass(frozen=True, slots=True)
class ModuleRun:
    """Modules that are shown as one: layers that follow each other, or a single module."""

    modules: tuple[ReportModule, ...]

    @property
    def is_numbered(self) -> bool:
        """Whether these are layers: elements of a list."""
        return self.modules[0].name.rpartition(".")[2].isdigit()

    @property
    def short_name(self) -> str:
        """The name without what leads to it: `layers.0-13`, `lm_head`."""
        names = tuple(module.name.rpartition(".")[2] for module in self.modules)
        if not self.is_numbered:
            return names[0] or "the whole model"
        stack = parent(self.modules[0].name).rpartition(".")[2]
        return f"{stack}.{name_ranges(names)}" if stack else name_ranges(names)

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(module.num_bytes for module in self.modules)


@dataclass(frozen=True, slots=True)
class ReportDevice:
    """One device: what was planned for it, its card where that is known, and what it holds in map order."""

    memory: MapDevice
    card: str = ""
    modules: tuple[ReportModule, ...] = ()

    @property
    def label(self) -> str:
        """`GPU 0`, `cpu`."""
        return self.memory.device.label

    @property
    def extent_bytes(self) -> int:
        """How far its bar reaches: its budget, or its peak where that is above."""
        return max(self.memory.budget_bytes, self.memory.peak_bytes)

    @property
    def over_bytes(self) -> int:
        """By how much the peak is above the budget."""
        return max(0, -self.memory.free_bytes) if self.memory.budget_bytes else 0

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each of `PARTS`: together the budget, or the peak where that is above."""
        sizes = {part: int(getattr(self.memory, f"{part}_bytes")) for part in PARTS}
        return {**sizes, "free": max(0, sizes["free"])}

    @property
    def use(self) -> str:
        """The peak as a share of the budget: `86 %`; nothing without a budget."""
        budget = self.memory.budget_bytes
        return f"{100 * self.memory.peak_bytes / budget:.0f} %" if budget else ""

    @property
    def runs(self) -> tuple[ModuleRun, ...]:
        """What it holds, layers that follow each other together."""
        runs: list[list[ReportModule]] = []
        for module in self.modules:
            if runs and _is_next(runs[-1][-1].name, module.name):
                runs[-1].append(module)
            else:
                runs.append([module])
        return tuple(ModuleRun(tuple(run)) for run in runs)


@dataclass(frozen=True, slots=True)
class Report:
    """All that a report shows.

    Args:
        devices: in the order of the map, then those that only its device map names.
        speed: lines about the predicted speed; none where nothing was predicted.
        notes: what the figures stand on.
    """

    devices: tuple[ReportDevice, ...]
    model: MapModel | None = None
    strategy: str | None = None
    workload: MapWorkload | None = None
    transfers: tuple[MapTransfer, ...] = ()
    speed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls,
        plan: MapFile,
        spec: ModelSpec,
        *,
        cards: Mapping[Device, str] = MappingProxyType({}),
        speed: Iterable[str] = (),
        notes: Iterable[str] = (),
    ) -> Report:
        """The report of a map for the model that `spec` describes.

        Args:
            cards: names of the cards, where they are known.
        """
        held: dict[Device, list[ReportModule]] = {}
        for module in _modules(plan, spec):
            held.setdefault(plan.device_map[module.name], []).append(module)
        planned = {item.device: item for item in plan.devices}
        for device, modules in held.items():
            planned.setdefault(device, MapDevice(device, 0, sum(module.num_bytes for module in modules)))
        return cls(
            devices=tuple(
                ReportDevice(item, cards.get(device, ""), tuple(held.get(device, ())))
                for device, item in planned.items()
            ),
            model=plan.model or MapModel(spec.model_id, spec.revision, spec.class_name, spec.dtype, spec.quantization),
            strategy=plan.strategy,
            workload=plan.workload,
            transfers=plan.transfers,
            speed=tuple(speed),
            notes=tuple(notes),
            versions=tuple(plan.versions.items()),
        )

    @property
    def title(self) -> str:
        """The model, as a heading: the last part of its id or folder, its class where that says nothing."""
        if self.model is None:
            return "device map"
        name = self.model.id.rstrip("/").rpartition("/")[2]
        return name if name.strip(".") else self.model.class_name

    def facts(self) -> Iterator[tuple[str, str]]:
        """What the map is for and how it was made: a name and a text each."""
        if self.model is not None:
            revision = f", revision {self.model.revision}" if self.model.revision else ""
            yield "model", self.model.id + revision
            yield "class", self.model.class_name
            yield "dtype", self.model.dtype
            yield "quantization", _quantization_text(self.model.quantization)
        if self.strategy is not None:
            yield "strategy", self.strategy
        if self.workload is not None:
            yield "workload", _workload_text(self.workload)
        for line in self._transfer_lines():
            yield "between devices", line
        for line in self.speed:
            yield "predicted speed", line
        for line in self.notes:
            yield "note", line
        if self.versions:
            yield "versions", ", ".join(f"{name} {version}" for name, version in self.versions)

    def _transfer_lines(self) -> list[str]:
        """The activations that cross between devices, transfers in a row with the same bytes as one line."""
        chains: list[list[MapTransfer]] = []
        for item in self.transfers:
            last = chains[-1][-1] if chains else None
            if last and last.target == item.source and last.bytes_per_token == item.bytes_per_token:
                chains[-1].append(item)
            else:
                chains.append([item])
        lines = [_chain_text(chain) for chain in chains]
        if len(lines) > _MOST_LINES:
            lines = [*lines[: _MOST_LINES - 1], f"and {len(lines) - _MOST_LINES + 1} more"]
        return lines or ["no activations cross"]


def check_report_path(path: str | Path) -> None:
    """Refuse a name that is no report's, so that a command can say so before it works.

    Raises:
        RequestError: another extension than .svg and .html, or a folder.
    """
    target = Path(path)
    if target.suffix.lower() not in _FORMATS:
        plain = target.name and target.name not in ("-", ".", "..")
        stem = (target.name if target.name.startswith(".") else target.stem) if plain else "report"
        raise RequestError(
            f"{str(path)!r} is no name of a report: it ends neither with .svg nor with .html",
            f"a picture: {stem}.svg; a page: {stem}.html",
        )
    try:
        is_folder = target.is_dir()
    except OSError:
        is_folder = False  # a name that no file can have: the attempt to write tells why
    if is_folder:
        name = f"report{target.suffix}"
        raise RequestError(f"{path} is a folder, not a file", f"name a file in it: {target / name}")


def write_report(path: str | Path, report: Report) -> None:
    """Write a picture (.svg), or a page with the picture and all figures (.html), by the extension of `path`.

    The same report gives the same bytes.

    Raises:
        RequestError: another extension, or as `atomic_write`.
        SurroundingsError: as `atomic_write`.
    """
    check_report_path(path)
    if Path(path).suffix.lower() == ".svg":
        from devmap_cli.render.svg import svg_bytes

        atomic_write(path, svg_bytes(report))
    else:
        from devmap_cli.render.page import page_bytes

        atomic_write(path, page_bytes(report))


def _modules(plan: MapFile, spec: ModelSpec) -> list[ReportModule]:
    """The keys of a map in its order; a tensor counts at the key nearest to it, a shared one at its owner's."""
    sizes = dict.fromkeys(plan.device_map, 0)
    shared: dict[str, str] = {}
    tied_to = {name: group[0] for group in spec.ties for name in group[1:]}
    for name, tensor in spec.tensors():
        key = _covering(name, sizes)
        if key is None:
            continue
        if name not in tied_to:
            sizes[key] += tensor.num_bytes
        elif (owner := _covering(tied_to[name], sizes)) not in (None, key):
            shared.setdefault(key, owner or "the whole model")
    return [ReportModule(key, size, shared.get(key, "")) for key, size in sizes.items()]


def _covering(name: str, keys: Mapping[str, int]) -> str | None:
    """The longest key that is, or contains, what `name` names."""
    while name and name not in keys:
        name = parent(name)
    return name if name in keys else None


def _is_next(before: str, name: str) -> bool:
    """Whether `name` is the list element after `before`."""
    stack, _, number = name.rpartition(".")
    last = before.rpartition(".")[2]
    return bool(number.isdecimal() and last.isdecimal() and parent(before) == stack and int(number) == int(last) + 1)


def _quantization_text(quantization: Mapping[str, object] | None) -> str:
    if not quantization:
        return "none"
    if set(quantization) == {"scheme"}:
        return f"bitsandbytes {quantization['scheme']}"
    plain = {key: value for key, value in quantization.items() if isinstance(value, (str, int, float))}
    settings = [f"{key} {json.dumps(value).strip(chr(34))}" for key, value in plain.items() if key != "quant_method"]
    return ", ".join([str(plain.get("quant_method", "quantized")), *settings])


def _workload_text(workload: MapWorkload) -> str:
    tokens = f"{workload.prompt_tokens:,} prompt + {workload.max_new_tokens:,} new tokens"
    images = [f"image {width}×{height}" for height, width in workload.images]
    videos = [f"video {width}×{height}, {frames} frames" for height, width, frames in workload.videos]
    return ", ".join([f"{workload.batch_size:,} × ({tokens})", *images, *videos, f"attention {workload.attention}"])


def _chain_text(chain: Sequence[MapTransfer]) -> str:
    places = [chain[0].source.label, *(item.target.label for item in chain)]
    each = f", each of {len(chain)} hops" if len(chain) > 1 else ""
    if len(places) > _MANY_HOPS:
        places = [*places[:2], "…", places[-1]]
    return f"{' → '.join(places)}: {format_bytes(chain[0].bytes_per_token)} per token{each}"
