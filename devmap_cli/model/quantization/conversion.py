"""What making weights out of a checkpoint's takes for a moment, where transformers converts them on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

_NAME = "devmap_conversion"


@dataclass(frozen=True, slots=True)
class Conversion:
    """How the weights of a module are made of the checkpoint's.

    Args:
        beside_bytes: the most that one takes beside itself while it is made.
        read_share: bytes read for each byte that comes out.
    """

    beside_bytes: int = 0
    read_share: float = 1.0


AS_STORED = Conversion()
"""Weights that are loaded as the checkpoint has them."""


def note_conversion(module: nn.Module, conversion: Conversion) -> None:
    """Note how the weights of `module` are made."""
    setattr(module, _NAME, conversion)


def conversion_of(module: nn.Module) -> Conversion:
    """How the weights of `module` are made: as they are stored, where nothing was noted."""
    found = getattr(module, _NAME, AS_STORED)
    assert isinstance(found, Conversion)
    return found
