"""`check_document`: all that can be said of a map without running it, and of its repaired form."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from devmap_cli.checking.coverage import check_map
from devmap_cli.checking.findings import Finding, any_error, listing
from devmap_cli.checking.forecast import PHASES, Forecast
from devmap_cli.checking.layers import check_layers
from devmap_cli.checking.repair import Change, repair
from devmap_cli.checking.translation import translate_names
from devmap_cli.errors import RequestError
from devmap_cli.mapfile import MapFile
from devmap_cli.model.names import is_ancestor

if TYPE_CHECKING:
    from devmap_cli.checking.rehearsed import Rehearser
    from devmap_cli.devices.device import Device

FORMAT = "devmap.check/1"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What is wrong with a map, and what a run with it will take.

    `device_map` is the map in today's module names, `forecast` what its rehearsal foretells.
    """

    device_map: dict[str, Device]
    findings: tuple[Finding, ...]
    forecast: Forecast

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
    if sum(finding.code == "unmatched-key" for finding in found) == len(device_map):
        raise _of_another_model(
            f"the map is of another model: none of its keys names a part of {spec.class_name}", spec.model_id
        )
    forecast = rehearser.forecast(device_map)
    findings = (
        *old_names,
        *(_with_copies(finding, forecast) for finding in found if not _is_told_better(finding, forecast)),
        *check_layers(device_map, spec),
        *forecast.findings,
    )
    return CheckReport(device_map, findings, forecast)


def repair_document(document: MapFile, rehearser: Rehearser) -> Repair:
    """The map with what can be mended in it mended, checked again; without changes where there is nothing to mend."""
    translated, renamed, _ = translate_names(document.device_map, rehearser.spec)
    device_map, changes = repair(translated, rehearser.spec)
    renamings = tuple(Change(new, translated[new], f"was {old}") for old, new in renamed.items())
    report = check_document(replace(document, device_map=device_map), rehearser)
    remedy = report.forecast.remedy
    if remedy is not None:
        changes = (*changes, Change(remedy.module, remedy.device, "there its tensors meet those that it works with"))
        report = check_document(replace(document, device_map=remedy.applied(device_map)), rehearser)
    return Repair(_rewritten(document, report, rehearser), (*renamings, *changes), report)


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
            figures[item.device].map_device(item.budget_bytes) if item.device in figures else item
            for item in document.devices
        ),
        transfers=report.forecast.transfers(rehearser.workload.batch_size),
    )


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
