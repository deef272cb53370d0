"""`check_document`: all that can be said of a map without running it, and of its repaired form."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from devmap_cli.checking.coverage import check_map
from devmap_cli.checking.findings import Finding, any_error, listing
from devmap_cli.checking.forecast import PHASES, Forecast
from devmap_cli.checking.layers import check_layers
from devmap_cli.checking.misnamed import meant_by, part_names
from devmap_cli.checking.repair import Change, repair
from devmap_cli.checking.translation import translate_names
from devmap_cli.errors import RequestError
from devmap_cli.mapfile import MapFile
from devmap_cli.model.names import is_ancestor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from devmap_cli.checking.rehearsed import Rehearser
    from devmap_cli.devices.device import Device
    from devmap_cli.model.spec import ModelSpec

FORMAT = "devmap.check/1"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What is wrong with a map, and what a run with it will take.

    `device_map` is the map in today's module names, `forecast` what its rehearsal foretells, `notes` what else to know
    of the figures.
    """

    device_map: dict[str, Device]
    findings: tuple[Finding, ...]
    forecast: Forecast
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no finding forbids a run."""
        return not any_error(self.findings)

    def to_document(self) -> dict[str, Any]:
        """The report as plain data."""
        forecast = self.forecast
        return {
            "passed": self.passed,
            "findings": [finding.to_document() for finding in self.findings],
            "rehearsed": forecast.skipped is None,
            "not_rehearsed_because": forecast.skipped,
            "stopped_in": forecast.stopped_in,
            "devices": [device.to_document() for device in forecast.devices],
            "notes": list(self.notes),
            "assumptions": list(forecast.assumptions),
        }


@dataclass(frozen=True, slots=True)
class Repair:
    """A repaired map, what was changed in it, and its own check."""

    document: MapFile
    changes: tuple[Change, ...]
    report: CheckReport


def check_document(document: MapFile, rehearser: Rehearser) -> CheckReport:
    """Everything wrong with the map, by looking at it and by rehearsing it.

    Raises:
        RequestError: the map is of another model.
    """
    spec = rehearser.spec
    model = document.model
    if model is not None and model.class_name != spec.class_name:
        raise _of_another_model(
            f"the map is for {model.class_name}, and {spec.model_id} is a {spec.class_name}", spec.model_id
        )
    device_map, _, old_names = translate_names(document.device_map, spec)
    found = check_map(device_map, spec, rehearser.budgets)
    unmatched = sum(finding.code == "unmatched-key" for finding in found)
    if unmatched == len(device_map) and not meant_by(device_map, spec):
        raise _of_another_model(
            f"the map is of another model: none of its keys names a part of {spec.class_name}", spec.model_id
        )
    forecast = rehearser.forecast(device_map)
    findings = (
        *old_names,
        *_absent_devices(device_map, rehearser),
        *(_with_copies(finding, forecast) for finding in found if not _is_told_better(finding, forecast)),
        *check_layers(device_map, spec, rehearser.cards),
        *forecast.findings,
    )
    notes = (*spec.notes, *_budget_notes(document, device_map, rehearser))
    return CheckReport(device_map, findings, forecast, notes)


def repair_document(document: MapFile, rehearser: Rehearser, found: CheckReport | None = None) -> Repair:
    """The map with what can be mended in it mended, checked again; without changes where there is nothing to mend.

    Args:
        found: the map's own check, if it was made already.
    """
    translated, renamed, _ = translate_names(document.device_map, rehearser.spec)
    device_map, changes = repair(translated, rehearser.spec)
    renamings = tuple(Change(new, translated[new], f"was {old}") for old, new in renamed.items())
    if found is None or renamings or changes:
        report = check_document(replace(document, device_map=device_map), rehearser)
    else:
        report = found
    remedy = report.forecast.remedy
    if remedy:
        reason = "there its tensors meet those that it works with"
        changes = (*changes, *(Change(move.module, move.device, reason) for move in remedy))
        for move in remedy:
            device_map = move.applied(device_map)
        report = check_document(replace(document, device_map=_in_module_order(device_map, rehearser.spec)), rehearser)
    return Repair(_rewritten(document, report, rehearser), (*renamings, *changes), report)


def _in_module_order(device_map: Mapping[str, Device], spec: ModelSpec) -> dict[str, Device]:
    order = {name: position for position, name in enumerate(part_names(spec))}
    return {key: device_map[key] for key in sorted(device_map, key=lambda key: order[key])}


def _rewritten(document: MapFile, report: CheckReport, rehearser: Rehearser) -> MapFile:
    """`document` with the report's map and, where the map says more than that, the report's figures."""
    if document.model is None:
        return MapFile(report.device_map)
    figures = {item.device: item for item in report.forecast.devices}
    return replace(
        document,
        device_map=report.device_map,
        workload=rehearser.workload,
        devices=tuple(
            replace(figures[item.device].map_device(item.budget_bytes), card=item.card)
            if item.device in figures
            else item
            for item in document.devices
        ),
        transfers=report.forecast.transfers(rehearser.workload.batch_size),
    )


def _absent_devices(device_map: Mapping[str, Device], rehearser: Rehearser) -> Iterator[Finding]:
    """Accelerators that the map names and that are not there, where it is known which there are."""
    present = [device for device in rehearser.budgets if device.is_accelerator]
    if not rehearser.is_all or not present:
        return
    for device in _unlimited(device_map, rehearser.budgets):
        keys = [key for key, value in device_map.items() if value == device]
        others = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        yield Finding(
            "no-such-device",
            "error",
            str(device.map_value),
            f"{keys[0]}{others} {'are' if others else 'is'} put on {device.label}, and there is but {listing(present)}",
            f"put {'them' if others else 'it'} elsewhere, or name the devices: --gpus, --max-memory",
            "loading fails",
        )


def _unlimited(device_map: Mapping[str, Device], budgets: Mapping[Device, int]) -> list[Device]:
    used = sorted({device for device in device_map.values() if device.is_accelerator})
    return [device for device in used if device not in budgets]


def _budget_notes(document: MapFile, device_map: Mapping[str, Device], rehearser: Rehearser) -> Iterator[str]:
    """What is to be known of budgets: those of weights alone, and accelerators that only the map or they name."""
    budgets = rehearser.budgets
    if document.weights_only and not budgets:
        yield "the map's budgets cap weights alone (--weights-only) and limit nothing here; --max-memory would"
    used = set(device_map.values())
    unused = [device for device in budgets if device.is_accelerator and device not in used]
    unlimited = [] if rehearser.is_all else _unlimited(device_map, budgets)
    if unused:
        yield f"the map puts nothing on {listing(unused)}"
    if budgets and unlimited:
        yield f"no budget is given for {listing(unlimited)}, so any size fits there"


def _is_told_better(finding: Finding, forecast: Forecast) -> bool:
    """Whether a rehearsal says of the same device how much is missing for more than the weights."""
    short = {other.module for other in forecast.findings if other.code == "out-of-memory"}
    return finding.code == "over-budget" and finding.module in short


def _with_copies(finding: Finding, forecast: Forecast) -> Finding:
    """What a rehearsal showed of a buffer that the map leaves out."""
    copies = [
        copy for copy in forecast.copies if not copy.source.is_accelerator and is_ancestor(finding.module, copy.module)
    ]
    if finding.code != "uncovered-buffer" or not copies:
        return finding
    when = "every token" if any(copy.phase == PHASES[-1] for copy in copies) else "every prompt"
    devices = listing(dict.fromkeys(copy.target for copy in copies))
    return replace(finding, consequence=f"{finding.consequence}, and {when} copies it to {devices}")


def _of_another_model(message: str, model_id: str) -> RequestError:
    return RequestError(message, f"plan again: devmap plan {shlex.quote(model_id)} -o map.json")


def to_document(
    report: CheckReport, repaired: Repair | None, written: str | None, rehearser: Rehearser
) -> dict[str, Any]:
    """The answer of `devmap check --json`.

    Args:
        repaired: what --fix made of the map, or None.
        written: the file that the repaired map was written to, or None.
    """
    document: dict[str, Any] = {
        "format": FORMAT,
        "model": {"id": rehearser.spec.model_id, "class": rehearser.spec.class_name, "dtype": rehearser.spec.dtype},
        "workload": rehearser.workload.to_document(),
        **report.to_document(),
    }
    if repaired is not None:
        changes = [change.to_document() for change in repaired.changes]
        document["fixed"] = {"file": written, "changes": changes, **repaired.report.to_document()}
    return document
