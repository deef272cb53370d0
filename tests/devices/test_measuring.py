"""Measuring this machine, and keeping the best of it for some days."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from devmap_cli.devices import measuring
from devmap_cli.devices.measuring import AGAIN_AFTER_SECONDS, MOST_KEPT, Measured, measured, measured_before

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


class Machine:
    """A machine whose speed and clock a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1e9
        self.share = 1.0
        self.disk: float | None = 1e9
        self.num_measured = 0
        monkeypatch.setattr(measuring, "measure", self._measure)
        monkeypatch.setattr(time, "time", lambda: self.now)

    def _measure(self, _folder: Path) -> Measured:
        self.num_measured += 1
        flops = {"float32": 1e11 * self.share, "bfloat16": 2e11 * self.share}
        return Measured(1e10 * self.share, flops, self.disk, None)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_slow_moment_is_made_good_some_days_later(machine: Machine, tmp_path: Path) -> None:
    machine.share = 0.25  # something else has three quarters of it
    assert measured(tmp_path).memory_bytes_per_second == 2.5e9
    machine.share = 1.0
    machine.now += AGAIN_AFTER_SECONDS - 1
    assert measured(tmp_path).memory_bytes_per_second == 2.5e9
    machine.now += 2
    assert measured(tmp_path) == Measured(1e10, {"float32": 1e11, "bfloat16": 2e11}, 1e9, None)
    assert machine.num_measured == 2


def test_the_best_of_each_figure_counts(machine: Machine, tmp_path: Path) -> None:
    measured(tmp_path)
    machine.now += AGAIN_AFTER_SECONDS
    machine.share, machine.disk = 0.5, 3e9
    expected = Measured(1e10, {"float32": 1e11, "bfloat16": 2e11}, 3e9, None)
    assert measured(tmp_path) == expected
    machine.now += AGAIN_AFTER_SECONDS
    machine.disk = None  # a file system that no longer drops pages
    assert measured(tmp_path) == expected
    assert measured_before(tmp_path) == expected


def test_what_a_machine_once_reached_is_forgotten(machine: Machine, tmp_path: Path) -> None:
    measured(tmp_path)
    machine.share = 0.5
    for _ in range(MOST_KEPT):
        machine.now += AGAIN_AFTER_SECONDS
        found = measured(tmp_path)
    assert found.memory_bytes_per_second == 5e9
    assert len(json.loads((tmp_path / "measured.json").read_bytes())["measurements"]) == MOST_KEPT


def test_a_clock_that_was_set_back_measures_anew(machine: Machine, tmp_path: Path) -> None:
    measured(tmp_path)
    machine.now -= 10
    measured(tmp_path)
    assert machine.num_measured == 2


def test_what_was_kept_is_found_however_old(machine: Machine, tmp_path: Path) -> None:
    assert measured_before(tmp_path) is None
    found = measured(tmp_path)
    machine.now += 100 * AGAIN_AFTER_SECONDS
    assert measured_before(tmp_path) == found
    assert machine.num_measured == 1
    assert measured_before(tmp_path, tmp_path / "another disk") is None


def test_the_best_of_one_measurement_is_itself() -> None:
    figures = replace(FIGURES, copy_bytes_per_second=5e9)
    assert measuring._best([figures]) == figures


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"key": 1}', '{"measurements": 1}', "\x00"])
def test_a_damaged_cache_is_measured_anew(calls: list[Path], tmp_path: Path, content: str) -> None:
    (tmp_path / "measured.json").write_text(content)
    assert measured(tmp_path) == FIGURES
    assert len(calls) == 1


def test_a_cache_that_cannot_be_written_is_no_failure(calls: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert measured(tmp_path / "file") == FIGURES
    assert len(calls) == 1
