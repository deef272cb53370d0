"""Measuring this machine, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from devmap_cli.devices import measuring
from devmap_cli.devices.measuring import Measured, measured

if TYPE_CHECKING:
    from pathlib import Path

FIGURES = Measured(1e10, {"float32": 1e11}, None, None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    made: list[Path] = []

    def measure(folder: Path) -> Measured:
        made.append(folder)
        return FIGURES

    monkeypatch.setattr(measuring, "measure", measure)
    return made


def test_this_machine_has_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measuring, "SECONDS_EACH", 0.01)
    monkeypatch.setattr(measuring, "_MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr(measuring, "_DISK_BYTES", 8 << 20)
    monkeypatch.setattr(measuring, "_MATRIX_SIZE", 64)
    found = measuring.measure(tmp_path)
    assert found.memory_bytes_per_second > 0
    assert all(rate > 0 for rate in found.flops_per_second.values())
    assert found.disk_bytes_per_second is None or found.disk_bytes_per_second > 0
    assert list(tmp_path.iterdir()) == []


def test_it_is_measured_once(calls: list[Path], tmp_path: Path) -> None:
    cache, disk = tmp_path / "cache", tmp_path / "disk"
    assert measured(cache, disk) == FIGURES
    assert measured(cache, disk) == FIGURES
    assert calls == [disk]


def test_another_disk_is_measured_anew(calls: list[Path], tmp_path: Path) -> None:
    measured(tmp_path, tmp_path / "one")
    measured(tmp_path, tmp_path / "two")
    assert len(calls) == 2


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"key": 1}', "\x00"])
def test_a_damaged_cache_is_measured_anew(calls: list[Path], tmp_path: Path, content: str) -> None:
    (tmp_path / "measured.json").write_text(content)
    assert measured(tmp_path) == FIGURES
    assert len(calls) == 1


def test_a_cache_that_cannot_be_written_is_no_failure(calls: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert measured(tmp_path / "file") == FIGURES
    assert len(calls) == 1
