"""Names of devices, as people write them and as a device map holds them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

ACCELERATOR_KINDS = ("cuda", "xpu", "npu", "mps", "sim")
MAX_INDEX = 1023
"""More accelerators than any one machine has."""
DEVICES_HINT = "devices are 0, 1 and so on, cuda:0, npu:0, xpu:0, mps, cpu and disk"
_INDEXED = re.compile(r"(?:(?P<kind>[a-z]+):)?(?P<index>[0-9]+)")


class DeviceError(ValueError):
    """Text that names no device."""


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """One place a module can live: an accelerator, `cpu` (host RAM) or `disk`.

    `kind` is "cuda" also where only a number was given: a number means the machine's own accelerators, of whatever
    kind, and `map_value` gives the number back.
    """

    kind: str
    index: int | None = None

    @classmethod
    def parse(cls, text: str | int) -> Device:
        """Read `0`, `cuda:0`, `npu:0`, `xpu:0`, `mps`, `cpu` or `disk`, in any case.

        Raises:
            DeviceError: the text names no device.
        """
        if isinstance(text, bool):
            raise DeviceError(f"{text} is no device")
        name = str(text).strip().lower()
        if name in ("cpu", "disk", "mps"):
            return cls(name)
        match = _INDEXED.fullmatch(name)
        if match is None or match["kind"] not in (None, *ACCELERATOR_KINDS):
            raise DeviceError(f"{str(text)!r} is no device")
        if len(match["index"].lstrip("0")) > len(str(MAX_INDEX)) or int(match["index"]) > MAX_INDEX:
            raise DeviceError(f"{name[:20]!r} is no device: no machine has a number above {MAX_INDEX}")
        if match["kind"] == "mps":
            return cls("mps")
        return cls(match["kind"] or "cuda", int(match["index"]))

    @property
    def is_accelerator(self) -> bool:
        """Whether this is neither host RAM nor disk."""
        return self.kind not in ("cpu", "disk")

    @property
    def map_value(self) -> int | str:
        """What a device map holds for it: an integer for the machine's default accelerators, else a name."""
        return self.index if self.kind == "cuda" and self.index is not None else str(self)

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}:{self.index}"

    @property
    def label(self) -> str:
        """A short name for tables: `GPU 0`, `npu:1`, `cpu`, `disk`."""
        return f"GPU {self.index}" if self.kind == "cuda" else str(self)


CPU = Device("cpu")
DISK = Device("disk")


def main_device(devices: Iterable[Device]) -> Device:
    """The device that computes for what is on cpu and disk: an accelerator among `devices`, else cpu.

    accelerate's `dispatch_model` takes what comes first in a set of the map's values: for numbers below eight that is
    the smallest. For names it is any; the smallest is taken here.
    """
    accelerators = [device for device in devices if device.is_accelerator]
    if not accelerators:
        return CPU
    values = {device.map_value: device for device in accelerators}
    if any(isinstance(value, str) for value in values):
        return min(accelerators)
    return values[next(iter(set(values)))]
