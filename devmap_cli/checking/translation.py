"""Maps written for an older transformers, told in the installed one's module names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from devmap_cli.checking.coverage import left_out
from devmap_cli.checking.findings import Finding
from devmap_cli.model.old_names import translate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from devmap_cli.devices.device import Device
    from devmap_cli.model.spec import ModelSpec


def translate_names(
    device_map: Mapping[str, Device], spec: ModelSpec
) -> tuple[dict[str, Device], dict[str, str], tuple[Finding, ...]]:
    """`device_map` with today's names, the (old, new) names of what changed, and a finding for each.

    A key whose new name the map has already stays as it is.
    """
    fqns = frozenset(fqn for fqn, _ in spec.modules())
    translated: dict[str, Device] = {}
    renamed: dict[str, str] = {}
    for key, device in device_map.items():
        name = translate(key, spec, fqns)
        if name is None or name in device_map or name in translated:
            translated[key] = device
        else:
            translated[name] = device
            renamed[key] = name
    findings = (_old_name(old, new, left_out(device_map, f"{new}.weight")) for old, new in renamed.items())
    return translated, renamed, tuple(findings)


def _old_name(old: str, new: str, consequence: str) -> Finding:
    return Finding(
        "old-name",
        "error",
        old,
        f"{old} is what an older transformers called {new}",
        f"rename it to {new}",
        f"without that, {consequence}",
    )
