"""What this machine has: accelerators, host RAM (as far as cgroups allow) and disk."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from devmap_cli.devices.device import CPU, DISK, Device

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_DEV = Path("/dev")
_DRIVER_FILES = ("nvidia*", "nvhost*", "nvgpu*", "nvmap", "dxg", "kfd", "dri/render*", "davinci*", "accel*")
"""NVIDIA's, also on Jetson and within Windows, AMD's, Intel's, Huawei's, and those of Linux's own accel subsystem."""
_CGROUP_FILES = (  # limit, use, and the statistic of file cache that can be dropped: v2, then v1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True, slots=True)
class DetectedDevice:
    """One device of this machine, with what it has and what is free now, in bytes."""

    device: Device
    name: str
    total_bytes: int
    free_bytes: int

    @property
    def shared_bytes(self) -> int:
        """What a share refers to: the total, but of a disk, much of which is taken for good, what is free."""
        return self.free_bytes if self.device == DISK else self.total_bytes


def detect(kinds: Iterable[Device] | None = None) -> tuple[DetectedDevice, ...]:
    """The devices of this machine, accelerators first.

    Args:
        kinds: look only for these; None looks for all. torch is imported only to look for accelerators. One that
            was given by number alone is found among the machine's accelerators of whatever kind.
    """
    wanted = None if kinds is None else set(kinds)
    found: list[DetectedDevice] = []
    if wanted is None or any(device.is_accelerator for device in wanted):
        found += _accelerators()
    if wanted is None or CPU in wanted:
        found.append(_host_ram())
    if wanted is None or DISK in wanted:
        found.append(_disk())
    return tuple(found) if wanted is None else tuple(_only(wanted, found))


def _only(wanted: set[Device], found: Iterable[DetectedDevice]) -> Iterator[DetectedDevice]:
    for item in found:
        by_number = Device("cuda", item.device.index or 0)
        if item.device in wanted:
            yield item
        elif item.device.is_accelerator and by_number in wanted:
            yield replace(item, device=by_number)


def accelerator_kind() -> str | None:
    """The kind of this machine's accelerators by `torch.accelerator`, or None without any."""
    import torch

    current = torch.accelerator.current_accelerator(check_available=True)
    return None if current is None else current.type


def _accelerators() -> list[DetectedDevice]:
    if not _is_any_driver_here():
        return []
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


def _is_any_driver_here() -> bool:
    """Whether any driver of accelerators has its files in /dev; elsewhere than on Linux only torch can tell."""
    return sys.platform != "linux" or any(any(_DEV.glob(pattern)) for pattern in _DRIVER_FILES)


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
    """Limit and use of the tightest of this process's cgroups (v2 and v1), in bytes, or None without a limit.

    File cache that the kernel would give up is not counted as used (as Kubernetes counts a working set).
    """
    found = []
    for folder in _cgroup_folders():
        for limit, used, cache in _CGROUP_FILES:
            try:
                limit_text = (folder / limit).read_text().strip()
                used_text = (folder / used).read_text().strip()
            except OSError:
                continue
            if limit_text.isdigit() and used_text.isdigit():
                found.append((int(limit_text), max(0, int(used_text) - _statistic(folder / "memory.stat", cache))))
    return min(found, default=None)


def _cgroup_folders() -> Iterator[Path]:
    """The folders of this process's memory cgroups and of all above them; a limit may be set at any."""
    yield _CGROUP_ROOT
    yield _CGROUP_ROOT / "memory"
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            base = _CGROUP_ROOT / "memory" if controllers else _CGROUP_ROOT
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for length in range(len(parts), 0, -1):
                yield base.joinpath(*parts[:length])


def _statistic(path: Path, name: str) -> int:
    """One number of a memory.stat file; 0 where it is not there."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def _disk() -> DetectedDevice:
    folder = tempfile.gettempdir()
    usage = shutil.disk_usage(folder)
    return DetectedDevice(DISK, f"disk of {folder}", usage.total, usage.free)
