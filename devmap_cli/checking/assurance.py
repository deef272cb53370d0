"""Rehearses a placement before it is written down: what devices still lack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from devmap_cli.errors import FindingsError

if TYPE_CHECKING:
    from devmap_cli.checking.rehearsed import Rehearser
    from devmap_cli.devices.device import Device


@dataclass
class Assurance:
    """Rehearses device maps of one model, each once."""

    rehearser: Rehearser
    _seen: dict[tuple[tuple[str, Device], ...], dict[Device, int]] = field(default_factory=dict, init=False)

    def missing(self, device_map: Mapping[str, Device]) -> dict[Device, int]:
        """What each device lacks for the run, in bytes; empty where it runs.

        Raises:
            FindingsError: memory is not what stops it.
        """
        key = tuple(device_map.items())
        if key not in self._seen:
            self._seen[key] = self._rehearse(device_map)
        return self._seen[key]

    def _rehearse(self, device_map: Mapping[str, Device]) -> dict[Device, int]:
        forecast = self.rehearser.forecast(device_map)
        if forecast.stopped_in is None:
            return {}
        lacking = {
            item.device: max(1, -(item.free_bytes or 0)) for item in forecast.devices if (item.free_bytes or 0) < 0
        }
        if not lacking:
            finding = forecast.findings[0]
            raise FindingsError(f"the rehearsal of the plan fails: {finding.message}", finding.fix)
        return lacking
