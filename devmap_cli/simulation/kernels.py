"""Operators that need more than lowering: new tensors, copies between devices, and what the CPU refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from devmap_cli.simulation.counting import count_copy
from devmap_cli.simulation.machine import DEVICE_TYPE, Allocation, active_machine
from devmap_cli.simulation.operators import Call, kernel, rewrite, run_plainly
from devmap_cli.simulation.tensor import DeviceTensor

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from devmap_cli.simulation.machine import SimulatedDevice

aten = torch.ops.aten


# ---------------------------------------------------------------- new tensors


def empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,  # noqa: ARG001  # the operator's signature
    device: torch.device | None = None,
    pin_memory: bool | None = None,  # noqa: ARG001  # the operator's signature
    memory_format: torch.memory_format | None = None,
) -> DeviceTensor:
    """`aten::empty.memory_format` on a simulated device."""
    numbers = active_machine().numbers.empty(size, dtype, memory_format=memory_format)
    return _new(numbers, device)


def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,  # noqa: ARG001  # the operator's signature
    device: torch.device | None = None,
    pin_memory: bool | None = None,  # noqa: ARG001  # the operator's signature
) -> DeviceTensor:
    """`aten::empty_strided` on a simulated device."""
    return _new(active_machine().numbers.empty(size, dtype, stride=stride), device)


def _new(numbers: torch.Tensor, device: torch.device | None) -> DeviceTensor:
    owner = active_machine().device(None if device is None else device.index)
    return DeviceTensor.on_device(numbers, Allocation(owner, numbers.untyped_storage().nbytes()))


# ---------------------------------------------------------------- copies


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> Any:
    """`aten::_copy_from`: what `copy_` becomes where Python's dispatch is switched off."""
    return _copy(aten.copy_.default, (target, source, non_blocking), {})


@kernel(aten.copy_.default)
def _copy(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    target, source = args[:2]
    device = (target if isinstance(target, DeviceTensor) else source).allocation.device
    numbers = device.machine.numbers
    if _place(source) == _place(target):
        count_copy(device, target, source)
    device.machine.record_transfer(_place(source), _place(target), source.numel() * source.element_size())
    source_numbers = source.numbers if isinstance(source, DeviceTensor) else source
    if isinstance(target, DeviceTensor):
        rewrite(target, numbers.copy(target.numbers, source_numbers))
    else:
        target.copy_(numbers.reveal(source_numbers))
    return target


@kernel(aten._to_copy.default)
def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Tensor.to`, from a simulated device to anywhere."""
    source: DeviceTensor = args[0]
    target = kwargs.get("device")
    if target is None or target.type == "meta":
        return run_plainly(func, args, kwargs)
    machine = source.allocation.device.machine
    numbers = machine.numbers
    owner = _owner(target, source)
    machine.record_transfer(
        _place(source), str(target) if owner is None else owner.name, source.numel() * source.element_size()
    )
    if owner is None:
        return func(numbers.reveal(source.numbers), **kwargs)
    converted = numbers.compute(Call(func, args, {**kwargs, "device": None}))
    is_move = converted.dtype == source.dtype and owner is not source.allocation.device
    copy_of = source.allocation if is_move else None
    return DeviceTensor.on_device(converted, Allocation(owner, converted.untyped_storage().nbytes(), copy_of=copy_of))


def _owner(target: torch.device, source: DeviceTensor) -> SimulatedDevice | None:
    """The simulated device that `target` means for `source`, None if it leaves the simulation."""
    if target.type == DEVICE_TYPE:
        return active_machine().device(target.index)
    device = source.allocation.device
    return device if device is device.machine.host and target.type == "cpu" else None


def _place(tensor: torch.Tensor) -> str:
    return tensor.allocation.device.name if isinstance(tensor, DeviceTensor) else str(tensor.device)


# ---------------------------------------------------------------- what the CPU refuses and CUDA takes


@kernel(aten.histc.default)
def _histc(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """CUDA counts integers too; mixture-of-experts code counts the tokens of each expert so."""
    source = args[0]
    call = Call(func, args, kwargs)
    if source.is_floating_point() or call.device is None:
        return run_plainly(func, args, kwargs)
    call.args[0] = call.args[0].double()
    counts = call.device.machine.numbers.compute(call)
    return call.lift(counts.to(source.dtype))
