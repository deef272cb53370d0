"""Runs PyTorch operators on simulated tensors.

An operator is lowered to the numbers of its arguments, computed there, and its results are lifted back: onto
the device of the arguments, sharing their memory where they are views, in new memory otherwise.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from devmap_cli.simulation.counting import add_work, counter_of
from devmap_cli.simulation.machine import DEVICE_TYPE, Allocation, SimulatedDevice, active_machine
from devmap_cli.simulation.repetition import PLAIN, arguments_of, keep, known_outcome
from devmap_cli.simulation.scratch import SCRATCH_RULES, USES_MATMUL_LIBRARY
from devmap_cli.simulation.tensor import DeviceTensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from devmap_cli.simulation.repetition import Arguments

aten = torch.ops.aten

KERNELS: dict[Any, Callable[..., Any]] = {}
"""Operators with a kernel of their own: operator -> function of (operator, args, kwargs)."""


def kernel(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let the decorated function of (operator, args, kwargs) run `operators`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for operator in operators:
            KERNELS[operator] = function
        return function

    return register


_TAKES_HOST_INDICES = frozenset(
    {
        aten.index.Tensor,
        aten.index.Tensor_out,
        aten._unsafe_index.Tensor,
        aten.index_put.default,
        aten.index_put_.default,
        aten._index_put_impl_.default,
        aten._unsafe_index_put.default,
    }
)


class _Traits:
    """What there is to know of an operator, looked up once."""

    __slots__ = ("count", "is_composite", "is_mutable", "kernel", "scratch_bytes", "uses_matmul_library")

    def __init__(self, func: Any) -> None:
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        name = func.name()
        self.kernel = KERNELS.get(func)
        self.is_composite = has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "PrivateUse1")
        self.is_mutable = func._schema.is_mutable
        self.scratch_bytes = SCRATCH_RULES.get(func)
        self.uses_matmul_library = func in USES_MATMUL_LIBRARY
        self.count = counter_of(func)


_known_traits: dict[int, _Traits] = {}
"""By the id of an operator, which costs less than its hash; operators live as long as the process."""


def _traits(func: Any) -> _Traits:
    traits = _known_traits.get(id(func))
    if traits is None:
        traits = _known_traits[id(func)] = _Traits(func)
    return traits


def run_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on arguments among which simulated tensors or devices are."""
    traits = _traits(func)
    if traits.kernel is not None:
        return traits.kernel(func, args, kwargs)
    if traits.is_composite:  # only if a kernel here calls it: other calls arrive as the operators it is made of
        return func.decompose(*args, **kwargs)
    return run_plainly(func, args, kwargs)


def run_plainly(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` without regard to kernels of its own."""
    arguments = arguments_of(func, args, kwargs)
    outcome = None if arguments is None else known_outcome(arguments.key)
    if arguments is None or outcome is None:
        return _run_once(func, args, kwargs, arguments)
    return outcome.again(arguments)


def _run_once(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: Arguments | None) -> Any:
    """Run `func`, and keep what it does for calls with equal `arguments`."""
    call = Call(func, args, kwargs)
    device = call.device
    if device is None:
        return func(*call.args, **call.kwargs)
    traits = _traits(func)
    if traits.uses_matmul_library:
        device.open_matmul_library()
    sizes = () if traits.scratch_bytes is None else (traits.scratch_bytes(call),)
    scratch = [Allocation(device, num_bytes) for num_bytes in sizes]
    results = device.machine.numbers.compute(call)
    work = None if traits.count is None else traits.count(call, results)
    if work is not None:
        add_work(device, *work)
    if traits.is_mutable:
        call.write_back(args, kwargs)
    lifted = call.lift(results)
    del scratch
    if arguments is not None and device.machine.numbers.repeats(func):
        afterwards = arguments_of(func, args, kwargs)
        if afterwards is not None and afterwards.key == arguments.key:  # it left their shapes as they were
            opens_library = traits.uses_matmul_library
            keep(arguments.key, arguments, lifted, work, scratch=sizes, opens_library=opens_library)
    return lifted


class Call:
    """One operator with its arguments lowered to their numbers, and the way back to the device.

    Raises RuntimeError if the arguments are on several devices, as PyTorch words it for CUDA.
    """

    __slots__ = ("_allocations", "_host", "_wrappers", "args", "device", "func", "kwargs", "tensors", "to_host")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func = func
        self.device: SimulatedDevice | None = None
        self.to_host = False
        self.tensors: list[torch.Tensor] = []
        """The numbers of every tensor among the arguments."""
        self._host: torch.Tensor | None = None
        self._wrappers: dict[int, DeviceTensor] = {}
        self._allocations: dict[int, Allocation] = {}
        self.args = [
            value if type(value) in PLAIN else self._lower(value, position) for position, value in enumerate(args)
        ]
        self.kwargs = {
            name: value if type(value) in PLAIN else self._lower(value, name) for name, value in kwargs.items()
        }
        if self._host is not None and self.device is not None and self.device.index is not None:
            self._refuse("cpu" if self._host.is_cpu else str(self._host.device), None)

    # ------------------------------------------------------------------ lowering

    def _lower(self, value: Any, place: int | str) -> Any:
        if isinstance(value, DeviceTensor):
            return self._lower_tensor(value, place)
        if isinstance(value, torch.Tensor):
            if value.dim() and not (place == 1 and self.func in _TAKES_HOST_INDICES):
                self._host = value
            self.tensors.append(value)
            return value
        if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
            return [self._lower(item, place) for item in value]
        if isinstance(value, torch.device):
            return self._lower_device(value)
        return value

    def _lower_tensor(self, tensor: DeviceTensor, place: int | str) -> torch.Tensor:
        allocation = tensor.allocation
        if self.device is None:
            self.device = allocation.device
        elif self.device is not allocation.device:
            self._refuse(allocation.device.name, place)
        numbers = tensor.numbers
        self.tensors.append(numbers)
        self._wrappers[id(numbers)] = tensor
        self._allocations[numbers.untyped_storage()._cdata] = allocation
        return numbers

    def _lower_device(self, device: torch.device) -> torch.device:
        if device.type != DEVICE_TYPE:
            self.to_host = True
            return device
        wanted = active_machine().device(device.index)
        if self.device is not None and self.device is not wanted:
            self._allocations.clear()
        self.device = wanted
        return torch.device("cpu")

    def _refuse(self, other: str, place: int | str | None) -> NoReturn:
        assert self.device is not None
        name = self.func._schema.name.removeprefix("aten::")
        argument = ""
        if place is not None:
            label = self.func._schema.arguments[place].name if isinstance(place, int) else place
            argument = f"argument for argument {label} in method {name}"
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{self.device.name} and {other}! (when checking {argument or f'arguments in method {name}'})"
        )

    # ------------------------------------------------------------------ lifting

    def owns(self, numbers: torch.Tensor) -> bool:
        """Whether `numbers` are those of a simulated tensor."""
        return id(numbers) in self._wrappers

    def replace(self, numbers: torch.Tensor, replacement: torch.Tensor) -> None:
        """Let `replacement` stand for the argument that was lowered to `numbers`."""
        wrapper = self._wrappers.get(id(numbers))
        if wrapper is not None:
            self._wrappers[id(replacement)] = wrapper
            self._allocations[replacement.untyped_storage()._cdata] = wrapper.allocation

    def lift(self, results: Any) -> Any:
        """`results` on the device; what is no tensor, or meant for elsewhere, as it is."""
        if isinstance(results, torch.Tensor):
            return results if self.to_host else self.lift_tensor(results)
        if isinstance(results, (list, tuple)):
            return type(results)(self.lift(result) for result in results)
        return results

    def lift_tensor(self, numbers: torch.Tensor) -> DeviceTensor:
        """`numbers` on the device: as the argument it came from, a view of one, or a new tensor."""
        wrapper = self._wrappers.get(id(numbers))
        if wrapper is not None:
            return wrapper
        storage = numbers.untyped_storage()
        allocation = self._allocations.get(storage._cdata)
        if allocation is None:
            assert self.device is not None
            allocation = self._allocations[storage._cdata] = Allocation(self.device, storage.nbytes())
        return DeviceTensor.on_device(numbers, allocation)

    def write_back(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let the arguments that the operator wrote to take over their new numbers, shapes and memory."""
        positions, names = written_arguments(self.func)
        for position in positions:
            if position < len(args):
                self._write_back(args[position], self.args[position])
        for name in names:
            if name in kwargs:
                self._write_back(kwargs[name], self.kwargs[name])

    def _write_back(self, argument: Any, numbers: Any) -> None:
        if isinstance(argument, (list, tuple)):
            for one, its_numbers in zip(argument, numbers, strict=True):
                self._write_back(one, its_numbers)
        elif isinstance(argument, DeviceTensor):
            rewrite(argument, numbers)


def rewrite(tensor: DeviceTensor, numbers: torch.Tensor) -> None:
    """Give `tensor` other numbers, and the shape and memory that go with them."""
    num_bytes = numbers.untyped_storage().nbytes()
    if num_bytes > tensor.allocation.num_bytes:
        tensor.allocation = Allocation(tensor.allocation.device, num_bytes)
    if tensor.shape != numbers.shape or tensor.stride() != numbers.stride():
        tensor.data = DeviceTensor.on_device(numbers, tensor.allocation)
    tensor.numbers = numbers


@cache
def written_arguments(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions, and names, of the arguments that `func` writes to."""
    written = [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tuple(position for position, _ in written), tuple(name for _, name in written)


DeviceTensor.run_operator = staticmethod(run_operator)
