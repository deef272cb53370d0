"""What a folder's weight files say of themselves, read from their headers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, in name order; a pipe of that name is none."""
    return sorted(path for path in folder.glob("*.safetensors") if path.is_file())


def read_header(path: Path) -> dict[str, Any] | None:
    """The header of one safetensors file, or None where the file is no such file.

    Format: 8 bytes little-endian length, then that many bytes of JSON (safetensors' format description).
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                return None
            header = json.loads(file.read(length))
    except (OSError, struct.error, ValueError):
        return None
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        return None
    return header


def first_float_dtype(folder: Path) -> str | None:
    """The dtype of the first floating-point tensor in the folder's weights; None without weights."""
    for path in weight_files(folder):
        for name, entry in (read_header(path) or {}).items():
            if name != "__metadata__" and entry.get("dtype") in FLOATS:
                return FLOATS[entry["dtype"]]
    return None
