"""What a check finds, as the command line, scripts and `run` read it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from devmap_cli.devices.device import Device

Code = Literal[
    "old-name",
    "mixed-accelerators",
    "uncovered-parameter",
    "uncovered-buffer",
    "unmatched-key",
    "overlapping-keys",
    "split-block",
    "split-tie",
    "no-such-device",
    "over-budget",
    "quantized-on-cpu",
    "quantized-on-old-card",
    "back-and-forth",
    "mostly-on-cpu",
    "mixed-devices",
    "out-of-memory",
    "run-fails",
    "not-rehearsed",
    "too-long",
]
"""In the order in which they are told."""
Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong with a map.

    Args:
        code: what kind of thing; stable, for scripts.
        severity: an error forbids a run; a warning does not.
        module: the module, tensor or key that it is about, or the device of an overfull one.
        message: what is wrong, one line.
        fix: the change to the map that would mend it, one line.
        consequence: what a run will do because of it, one line; "" where the message says it.
    """

    code: Code
    severity: Severity
    module: str
    message: str
    fix: str
    consequence: str = ""

    def to_document(self) -> dict[str, str]:
        """The finding as plain data."""
        return {
            "code": self.code,
            "severity": self.severity,
            "module": self.module,
            "message": self.message,
            "consequence": self.consequence,
            "fix": self.fix,
        }


def any_error(findings: Iterable[Finding]) -> bool:
    """Whether one of `findings` forbids a run."""
    return any(finding.severity == "error" for finding in findings)


def entry(name: str, device: Device) -> str:
    """The map's line for `name`, as JSON writes it."""
    return f"{quoted(name)}: {json.dumps(device.map_value)}"


def quoted(name: str) -> str:
    """`name` as a string of JSON, letters of any script as they are."""
    return json.dumps(name, ensure_ascii=False)


def listing(devices: Iterable[Device]) -> str:
    """Labels of devices, in words."""
    return " and ".join(device.label for device in devices)
