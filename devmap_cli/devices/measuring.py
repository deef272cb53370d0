"""Measures how fast this machine is: its memory, its CPU, its disk, and copies to its accelerator."""

from __future__ import annotations

import json
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from devmap_cli.files import atomic_write
from devmap_cli.installed import installed_version

SECONDS_EACH = 0.25
"""What each measurement may take beyond its first repetition."""
_MIB = 1 << 20
_MEMORY_BYTES = 256 * _MIB
"""Beyond what CPUs have as cache."""
_COPY_BYTES = 64 * _MIB
_DISK_BYTES = 128 * _MIB
_READ_BYTES = 4 * _MIB
_MATRIX_SIZE = 512
_FILE = "measured.json"
AGAIN_AFTER_SECONDS = 3 * 24 * 3600
"""So old, the last measurement is joined by another: it may have been made while the machine was busy."""
MOST_KEPT = 4
"""Of so many measurements the best figures count; what is older goes, since machines change."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What this machine reaches, per second.

    Args:
        memory_bytes_per_second: read and written while copying within host memory.
        flops_per_second: of a matrix product on the CPU, by torch's name of the dtype.
        disk_bytes_per_second: read of a mapped file that is not in memory; None where that cannot be told.
        copy_bytes_per_second: from ordinary host memory to the first accelerator; None without one.
    """

    memory_bytes_per_second: float
    flops_per_second: Mapping[str, float]
    disk_bytes_per_second: float | None
    copy_bytes_per_second: float | None


@dataclass(frozen=True, slots=True)
class _Measurement:
    """What was measured, and when (seconds since 1970)."""

    made_at: float
    figures: Measured


def measured(cache_folder: Path, disk_folder: Path | None = None) -> Measured:
    """What this machine reaches at best, measured anew every few days; that takes some three seconds.

    What is kept in `cache_folder` are the last measurements, since other programs may have slowed down any of them.
    `disk_folder` is where offloaded weights will lie, by default the folder for temporary files. A cache that cannot be
    read or written is no failure.
    """
    folder = _disk_folder(disk_folder)
    kept = _kept(cache_folder, folder)
    if not kept or not 0 <= time.time() - kept[-1].made_at < AGAIN_AFTER_SECONDS:
        kept = [*kept, _Measurement(time.time(), measure(folder))][-MOST_KEPT:]
        _keep(cache_folder, folder, kept)
    return _best(item.figures for item in kept)


def measured_before(cache_folder: Path, disk_folder: Path | None = None) -> Measured | None:
    """What `measured` kept, however old; None where nothing was measured yet."""
    kept = _kept(cache_folder, _disk_folder(disk_folder))
    return _best(item.figures for item in kept) if kept else None


def _disk_folder(given: Path | None) -> Path:
    return Path(tempfile.gettempdir()) if given is None else given


def _kept(cache_folder: Path, disk_folder: Path) -> list[_Measurement]:
    """The measurements of this machine, the oldest first; none of another or of a damaged file."""
    try:
        document = json.loads((cache_folder / _FILE).read_bytes())
        if document["key"] != _key(disk_folder):
            return []
        return [_Measurement(float(item["made_at"]), Measured(**item["figures"])) for item in document["measurements"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def _keep(cache_folder: Path, disk_folder: Path, kept: Sequence[_Measurement]) -> None:
    document = {"key": _key(disk_folder), "measurements": [asdict(item) for item in kept]}
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        atomic_write(cache_folder / _FILE, json.dumps(document).encode())
    except Exception:  # noqa: BLE001, S110 - whatever the disk says, the answer is there without the cache
        pass


def _best(measurements: Iterable[Measured]) -> Measured:
    """The highest of each figure."""
    found = list(measurements)
    return Measured(
        memory_bytes_per_second=max(item.memory_bytes_per_second for item in found),
        flops_per_second={
            dtype: max(item.flops_per_second.get(dtype, 0.0) for item in found) for dtype in found[-1].flops_per_second
        },
        disk_bytes_per_second=max(item.disk_bytes_per_second or 0.0 for item in found) or None,
        copy_bytes_per_second=max(item.copy_bytes_per_second or 0.0 for item in found) or None,
    )


def _key(disk_folder: Path) -> list[object]:
    return [platform.node(), os.cpu_count(), installed_version("torch"), str(disk_folder.resolve())]


def measure(disk_folder: Path) -> Measured:
    """Measure this machine now, reading from a file made in `disk_folder`."""
    return Measured(
        memory_bytes_per_second=_memory(),
        flops_per_second={dtype: _matmul(dtype) for dtype in ("float32", "bfloat16", "float16")},
        disk_bytes_per_second=_disk(disk_folder),
        copy_bytes_per_second=_copy(),
    )


def _best_seconds(action: Callable[[], object]) -> float:
    """The shortest of the repetitions that fit in the time, after one that does not count unless it took all of it."""
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < 2 or time.perf_counter() - started < SECONDS_EACH:
        before = time.perf_counter()
        action()
        times.append(time.perf_counter() - before)
        if len(times) == 1 and times[0] > SECONDS_EACH:
            break
    return min(times)


def _memory() -> float:
    import torch

    source, target = torch.ones(_MEMORY_BYTES // 4), torch.ones(_MEMORY_BYTES // 4)
    return 2 * _MEMORY_BYTES / _best_seconds(lambda: target.copy_(source))


def _matmul(dtype: str) -> float:
    import torch

    with torch.no_grad():
        matrix = torch.ones((_MATRIX_SIZE, _MATRIX_SIZE), dtype=getattr(torch, dtype))
        # as layers multiply: for `matrix @ matrix` in 16 bit, oneDNN has a path several times slower
        return 2 * _MATRIX_SIZE**3 / _best_seconds(lambda: torch.nn.functional.linear(matrix, matrix))


def _disk(folder: Path) -> float | None:
    """Reads a new file through a map, once its pages were dropped; None where the system does not drop them."""
    if not hasattr(os, "posix_fadvise"):
        return None
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            chunk = os.urandom(_MIB)
            for _ in range(_DISK_BYTES // _MIB):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return _read_rate(file.fileno())
    except OSError:
        return None


def _read_rate(descriptor: int) -> float:
    target = bytearray(_READ_BYTES)
    started, num_read = time.perf_counter(), 0
    with mmap.mmap(descriptor, _DISK_BYTES, prot=mmap.PROT_READ) as pages, memoryview(pages) as view:
        while num_read < _DISK_BYTES and time.perf_counter() - started < 4 * SECONDS_EACH:
            target[:] = view[num_read : num_read + _READ_BYTES]
            num_read += _READ_BYTES
    return num_read / (time.perf_counter() - started)


def _copy() -> float | None:
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)

    def copy() -> None:
        source.to(device)
        torch.accelerator.synchronize()

    return _COPY_BYTES / _best_seconds(copy)
