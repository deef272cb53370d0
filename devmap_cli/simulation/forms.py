"""What is known of a tensor whose numbers are not: its shape and where it lies, one object for all that are alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable

    from devmap_cli.simulation.machine import Allocation

_MAX_KEPT = 50_000


class Form:
    """Shape, strides, offset and type of a tensor, and the size of the memory it lies in; equal if the same object."""

    __slots__ = ("dtype", "offset", "shape", "storage_bytes", "stride")

    def __init__(self, numbers: torch.Tensor) -> None:
        self.shape = numbers.shape
        self.stride = numbers.stride()
        self.offset = numbers.storage_offset()
        self.dtype = numbers.dtype
        self.storage_bytes = numbers.untyped_storage().nbytes()

    def on_meta(self, allocation: Allocation) -> torch.Tensor:
        """A tensor of this form on the meta device, in the memory that stands for `allocation` there."""
        storage = allocation.shapes
        if storage is None or storage.nbytes() != self.storage_bytes:
            storage = allocation.shapes = torch.UntypedStorage(self.storage_bytes, device="meta")
        numbers = torch.empty(0, dtype=self.dtype, device="meta")
        return numbers.set_(storage, self.offset, self.shape, self.stride)


_forms: dict[Hashable, Form] = {}


def form_of(numbers: torch.Tensor) -> Form | None:
    """The form of unknown `numbers`; None for known ones, and for those that are more than a stretch of memory."""
    if not numbers.is_meta or numbers.layout is not torch.strided or numbers.is_conj() or numbers.is_neg():
        return None
    num_bytes = numbers.untyped_storage().nbytes()
    key = (numbers.shape, numbers.stride(), numbers.storage_offset(), numbers.dtype, num_bytes)
    form = _forms.get(key)
    if form is None:
        if len(_forms) >= _MAX_KEPT:
            _forms.clear()
        form = _forms[key] = Form(numbers)
    return form
