"""What making weights out of a checkpoint's takes for a moment, where transformers converts them on the device."""

from __future__ import annotations

from torch import nn

_NAME = "devmap_conversion_bytes"


def note_conversion(module: nn.Module, num_bytes: int) -> None:
    """Note that each weight of `module` takes `num_bytes` beside itself while it is made."""
    setattr(module, _NAME, num_bytes)


def conversion_bytes(module: nn.Module) -> int:
    """What a weight of `module` takes beside itself while it is made, 0 where nothing was noted."""
    return int(getattr(module, _NAME, 0))
