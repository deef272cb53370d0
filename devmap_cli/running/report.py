"""What a run took, beside what was planned."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from devmap_cli.devices.device import Device
    from devmap_cli.mapfile import MapDevice
    from devmap_cli.running.meters import MemoryReading

REPORT_FORMAT = "devmap.run/1"


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device: what the map planned (None for a bare map) and what was measured.

    `weights_bytes` counts the tensors that are there after loading; `basis` says what `memory` counts.
    """

    device: Device
    planned: MapDevice | None
    weights_bytes: int
    memory: MemoryReading
    basis: str


@dataclass(frozen=True, slots=True)
class Generation:
    """What was generated, and how fast; all measured.

    `num_new_tokens` are those of the first sequence; `decode_tokens_per_second` counts all sequences, without
    each one's first token, and is None where there was no second. `texts` has one text per sequence.
    """

    texts: tuple[str, ...]
    num_prompt_tokens: int
    num_new_tokens: int
    stop_reason: str
    seconds_to_first_token: float
    decode_tokens_per_second: float | None
    seconds: float
    used_chat_template: bool


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run: the model, its devices, the generation and what was remarked on the way."""

    model_id: str
    class_name: str
    batch_size: int
    load_seconds: float
    devices: tuple[DeviceReport, ...]
    generation: Generation
    warnings: tuple[str, ...] = ()

    def to_document(self) -> dict[str, Any]:
        """The report as data: planned and measured figures apart, sizes in integer `*_bytes`."""
        generation = asdict(self.generation)
        generation["texts"] = list(self.generation.texts)
        return {
            "format": REPORT_FORMAT,
            "model": {"id": self.model_id, "class": self.class_name},
            "text": self.generation.texts[0],
            "batch_size": self.batch_size,
            "devices": [_device_document(item) for item in self.devices],
            "measured": {"load_seconds": self.load_seconds, **generation},
            "warnings": list(self.warnings),
        }


def _device_document(item: DeviceReport) -> dict[str, Any]:
    planned = item.planned
    return {
        "device": item.device.map_value,
        "planned": None
        if planned is None
        else {
            "budget_bytes": planned.budget_bytes,
            "weights_bytes": planned.weights_bytes,
            "kv_cache_bytes": planned.kv_cache_bytes,
            "activation_bytes": planned.activation_bytes,
            "overhead_bytes": planned.overhead_bytes,
            "peak_bytes": planned.peak_bytes,
        },
        "measured": {"weights_bytes": item.weights_bytes, **asdict(item.memory), "basis": item.basis},
    }
