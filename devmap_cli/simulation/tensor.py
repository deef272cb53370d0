"""Tensors on simulated devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from devmap_cli.simulation.forms import form_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from devmap_cli.simulation.forms import Form
    from devmap_cli.simulation.machine import Allocation


class DeviceTensor(torch.Tensor):
    """A tensor that says it is on a simulated device, takes memory there, and keeps its numbers elsewhere.

    Views share one `allocation`.
    """

    allocation: Allocation
    _numbers: torch.Tensor | None
    _form: Form | None
    _has_form: bool
    run_operator: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    """Set by the operators module, which knows this class."""

    @staticmethod
    def __new__(cls, data: DeviceTensor, requires_grad: bool = False) -> DeviceTensor:
        """A parameter of `data`: accelerate remakes parameters by calling their class."""
        return torch.nn.Parameter(data, requires_grad=requires_grad)  # type: ignore[return-value]  # it keeps cls

    @classmethod
    def on_device(cls, numbers: torch.Tensor, allocation: Allocation) -> DeviceTensor:
        """`numbers` as a tensor that lies in `allocation`."""
        tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            layout=numbers.layout,
            device=allocation.device.torch_device,
        )
        tensor.numbers = numbers
        tensor.allocation = allocation
        return tensor

    @classmethod
    def of_form(cls, form: Form, allocation: Allocation) -> DeviceTensor:
        """A tensor of unknown numbers in `form` that lies in `allocation`."""
        tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            form.shape,
            strides=form.stride,
            storage_offset=form.offset,
            dtype=form.dtype,
            device=allocation.device.torch_device,
        )
        tensor._numbers = None
        tensor._form = form
        tensor._has_form = True
        tensor.allocation = allocation
        return tensor

    @property
    def numbers(self) -> torch.Tensor:
        """An ordinary tensor of the same shape and strides: on the CPU if they are known, or on the meta device."""
        numbers = self._numbers
        if numbers is None:
            assert self._form is not None
            numbers = self._numbers = self._form.on_meta(self.allocation)
        return numbers

    @numbers.setter
    def numbers(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers
        self._has_form = False

    @property
    def form(self) -> Form | None:
        """What is known of unknown numbers; None if the numbers themselves are."""
        if not self._has_form:
            self._form = form_of(self.numbers)
            self._has_form = True
        return self._form

    def data_ptr(self) -> int:
        """Its address in the device's address space."""
        return self.allocation.address + int(self.storage_offset()) * self.element_size()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage of its numbers."""
        return self.numbers.untyped_storage()

    def tolist(self) -> Any:
        """Its numbers as Python numbers, in nested lists."""
        return self.allocation.device.machine.numbers.reveal(self.numbers).tolist()

    def numpy(self, *, force: bool = False) -> NoReturn:  # noqa: ARG002  # Tensor's signature
        """Refused, as for any device."""
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's stub lacks a name
        if self.numbers.is_meta:
            return f"tensor(..., device='{self.device}', size={tuple(self.shape)}, dtype={self.dtype})"
        return f"{repr(self.numbers)[:-1]}, device='{self.device}')"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's docs do

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a C function here
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator that has a simulated tensor among its arguments."""
        return cls.run_operator(func, args, kwargs or {})
