"""What this machine has, with faked cgroup files and accelerators."""

from __future__ import annotations

import types
from pathlib import Path

import psutil
import pytest
import torch

from devmap_cli.devices import detection
from devmap_cli.devices.detection import DetectedDevice, detect
from devmap_cli.devices.device import CPU, DISK, Device

GIB = 2**30


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cgroup tree, on a machine with 64 GiB of which 50 are free; the process is in /jobs/17."""
    memory = types.SimpleNamespace(total=64 * GIB, available=50 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    root = tmp_path / "cgroup"
    root.mkdir()
    own = tmp_path / "own"
    own.write_text("0::/jobs/17\n")
    monkeypatch.setattr(detection, "_CGROUP_ROOT", root)
    monkeypatch.setattr(detection, "_OWN_CGROUPS", own)
    return root


def write(folder: Path, **texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def host_ram() -> tuple[int, int]:
    (found,) = detect([CPU])
    assert (found.device, found.name) == (CPU, "host RAM")
    return found.total_bytes // GIB, found.free_bytes // GIB


def test_host_ram_without_cgroups(cgroups: Path) -> None:
    assert cgroups.exists()
    assert host_ram() == (64, 50)


def test_host_ram_in_a_container(cgroups: Path) -> None:
    write(cgroups, memory__max=str(16 * GIB), memory__current=str(6 * GIB))
    assert host_ram() == (16, 10)


def test_file_cache_is_not_counted_as_used(cgroups: Path) -> None:
    stat = f"anon {GIB}\ninactive_file {4 * GIB}\nactive_file {GIB}"
    write(cgroups, memory__max=str(16 * GIB), memory__current=str(6 * GIB), memory__stat=stat)
    assert host_ram() == (16, 14)


def test_never_more_free_than_the_machine_has(cgroups: Path) -> None:
    write(cgroups, memory__max=str(60 * GIB), memory__current=str(GIB))
    assert host_ram() == (60, 50)


@pytest.mark.parametrize("limit", ["max", str(2**63 - 4096), str(128 * GIB)])
def test_no_limit_or_one_above_the_machine(cgroups: Path, limit: str) -> None:
    write(cgroups, memory__max=limit, memory__current=str(GIB))
    assert host_ram() == (64, 50)


def test_the_tightest_limit_of_the_groups_above_counts(cgroups: Path) -> None:
    write(cgroups / "jobs", memory__max=str(8 * GIB), memory__current=str(3 * GIB))
    write(cgroups / "jobs" / "17", memory__max=str(12 * GIB), memory__current=str(2 * GIB))
    write(cgroups / "jobs" / "18", memory__max=str(GIB), memory__current="0")  # somebody else's
    assert host_ram() == (8, 5)


def test_version_1_of_cgroups(cgroups: Path, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("7:cpu,cpuacct:/x\n4:memory:/job\n1:name=systemd:/y\n")
    limits = {"memory__limit_in_bytes": str(4 * GIB), "memory__usage_in_bytes": str(3 * GIB)}
    write(cgroups / "memory" / "job", **limits, memory__stat=f"total_inactive_file {GIB}")
    assert host_ram() == (4, 2)


def test_use_above_the_limit_leaves_nothing(cgroups: Path) -> None:
    write(cgroups, memory__max=str(4 * GIB), memory__current=str(5 * GIB))
    assert host_ram() == (4, 0)


def test_disk() -> None:
    (found,) = detect([DISK])
    assert found.device == DISK
    assert 0 < found.free_bytes <= found.total_bytes


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str | None, memory: list[tuple[int, int]]) -> None:
    """Let torch say that the machine has accelerators of `kind` with (free, total) bytes each."""
    monkeypatch.setattr(detection, "_DRIVER_FILES", ("null",))
    current = None if kind is None else types.SimpleNamespace(type=kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: current)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(memory))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda index: memory[index])
    module = types.SimpleNamespace(get_device_name=lambda index: f"Card {index}")
    monkeypatch.setattr(torch, "get_device_module", lambda _kind: module)


def test_accelerators_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "cuda", [(3 * GIB, 4 * GIB), (8 * GIB, 8 * GIB)])
    found = detect()
    assert [item.device for item in found] == [Device("cuda", 0), Device("cuda", 1), CPU, DISK]
    assert found[0] == DetectedDevice(Device("cuda", 0), "Card 0", 4 * GIB, 3 * GIB)


@pytest.mark.parametrize("file", ["nvidiactl", "dxg", "kfd", "dri/renderD128", "davinci0", "accel"])
def test_torch_is_asked_where_a_driver_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str) -> None:
    files = detection._DRIVER_FILES
    pretend(monkeypatch, "cuda", [(3 * GIB, 4 * GIB)])
    monkeypatch.setattr(detection, "_DRIVER_FILES", files)
    monkeypatch.setattr(detection, "_DEV", tmp_path)
    monkeypatch.setattr("sys.platform", "linux")
    (tmp_path / "null").touch()
    assert [item.device for item in detect()] == [CPU, DISK]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    assert [item.device for item in detect()] == [Device("cuda", 0), CPU, DISK]


def test_only_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "cuda", [(3 * GIB, 4 * GIB), (8 * GIB, 8 * GIB)])
    assert [item.device for item in detect([Device("cuda", 1), CPU])] == [Device("cuda", 1), CPU]
    assert detect([Device("npu", 0)]) == ()
    assert detect([]) == ()


def test_a_number_means_the_machines_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "npu", [(3 * GIB, 4 * GIB), (8 * GIB, 8 * GIB)])
    assert [item.device for item in detect()][:2] == [Device("npu", 0), Device("npu", 1)]
    (by_number,) = detect([Device.parse("1")])
    assert (by_number.device, by_number.total_bytes) == (Device.parse("1"), 8 * GIB)


def test_unified_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "mps", [])
    mps = types.SimpleNamespace(recommended_max_memory=lambda: 18 * GIB, driver_allocated_memory=lambda: 2 * GIB)
    monkeypatch.setattr(torch, "mps", mps)
    assert [(item.device, item.total_bytes, item.free_bytes) for item in detect([Device("mps")])] == [
        (Device("mps"), 18 * GIB, 16 * GIB)
    ]


def test_a_machine_without_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None, [])
    assert [item.device for item in detect()] == [CPU, DISK]


def test_a_share_of_a_disk_is_of_what_is_free() -> None:
    assert DetectedDevice(DISK, "disk", total_bytes=100, free_bytes=40).shared_bytes == 40
    assert DetectedDevice(CPU, "host RAM", total_bytes=100, free_bytes=40).shared_bytes == 100
