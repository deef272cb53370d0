"""Puts the weights of an empty model where a device map says, and takes them away again."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from devmap_cli.model.quantization.conversion import AS_STORED, conversion_of
from devmap_cli.simulation.machine import Allocation
from devmap_cli.simulation.tensor import DeviceTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from accelerate.hooks import ModelHook
    from torch import nn

    from devmap_cli.simulation.machine import Machine, SimulatedDevice
    from devmap_cli.simulation.trace import Recorder

_UNCOVERED = "cpu"
"""Where transformers loads what no key of a map covers."""


def normalized(device_map: Mapping[str, int | str]) -> dict[str, int | str]:
    """The map with an index for every accelerator, whatever its type: "cuda:1" is 1, "mps" is 0."""
    return {name: _normalized_device(device) for name, device in device_map.items()}


def _normalized_device(device: int | str) -> int | str:
    if isinstance(device, int) or device in ("cpu", "disk"):
        return device
    index = device.rpartition(":")[2]
    return int(index) if index.isdigit() else 0


def device_of(name: str, device_map: Mapping[str, int | str]) -> int | str:
    """The device of the module or tensor `name`: that of its closest ancestor in the map."""
    while name:
        if name in device_map:
            return device_map[name]
        name = name.rpartition(".")[0]
    return device_map.get("", _UNCOVERED)


@contextmanager
def placed(
    model: Any, device_map: Mapping[str, int | str], machine: Machine, dtype: torch.dtype | None = None
) -> Iterator[None]:
    """Let `model`, made on the meta device, have shapes-only weights on `machine`, and accelerate's hooks.

    `device_map` is a normalized one. `dtype` replaces the model's own, not that of weights kept in another. As in
    from_pretrained, memory for the weights of each device is reserved in one piece first. Afterwards the model is
    empty again. Raises torch.OutOfMemoryError if the weights don't fit.
    """
    from accelerate.hooks import remove_hook_from_module

    slots = list(_slots(model))
    plain = {module: _plain_tensors(module) for module in model.modules()}
    try:
        weights = _layout(slots, device_map, machine, _casts(model, dtype))
        conversions = _conversion_bytes(model, slots, weights)
        _place(slots, weights)
        _convert(slots, weights, conversions)
        if machine.recorder is not None:
            _record(machine.recorder, slots, weights, conversions)
        _dispatch(model, device_map)
        if machine.recorder is not None:
            _gather_inputs(model, machine.recorder, machine)
        yield
    finally:
        remove_hook_from_module(model, recurse=True)
        for slot in slots:
            slot.store[slot.key] = slot.original
        for module, tensors in plain.items():
            _restore(module, tensors)


def _plain_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that a module has as plain attributes, neither parameters nor buffers."""
    return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}


def _restore(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give plain attributes back what they were, where the run left something on a simulated device."""
    for name, value in _plain_tensors(module).items():
        if isinstance(value, DeviceTensor):
            if name in tensors:
                setattr(module, name, tensors[name])
            else:
                delattr(module, name)


class _Slot:
    """Where a module keeps a parameter or buffer, its full name, and what it was."""

    __slots__ = ("key", "module", "name", "original", "store")

    def __init__(self, module: nn.Module, store: dict[str, Any], key: str, name: str) -> None:
        self.module = module
        self.store = store
        self.key = key
        self.name = name
        self.original: torch.Tensor = store[key]


def _slots(model: nn.Module) -> Iterator[_Slot]:
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for store in (module._parameters, module._buffers):
            tensors: dict[str, Any] = dict(store)
            yield from (_Slot(module, store, key, prefix + key) for key, value in tensors.items() if value is not None)


def _casts(model: Any, dtype: torch.dtype | None) -> dict[torch.dtype, torch.dtype]:
    return {} if dtype is None else {model.dtype: dtype}


class _Weight:
    """One tensor to place, however many names it has: the shape it will have and the device it goes to."""

    __slots__ = ("owner", "shape")

    def __init__(self, owner: SimulatedDevice, shape: torch.Tensor) -> None:
        self.owner = owner
        self.shape = shape

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.shape.element_size()


def _layout(
    slots: list[_Slot],
    device_map: Mapping[str, int | str],
    machine: Machine,
    casts: Mapping[torch.dtype, torch.dtype],
) -> dict[int, _Weight]:
    """What each tensor becomes, by the id of the original; a tied one lies where its first name says."""
    weights: dict[int, _Weight] = {}
    for slot in slots:
        original = slot.original
        if id(original) not in weights:
            place = device_of(slot.name, device_map)
            owner = machine.host if isinstance(place, str) else machine.device(place)
            dtype = casts.get(original.dtype, original.dtype)
            weights[id(original)] = _Weight(owner, torch.empty(original.shape, dtype=dtype, device="meta"))
    return weights


def _place(slots: list[_Slot], weights: Mapping[int, _Weight]) -> None:
    totals: dict[SimulatedDevice, int] = {}
    for weight in weights.values():
        totals[weight.owner] = totals.get(weight.owner, 0) + weight.num_bytes
    for owner, num_bytes in totals.items():
        Allocation(owner, num_bytes)  # dropped at once: the weights then fill the segment it leaves behind
    tensors: dict[int, torch.Tensor] = {}
    for slot in slots:
        if id(slot.original) not in tensors:
            weight = weights[id(slot.original)]
            tensor: torch.Tensor = DeviceTensor.on_device(weight.shape, Allocation(weight.owner, weight.num_bytes))
            if isinstance(slot.original, torch.nn.Parameter):
                tensor = torch.nn.Parameter(tensor, requires_grad=False)
            tensors[id(slot.original)] = tensor
        slot.store[slot.key] = tensors[id(slot.original)]


def _merged_weights(model: Any) -> list[re.Pattern[str]]:
    """Patterns of the weights that transformers makes of several of the checkpoint, such as those of all experts."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    if not hasattr(model, "config"):
        return []
    merging = [
        conversion
        for conversion in get_model_conversion_mapping(model)
        if {"MergeModulelist", "Concatenate"} & {type(step).__name__ for step in getattr(conversion, "operations", ())}
    ]
    return [re.compile(pattern) for conversion in merging for pattern in conversion.target_patterns]


def _conversion_bytes(model: Any, slots: list[_Slot], weights: Mapping[int, _Weight]) -> dict[int, int]:
    """What making a weight out of the checkpoint's takes beside itself, by the id of the original, where it is much.

    The parts and the result of a merge are there at the same time; of a conversion to another type the module tells.
    """
    merged = _merged_weights(model)
    conversions: dict[int, int] = {}
    for slot in slots:
        key = id(slot.original)
        num_bytes = conversion_of(slot.module).beside_bytes if isinstance(slot.original, torch.nn.Parameter) else 0
        if any(pattern.search(slot.name) for pattern in merged):
            num_bytes += weights[key].num_bytes
        if num_bytes:
            conversions[key] = max(num_bytes, conversions.get(key, 0))
    return conversions


def _convert(slots: list[_Slot], weights: Mapping[int, _Weight], conversions: Mapping[int, int]) -> None:
    """Take, once per device, what its largest conversion takes.

    All else may be loaded by then: threads read ahead, and the order is that of names
    (`convert_and_load_state_dict_in_model` of transformers' core_model_loading.py).
    """
    largest: dict[SimulatedDevice, int] = {}
    for slot in slots:
        owner = weights[id(slot.original)].owner
        largest[owner] = max(largest.get(owner, 0), conversions.get(id(slot.original), 0))
    for owner, num_bytes in largest.items():
        Allocation(owner, num_bytes)  # dropped at once


def _record(
    recorder: Recorder, slots: list[_Slot], weights: Mapping[int, _Weight], conversions: Mapping[int, int]
) -> None:
    """Tell of each weight in the order of loading, and of what each module holds."""
    seen: set[int] = set()
    held: dict[str, list[int]] = {}
    for slot in slots:
        num_bytes = weights[id(slot.original)].num_bytes
        is_buffer = not isinstance(slot.original, torch.nn.Parameter)
        if id(slot.original) not in seen:
            seen.add(id(slot.original))
            taken = conversions.get(id(slot.original), 0)
            number = recorder.weight(
                slot.name,
                num_bytes,
                is_buffer=is_buffer,
                conversion_bytes=taken,
                read_bytes=_read_bytes(slot, num_bytes, is_buffer=is_buffer),
            )
            slot.store[slot.key].allocation.number = number
        if not is_buffer:
            held.setdefault(slot.name.rpartition(".")[0], []).append(num_bytes)
    for fqn, sizes in held.items():
        recorder.holder(fqn, sizes)


def _read_bytes(slot: _Slot, num_bytes: int, *, is_buffer: bool) -> int:
    """What the checkpoint holds of a weight: scales that a conversion makes are buffers, biases are not converted."""
    conversion = conversion_of(slot.module)
    if is_buffer and conversion != AS_STORED:
        return 0
    return round(num_bytes * conversion.read_share) if slot.original.dim() > 1 else num_bytes


def _gather_inputs(model: nn.Module, recorder: Recorder, machine: Machine) -> None:
    """Bring the inputs of towers to devices of their own, as accelerate brings them to where all of a tower is."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for name, number in recorder.towers.items():
        device = machine.device(recorder.device_of(number)).torch_device
        if name:
            add_hook_to_module(model.get_submodule(name), _gathering(device, model))
        elif isinstance(hook := getattr(model, "_hf_hook", None), AlignDevicesHook):  # of several blocks
            hook.execution_device = device


def _gathering(device: torch.device, model: Any) -> ModelHook:
    """A hook that sends all inputs to `device`, as accelerate's own does, and leaves weights alone."""
    from accelerate.hooks import ModelHook
    from accelerate.utils import send_to_device

    skipped = getattr(model, "_skip_keys_device_placement", None)

    def pre_forward(_: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=skipped)

    hook = ModelHook()
    hook.pre_forward = pre_forward
    return hook


def _dispatch(model: nn.Module, device_map: Mapping[str, int | str]) -> None:
    """Add accelerate's hooks as from_pretrained does; what is on disk is read from memory here."""
    from accelerate import dispatch_model

    in_memory: Any = {name: "cpu" if device == "disk" else device for name, device in device_map.items()}
    dispatch_model(model, in_memory, skip_keys=getattr(model, "_skip_keys_device_placement", None))
