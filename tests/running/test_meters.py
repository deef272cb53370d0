from __future__ import annotations

import gc
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from devmap_cli.devices.device import CPU, DISK, Device
from devmap_cli.running.meters import AcceleratorMeter, MpsMeter, meter_for

MIB = 1 << 20


def test_host_memory_and_its_peak() -> None:
    with meter_for(CPU, None) as meter:
        before = meter.read()
        block = bytearray(64 * MIB)
        time.sleep(0.1)
        del block
        gc.collect()
        after = meter.read()
    assert after.peak_allocated_bytes - before.allocated_bytes >= 60 * MIB
    assert after.allocated_bytes < after.peak_allocated_bytes
    assert after.total_bytes >= after.free_bytes > 0
    assert after.reserved_bytes is None


def test_disk_counts_what_was_written_to_the_folder(tmp_path: Path) -> None:
    (tmp_path / "before.safetensors").write_bytes(b"x" * 1000)
    with meter_for(DISK, tmp_path) as meter:
        (tmp_path / "after.safetensors").write_bytes(b"x" * 234)
        reading = meter.read()
    assert reading.allocated_bytes == reading.peak_allocated_bytes == 234
    assert reading.total_bytes >= reading.free_bytes > 0


def test_an_accelerator_is_read_by_its_torch_module(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    calls: list[tuple[str, int]] = []

    def figure(name: str, value: object) -> object:
        def read(index: int) -> object:
            calls.append((name, index))
            return value

        return read

    module = SimpleNamespace(
        reset_peak_memory_stats=figure("reset", None),
        synchronize=figure("synchronize", None),
        memory_allocated=figure("allocated", 1),
        memory_reserved=figure("reserved", 2),
        max_memory_allocated=figure("peak allocated", 3),
        max_memory_reserved=figure("peak reserved", 4),
        mem_get_info=figure("info", (5, 6)),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda kind: {"npu": module}[kind])
    with meter_for(Device("npu", 3), None) as meter:
        assert isinstance(meter, AcceleratorMeter)
        meter.synchronize()
        reading = meter.read()
    assert calls[:2] == [("reset", 3), ("synchronize", 3)]
    assert {index for _, index in calls} == {3}
    assert (reading.allocated_bytes, reading.reserved_bytes) == (1, 2)
    assert (reading.peak_allocated_bytes, reading.peak_reserved_bytes) == (3, 4)
    assert (reading.free_bytes, reading.total_bytes) == (5, 6)


def test_apples_gpu_has_its_peaks_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    allocated = [10]
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: allocated[0])
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: allocated[0] + 5)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 100)
    with meter_for(Device("mps"), None) as meter:
        assert isinstance(meter, MpsMeter)
        allocated[0] = 70
        time.sleep(0.1)
        allocated[0] = 20
        reading = meter.read()
    assert (reading.allocated_bytes, reading.peak_allocated_bytes) == (20, 70)
    assert (reading.reserved_bytes, reading.peak_reserved_bytes) == (25, 75)
    assert (reading.free_bytes, reading.total_bytes) == (75, 100)


def test_the_host_s_peak_outlives_what_made_it() -> None:
    with meter_for(CPU, None) as meter:
        before = meter.read()
        block = bytearray(200 << 20)  # 200 MiB, written to and let go
        del block
        after = meter.read()
    assert after.peak_allocated_bytes - before.allocated_bytes > 150 << 20
    assert after.peak_allocated_bytes >= after.allocated_bytes
