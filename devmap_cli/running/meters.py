"""Memory of one device over a run, by the interface that the device has: one meter per kind."""

from __future__ import annotations

import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from devmap_cli.devices.detection import detect
from devmap_cli.devices.device import CPU, Device

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_SAMPLE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes on one device, now and at their highest since the meter started; None where it cannot tell."""

    allocated_bytes: int
    reserved_bytes: int | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    free_bytes: int
    total_bytes: int


class MemoryMeter(Protocol):
    """Measures one device between `__enter__`, which resets the peaks, and `__exit__`.

    `basis` says in a few words what the figures count.
    """

    @property
    def basis(self) -> str:
        """What the figures count."""

    def __enter__(self) -> MemoryMeter: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def read(self) -> MemoryReading:
        """The figures now."""

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""


def meter_for(device: Device, offload_folder: Path | None) -> MemoryMeter:
    """The meter of a device of this machine; a disk is the one of `offload_folder`."""
    if device.kind == "cpu":
        return HostMeter()
    if device.kind == "disk":
        return DiskMeter(offload_folder or Path.cwd())
    return MpsMeter() if device.kind == "mps" else AcceleratorMeter(device)


class AcceleratorMeter:
    """A device whose torch module counts like torch.cuda: cuda, xpu, npu, and simulated ones."""

    def __init__(self, device: Device) -> None:
        import torch

        simulated = " of a simulated device" if device.kind == "sim" else ""
        self.basis = f"tensors and cache of torch's allocator{simulated}"
        self._index = device.index or 0
        self._module: Any = torch.get_device_module(device.kind)

    def __enter__(self) -> AcceleratorMeter:
        self._module.reset_peak_memory_stats(self._index)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self) -> MemoryReading:
        """The figures now."""
        free_bytes, total_bytes = self._module.mem_get_info(self._index)
        return MemoryReading(
            allocated_bytes=self._module.memory_allocated(self._index),
            reserved_bytes=self._module.memory_reserved(self._index),
            peak_allocated_bytes=self._module.max_memory_allocated(self._index),
            peak_reserved_bytes=self._module.max_memory_reserved(self._index),
            free_bytes=free_bytes,
            total_bytes=total_bytes,
        )

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        self._module.synchronize(self._index)


class MpsMeter:
    """Apple's GPU, which keeps no peaks: they are sampled."""

    basis = "tensors and driver memory of torch's Metal allocator, peaks sampled"

    def __init__(self) -> None:
        import torch

        self._mps = torch.mps
        self._allocated = _Sampler(self._mps.current_allocated_memory)
        self._reserved = _Sampler(self._mps.driver_allocated_memory)

    def __enter__(self) -> MpsMeter:
        self._allocated.start()
        self._reserved.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._allocated.stop()
        self._reserved.stop()

    def read(self) -> MemoryReading:
        """The figures now."""
        allocated_bytes, peak_allocated_bytes = self._allocated.read()
        reserved_bytes, peak_reserved_bytes = self._reserved.read()
        total_bytes = self._mps.recommended_max_memory()
        return MemoryReading(
            allocated_bytes,
            reserved_bytes,
            peak_allocated_bytes,
            peak_reserved_bytes,
            max(0, total_bytes - reserved_bytes),
            total_bytes,
        )

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        self._mps.synchronize()


class HostMeter:
    """Host RAM: what is resident of the whole process, Python and libraries included, and its peak."""

    def __init__(self) -> None:
        import psutil

        process = psutil.Process()
        self._resident = _KernelPeak() if _KernelPeak.is_kept() else _Sampler(lambda: int(process.memory_info().rss))
        self.basis = f"resident memory of the whole process, peak {self._resident.how}"

    def __enter__(self) -> HostMeter:
        self._resident.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._resident.stop()

    def read(self) -> MemoryReading:
        """The figures now."""
        resident_bytes, peak_bytes = self._resident.read()
        (host,) = detect([CPU])
        return MemoryReading(resident_bytes, None, peak_bytes, None, host.free_bytes, host.total_bytes)

    def synchronize(self) -> None:
        """Nothing to wait for: the host computes in step."""


class DiskMeter:
    """A disk: the files of the offload folder. Weights read where they already lie are not among them."""

    basis = "files written to the offload folder"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before_bytes = 0

    def __enter__(self) -> DiskMeter:
        self._before_bytes = self._used()
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self) -> MemoryReading:
        """The figures now; files are only added, so the peak is what is there."""
        written_bytes = self._used() - self._before_bytes
        usage = shutil.disk_usage(self._folder)
        return MemoryReading(written_bytes, None, written_bytes, None, usage.free, usage.total)

    def synchronize(self) -> None:
        """Nothing to wait for: writing is done in step."""

    def _used(self) -> int:
        return sum(path.stat().st_size for path in self._folder.glob("*.safetensors"))


class _KernelPeak:
    """Resident memory and its peak as Linux keeps them (proc_pid_status(5): VmRSS, VmHWM), at no cost to the run."""

    how = "kept by the kernel"
    _STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    @classmethod
    def is_kept(cls) -> bool:
        """Whether this system keeps the peak and lets it be set back."""
        try:
            cls._CLEAR.write_text("5")
            return cls().read()[1] > 0
        except (OSError, KeyError):
            return False

    def start(self) -> None:
        self._CLEAR.write_text("5")  # proc_pid_clear_refs(5): sets VmHWM to VmRSS

    def stop(self) -> None:
        """Nothing runs that would have to end."""

    def read(self) -> tuple[int, int]:
        """The figure now, and its peak, in bytes."""
        lines = (line.partition(":") for line in self._STATUS.read_text().splitlines())
        kib = {name: text.split()[0] for name, _, text in lines if name in ("VmRSS", "VmHWM")}
        return 1024 * int(kib["VmRSS"]), 1024 * int(kib["VmHWM"])


class _Sampler:
    """The highest value of a figure, read every few milliseconds by a thread of its own."""

    how = "sampled"

    def __init__(self, figure: Callable[[], int]) -> None:
        self._figure = figure
        self._peak = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="devmap-memory", daemon=True)

    def start(self) -> None:
        self._peak = self._figure()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def read(self) -> tuple[int, int]:
        """The figure now, and its peak."""
        now = self._figure()
        self._peak = max(self._peak, now)
        return now, self._peak

    def _run(self) -> None:
        while not self._stopped.wait(_SAMPLE_SECONDS):
            self.read()
