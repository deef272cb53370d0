"""What this machine has: accelerators, host RAM (as far as cgroups allow) and disk."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from devmap_cli.devices.device import CPU, DISK, Device

_CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class DetectedDevice:
    """One device of this machine, with what it has and what is free now, in bytes."""

    device: Device
    name: str
    total_bytes: int
    free_bytes: int


def detect(kinds: Iterable[Device] | None = None) -> tuple[DetectedDevice, ...]:
    """The devices of this machine, accelerators first.

    Args:
        kinds: look only for these; None looks for all. torch is imported only to look for accelerators.
    """
    wanted = None if kinds is None else set(kinds)
    found: list[DetectedDevice] = []
    if wanted is None or any(device.is_accelerator for device in wanted):
        found += _accelerators()
    if wanted is None or CPU in wanted:
        found.append(_host_ram())
    if wanted is None or DISK in wanted:
        found.append(_disk())
    return tuple(item for item in found if wanted is None or item.device in wanted)


def accelerator_kind() -> str | None:
    """The kind of this machine's accelerators by `torch.accelerator`, or None without any."""
    import torch

    current = torch.accelerator.current_accelerator(check_available=True)
    return None if current is None else current.type


def _accelerators() -> list[DetectedDevice]:
    import torch

    kind = accelerator_kind()
    if kind is None:
        return []
    if kind == "mps":
        return [_unified_memory()]
    found = []
    for index in range(torch.accelerator.device_count()):
        free_bytes, total_bytes = torch.accelerator.get_memory_info(index)
        found.append(DetectedDevice(Device(kind, index), _device_name(kind, index), total_bytes, free_bytes))
    return found


def _device_name(kind: str, index: int) -> str:
    import torch

    module = torch.get_device_module(kind)
    return str(module.get_device_name(index)) if hasattr(module, "get_device_name") else f"{kind}:{index}"


def _unified_memory() -> DetectedDevice:
    import torch

    total_bytes = torch.mps.recommended_max_memory()
    taken = torch.mps.driver_allocated_memory()
    return DetectedDevice(Device("mps"), "Apple GPU (unified memory)", total_bytes, max(0, total_bytes - taken))


def _host_ram() -> DetectedDevice:
    import psutil

    memory = psutil.virtual_memory()
    total_bytes, free_bytes = memory.total, memory.available
    limit = _cgroup_limit()
    if limit is not None and limit[0] < total_bytes:
        total_bytes, free_bytes = limit[0], min(free_bytes, limit[0] - limit[1])
    return DetectedDevice(CPU, "host RAM", total_bytes, max(0, free_bytes))


def _cgroup_limit() -> tuple[int, int] | None:
    """Memory limit and use of this process's cgroup (v2, then v1), in bytes, or None without a limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit_text = (_CGROUP_ROOT / limit).read_text().strip()
            used_text = (_CGROUP_ROOT / used).read_text().strip()
        except OSError:
            continue
        if limit_text.isdigit() and used_text.isdigit():
            return int(limit_text), int(used_text)
    return None


def _disk() -> DetectedDevice:
    folder = tempfile.gettempdir()
    usage = shutil.disk_usage(folder)
    return DetectedDevice(DISK, f"disk of {folder}", usage.total, usage.free)
