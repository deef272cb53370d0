"""map.json: the frozen nouns of format devmap.map/1, and deterministic writing."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from devmap_cli.devices.device import Device
from devmap_cli.errors import RequestError
from devmap_cli.files import atomic_write
from devmap_cli.model.kv_dtypes import AUTO, KV_DTYPES

if TYPE_CHECKING:
    pass

FORMAT = "devmap.map/1"
ATTENTIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
"""The names in transformers' `AttentionInterface`; a kernel from the hub has a slash in its name."""


@dataclass(frozen=True, slots=True)
class MapModel:
    """The model that a map is for: `id` is a hub id or a folder, `revision` the commit of a hub id."""

    id: str
    revision: str | None
    class_name: str
    dtype: str
    quantization: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class MapWorkload:
    """What a map was planned for; `images` are (height, width) in pixels, `videos` (height, width, frames).

    `kv_dtype` is what the KV cache is kept in, one of `KV_DTYPES`.
    """

    batch_size: int = 1
    prompt_tokens: int = 1
    max_new_tokens: int = 256
    images: tuple[tuple[int, int], ...] = ()
    attention: str = "sdpa"
    videos: tuple[tuple[int, int, int], ...] = ()
    kv_dtype: str = AUTO

    def to_document(self) -> dict[str, Any]:
        """The workload as plain data; `videos` only where there are some, `kv_dtype` where it is not auto."""
        return {
            "batch_size": self.batch_size,
            "prompt_tokens": self.prompt_tokens,
            "max_new_tokens": self.max_new_tokens,
            "images": [list(size) for size in self.images],
            **({"videos": [list(size) for size in self.videos]} if self.videos else {}),
            "attention": self.attention,
            **({"kv_dtype": self.kv_dtype} if self.kv_dtype != AUTO else {}),
        }


@dataclass(frozen=True, slots=True)
class MapDevice:
    """What was planned for one device, in bytes: the four parts add up to `peak_bytes`.

    `card` is what kind of device it is, as the table of cards names it, where that was known.
    """

    device: Device
    budget_bytes: int
    weights_bytes: int
    kv_cache_bytes: int = 0
    activation_bytes: int = 0
    overhead_bytes: int = 0
    card: str | None = None

    @property
    def peak_bytes(self) -> int:
        """The most that the device takes at any time."""
        return self.weights_bytes + self.kv_cache_bytes + self.activation_bytes + self.overhead_bytes

    @property
    def free_bytes(self) -> int:
        """What is left of the budget; below zero where the plan is over it."""
        return self.budget_bytes - self.peak_bytes


@dataclass(frozen=True, slots=True)
class MapTransfer:
    """Bytes that cross from one device to another for each token."""

    source: Device
    target: Device
    bytes_per_token: int


@dataclass(frozen=True, slots=True)
class MapFile:
    """One map: ours with all that a run needs, or a bare `{module: device}` with nothing but `device_map`.

    `weights_only` says that the budgets cap weights alone.
    """

    device_map: dict[str, Device]
    model: MapModel | None = None
    strategy: str | None = None
    workload: MapWorkload | None = None
    devices: tuple[MapDevice, ...] = ()
    transfers: tuple[MapTransfer, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    weights_only: bool = False

    def to_document(self) -> dict[str, Any]:
        """The JSON document, keys in the order of the format; a bare map stays bare.

        `weights_only` is there only where it is true.
        """
        device_map = {module: device.map_value for module, device in self.device_map.items()}
        if self.model is None:
            return device_map
        workload = self.workload or MapWorkload()
        return {
            "format": FORMAT,
            "model": {
                "id": self.model.id,
                "revision": self.model.revision,
                "class": self.model.class_name,
                "dtype": self.model.dtype,
                "quantization": self.model.quantization,
            },
            "strategy": self.strategy,
            "workload": workload.to_document(),
            **({"weights_only": True} if self.weights_only else {}),
            "devices": [
                {
                    "device": item.device.map_value,
                    **({"card": item.card} if item.card is not None else {}),
                    "budget_bytes": item.budget_bytes,
                    "weights_bytes": item.weights_bytes,
                    "kv_cache_bytes": item.kv_cache_bytes,
                    "activation_bytes": item.activation_bytes,
                    "overhead_bytes": item.overhead_bytes,
                    "peak_bytes": item.peak_bytes,
                    "free_bytes": item.free_bytes,
                }
                for item in self.devices
            ],
            "transfers": [
                {
                    "from": item.source.map_value,
                    "to": item.target.map_value,
                    "bytes_per_token": item.bytes_per_token,
                }
                for item in self.transfers
            ],
            "device_map": device_map,
            "versions": self.versions,
        }

    def to_bytes(self) -> bytes:
        """The file: the same map gives the same bytes."""
        return (json.dumps(self.to_document(), indent=2, ensure_ascii=False) + "\n").encode()


def check_attention(name: str, where: str) -> None:
    """Refuse what transformers has no attention for.

    Raises:
        RequestError: naming `where` it stands.
    """
    if name not in ATTENTIONS and "/" not in name:
        raise RequestError(f"{where}: {name!r} is no attention of transformers", f"one of {', '.join(ATTENTIONS)}")


def check_kv_dtype(name: str, where: str) -> None:
    """Refuse what no KV cache is kept in.

    Raises:
        RequestError: naming `where` it stands.
    """
    if name not in KV_DTYPES:
        raise RequestError(f"{where}: a KV cache is not kept in {name!r}", f"one of {', '.join(KV_DTYPES)}")


def write_map(document: MapFile, path: str | Path) -> None:
    """Write a map to a file, or to standard output for "-".

    Raises:
        RequestError, SurroundingsError: as `atomic_write`.
    """
    if str(path) == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(document.to_bytes())
        sys.stdout.buffer.flush()
    else:
        atomic_write(path, document.to_bytes())
