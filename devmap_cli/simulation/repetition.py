"""Lets an operator do again what it did for equal arguments.

Where the numbers of all its tensors are unknown, what an operator allocates, counts and results in depends on their
forms and on its other arguments alone. A model calls it with the same ones in each of its equal layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from devmap_cli.simulation.counting import add_work
from devmap_cli.simulation.machine import Allocation
from devmap_cli.simulation.tensor import DeviceTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence
    from typing import Any

    from devmap_cli.simulation.machine import SimulatedDevice

    Maker = Callable[["Arguments"], Any]
    Source = Callable[[Allocation], Callable[["Arguments"], Allocation]]

PLAIN = frozenset({int, float, bool, type(None), torch.dtype, torch.layout, torch.memory_format, str})
"""Types of arguments that are the same on every device."""

_MAX_KEPT = 50_000
_outcomes: dict[Hashable, Outcome] = {}


class UnlikeError(Exception):
    """An argument or a result of which there is more to say than its form."""


class Arguments:
    """Those of one call: what tells it from other calls, the tensors among them, and the device they are on."""

    __slots__ = ("device", "key", "taken", "tensors")
    device: SimulatedDevice

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[DeviceTensor] = []
        self.taken: dict[int, Allocation] = {}
        """What the call took that is still there, where it is repeated step by step."""
        parts: list[Hashable] = [id(func)]  # operators live as long as the process
        self._describe(args, parts)
        for name, value in kwargs.items():
            parts.append(name)
            self._describe((value,), parts)
        if not self.tensors:
            raise UnlikeError
        self.key = tuple(parts)

    def _describe(self, values: Iterable[Any], parts: list[Hashable]) -> None:
        for value in values:
            kind: Any = type(value)
            if kind is DeviceTensor:
                parts.append(self._form(value))
                self.tensors.append(value)
            elif kind in PLAIN:
                parts.append(kind)  # 2 and 2.0 are equal
                parts.append(value)
            elif kind is list or kind is tuple:
                parts.append(len(value))
                self._describe(value, parts)
            else:
                raise UnlikeError

    def _form(self, tensor: DeviceTensor) -> Hashable:
        form, device = tensor.form, tensor.allocation.device
        if not self.tensors:
            self.device = device
        if form is None or device is not self.device:
            raise UnlikeError
        return form


def arguments_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """What tells this call of `func` from others; None unless it has tensors, all of them unknown and on one device."""
    try:
        return Arguments(func, args, kwargs)
    except UnlikeError:
        return None


class Outcome:
    """What a call did: the work it counted, the bytes it took for a moment, and how its results are made."""

    __slots__ = ("_make", "_opens_library", "_scratch", "_work")

    def __init__(
        self, make: Maker, work: tuple[int, int] | None, scratch: Sequence[int], *, opens_library: bool
    ) -> None:
        self._make = make
        self._work = work
        self._scratch = scratch
        self._opens_library = opens_library

    def again(self, arguments: Arguments) -> Any:
        """The results of an equal call."""
        device = arguments.device
        if self._opens_library:
            device.open_matmul_library()
        scratch = [Allocation(device, num_bytes) for num_bytes in self._scratch]
        if self._work is not None:
            add_work(device, *self._work)
        results = self._make(arguments)
        del scratch
        return results


def known_outcome(key: Hashable) -> Outcome | None:
    """What an equal call did, if there was one; `key` tells calls apart."""
    return _outcomes.get(key)


def keep(
    key: Hashable,
    arguments: Arguments,
    results: Any,
    work: tuple[int, int] | None,
    *,
    scratch: Sequence[int] = (),
    opens_library: bool = False,
) -> None:
    """Let this be what calls with `key` do, unless there is more to say of its results than their forms.

    `work` are operations and bytes, `scratch` the bytes of what it took for a moment, in order.
    """
    make = maker_of(results, arguments, _anew(set()))
    if make is None:
        return
    if len(_outcomes) >= _MAX_KEPT:
        _outcomes.clear()
    _outcomes[key] = Outcome(make, work, scratch, opens_library=opens_library)


def _anew(seen: set[Allocation]) -> Source:
    """Results in memory of their own, which no other result shares."""

    def source(allocation: Allocation) -> Callable[[Arguments], Allocation]:
        if allocation in seen:
            raise UnlikeError
        seen.add(allocation)
        num_bytes = allocation.num_bytes
        return lambda arguments: Allocation(arguments.device, num_bytes)

    return source


def maker_of(results: Any, arguments: Arguments, source: Source) -> Maker | None:
    """What makes `results` again of equal arguments; None if there is more to say of them than their forms.

    `source` tells where the memory of one comes from that is not an argument's.
    """
    try:
        return _maker(results, arguments, source)
    except UnlikeError:
        return None


def _maker(results: Any, arguments: Arguments, source: Source) -> Maker:
    if isinstance(results, DeviceTensor):
        return _tensor_maker(results, arguments, source)
    if type(results) in PLAIN:
        return lambda _: results
    if type(results) not in (list, tuple):
        raise UnlikeError
    kind, makers = type(results), [_maker(result, arguments, source) for result in results]
    return lambda arguments: kind([make(arguments) for make in makers])


def _tensor_maker(result: DeviceTensor, arguments: Arguments, source: Source) -> Maker:
    form, allocation = result.form, result.allocation
    for index, tensor in enumerate(arguments.tensors):
        if result is tensor:
            return lambda arguments: arguments.tensors[index]
        if form is not None and allocation is tensor.allocation:
            return lambda arguments: DeviceTensor.of_form(form, arguments.tensors[index].allocation)
    if form is None or allocation.num_bytes != form.storage_bytes:
        raise UnlikeError
    take = source(allocation)
    return lambda arguments: DeviceTensor.of_form(form, take(arguments))
