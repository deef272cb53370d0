"""Repeats what whole functions did, step by step, where they are called again with equal arguments.

Of functions that transformers lets kernels of a package stand for, so that they depend on their arguments alone:
`use_kernel_func_from_hub_with_fallback` of its integrations/hub_kernels.py. Without the packages they compute by loops
over the prompt, of thousands of operators in each layer.
"""

from __future__ import annotations

import functools
import sys
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING

from devmap_cli.simulation.counting import add_work
from devmap_cli.simulation.machine import Allocation, active_machine
from devmap_cli.simulation.repetition import arguments_of, maker_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator
    from typing import Any

    from devmap_cli.simulation.machine import Machine, SimulatedDevice
    from devmap_cli.simulation.repetition import Arguments, Maker

_STANDING_IN = "hub_kernels.py"
"""Where the wrapper of such functions is from."""
_MAX_KEPT = 1_000

_tapes: dict[Hashable, tuple[Tape, Maker]] = {}


class Tape:
    """What one call takes, gives back and does on `device`, in order; `is_whole` unless it did more than that."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.is_whole = True
        self._device: SimulatedDevice | None = device
        self._steps: list[Callable[[Arguments], Any]] = []
        self._num_taken = 0
        self.kept: set[int] = set()
        """Numbers of what it took and has not given back."""

    def took(self, device: SimulatedDevice, num_bytes: int) -> int:
        """Memory; gives it a number."""
        self._check(device)
        number = self._num_taken
        self._num_taken += 1
        self.kept.add(number)
        self._steps.append(lambda call: call.taken.__setitem__(number, Allocation(call.device, num_bytes)))
        return number

    def gave_back(self, number: int | None) -> None:
        """What it took; what is given back later is no part of the call."""
        if self._device is None or number is None:
            return
        self.kept.discard(number)
        self._steps.append(lambda call: call.taken.pop(number))

    def worked(self, device: SimulatedDevice, flops: int, bytes_moved: int) -> None:
        """One kernel ran."""
        self._check(device)
        self._steps.append(lambda call: add_work(call.device, flops, bytes_moved))

    def opened_matmul_library(self, device: SimulatedDevice) -> None:
        """The matrix library was used, perhaps for the first time."""
        self._check(device)
        self._steps.append(lambda call: call.device.open_matmul_library())

    def spoil(self) -> None:
        """Something happened that cannot be repeated."""
        self.is_whole = False

    def end(self) -> None:
        """What follows is no part of the call."""
        self._device = None

    def _check(self, device: SimulatedDevice) -> None:
        self.is_whole = self.is_whole and device is self._device

    def play(self, arguments: Arguments) -> None:
        """Do it all again."""
        for step in self._steps:
            step(arguments)


def _taped(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose calls are repeated where they can be."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        machine = active_machine()
        arguments = arguments_of(function, args, kwargs) if machine.tape is None else None
        if arguments is None:
            return function(*args, **kwargs)
        key = (arguments.device.compute_capability, arguments.key)
        if key in _tapes:
            tape, make = _tapes[key]
            tape.play(arguments)
            return make(arguments)
        with _taping(machine, arguments.device) as tape:
            results = function(*args, **kwargs)
        afterwards = arguments_of(function, args, kwargs)
        if tape.is_whole and afterwards is not None and afterwards.key == arguments.key:
            _keep(key, tape, results, arguments)
        return results

    return call


@contextmanager
def _taping(machine: Machine, device: SimulatedDevice) -> Iterator[Tape]:
    num_calls = machine.modules.num_calls
    tape = machine.tape = Tape(device)
    try:
        yield tape
    finally:
        machine.tape = None
        tape.end()
    if machine.modules.num_calls != num_calls:
        tape.spoil()


def _keep(key: Hashable, tape: Tape, results: Any, arguments: Arguments) -> None:
    """Let equal calls play `tape`, unless something of it stays elsewhere than in `results`."""
    returned: set[int] = set()

    def source(allocation: Allocation) -> Callable[[Arguments], Allocation]:
        number = allocation.taped
        assert number is not None  # all but the arguments' was taken meanwhile
        returned.add(number)
        return lambda arguments: arguments.taken[number]

    make = maker_of(results, arguments, source)
    if make is not None and tape.kept == returned:
        if len(_tapes) >= _MAX_KEPT:
            _tapes.clear()
        _tapes[key] = tape, make


@contextmanager
def taped_functions(model: Any) -> Iterator[None]:
    """Let the functions of the code of `model` that kernels may stand for be repeated where they can be."""
    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    replaced = [
        (module, name, value) for module in modules for name, value in vars(module).items() if _may_be_repeated(value)
    ]
    for module, name, value in replaced:
        setattr(module, name, _taped(value))
    try:
        yield
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)


def _may_be_repeated(value: Any) -> bool:
    return (
        isinstance(value, FunctionType)
        and hasattr(value, "__wrapped__")
        and Path(value.__code__.co_filename).name == _STANDING_IN
    )
