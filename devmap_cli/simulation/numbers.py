"""Where the numbers of simulated tensors come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from devmap_cli.simulation.shapes import Shapes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from devmap_cli.simulation.operators import Call


class Numbers(Protocol):
    """Makes, computes and reads the numbers behind simulated tensors."""

    def empty(
        self,
        size: Sequence[int],
        dtype: torch.dtype | None,
        *,
        stride: Sequence[int] | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> torch.Tensor:
        """Numbers of a new tensor, to be written."""

    def compute(self, call: Call) -> Any:
        """What the operator of `call` returns for the numbers it was given."""

    def repeats(self, func: Any) -> bool:
        """Whether all that operator `func` does for unknown numbers depends on their shapes alone."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """The numbers of `target` after those of `source` were copied into it."""

    def attend(self, call: Call) -> torch.Tensor | None:
        """The result of scaled dot-product attention; None if only its shape is of interest."""

    def reveal(self, numbers: torch.Tensor) -> torch.Tensor:
        """The numbers as a tensor of the CPU, for code that leaves the device with them."""


class RealNumbers:
    """Every number is known, and computed by PyTorch's CPU kernels.

    Shapes occur only where a kernel here runs an operator's parts for the memory that they take.
    """

    def __init__(self) -> None:
        self._shapes = Shapes(lambda _assumption: None)

    def empty(
        self,
        size: Sequence[int],
        dtype: torch.dtype | None,
        *,
        stride: Sequence[int] | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> torch.Tensor:
        """Memory as it comes."""
        if stride is not None:
            return torch.empty_strided(size, stride, dtype=dtype, device="cpu")
        return torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format or torch.contiguous_format)

    def compute(self, call: Call) -> Any:
        """The CPU's result."""
        if any(tensor.is_meta for tensor in call.tensors):
            return self._shapes.compute(call)
        return call.func(*call.args, **call.kwargs)

    def repeats(self, _func: Any) -> bool:
        """Nothing is unknown for long."""
        return False

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Copied in place."""
        return target.copy_(source)

    def attend(self, call: Call) -> torch.Tensor | None:
        """As the CPU computes it, by whichever of its kernels."""
        output: torch.Tensor = call.func(*call.args, **call.kwargs)
        return output

    def reveal(self, numbers: torch.Tensor) -> torch.Tensor:
        """They are there."""
        return numbers
