"""Checks of maps for models that are a config.json, for the tests of rehearsed findings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from devmap_cli.checking.check import CheckReport, Repair, check_document, repair_document
from devmap_cli.checking.findings import Finding
from devmap_cli.checking.rehearsed import Rehearser
from devmap_cli.devices.device import Device
from devmap_cli.mapfile import MapFile, MapWorkload
from devmap_cli.model.load import empty_model, load_spec
from tests.support.toys import write_config

SHORT = MapWorkload(prompt_tokens=32, max_new_tokens=8)


class Subject:
    """A model, and checks of bare maps for it."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = write_config(folder, config)
        self.spec = load_spec(str(self.folder))
        self._model = empty_model(self.spec, trust_remote_code=False)

    def check(
        self,
        device_map: Mapping[str, int | str],
        budgets: Mapping[int | str, int] | None = None,
        workload: MapWorkload = SHORT,
    ) -> CheckReport:
        return check_document(bare(device_map), self.rehearser(budgets, workload))

    def repair(self, device_map: Mapping[str, int | str], workload: MapWorkload = SHORT) -> Repair:
        return repair_document(bare(device_map), self.rehearser(None, workload))

    def rehearser(self, budgets: Mapping[int | str, int] | None, workload: MapWorkload = SHORT) -> Rehearser:
        by_device = {Device.parse(name): size for name, size in (budgets or {}).items()}
        return Rehearser(self._model, self.spec, workload, by_device)


def bare(device_map: Mapping[str, int | str]) -> MapFile:
    return MapFile({key: Device.parse(device) for key, device in device_map.items()})


def codes(report: CheckReport) -> list[str]:
    return [finding.code for finding in report.findings]


def the(code: str, report: CheckReport) -> Finding:
    """The one finding of this code."""
    (finding,) = [finding for finding in report.findings if finding.code == code]
    return finding
