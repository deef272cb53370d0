"""What crosses between devices for each token."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from devmap_cli.devices.device import Device
from devmap_cli.model.names import owner
from devmap_cli.model.spec import ModelSpec


def transfers(spec: ModelSpec, device_map: Mapping[str, Device]) -> dict[tuple[Device, Device], int]:
    """Bytes per token that go from one device to another, by the output of the last module before each change.

    Follows the modules that hand on one row per token, in execution order; cpu and disk count as one place, since
    weights are what moves there.
    """
    steps = [
        (device_map[key], spec.output_bytes_per_token[fqn])
        for fqn in spec.execution_order
        if fqn in spec.output_bytes_per_token and (key := owner(fqn, device_map)) is not None
    ]
    crossing: dict[tuple[Device, Device], int] = {}
    for (source, num_bytes), (target, _) in pairwise(steps):
        if source != target and source.is_accelerator and target.is_accelerator:
            crossing[source, target] = crossing.get((source, target), 0) + num_bytes
    return crossing
