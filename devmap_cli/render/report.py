"""The report of a plan: what a picture and a page of it show, and the file that they are written to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from devmap_cli.devices.device import Device
from devmap_cli.errors import RequestError
from devmap_cli.files import atomic_write, check_folder
from devmap_cli.mapfile import MapDevice, MapFile, MapModel, MapTransfer, MapWorkload
from devmap_cli.model.spec import ModelSpec
from devmap_cli.render.report_device import ReportDevice, ReportModule, modules_of
from devmap_cli.units import format_bytes

_FORMATS = (".svg", ".html")
_MANY_HOPS = 4
_MOST_LINES = 8


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
        for module in modules_of(plan, spec):
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
        RequestError: another extension than .svg and .html, a folder, or a folder that is not there.
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
    check_folder(target)


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
