"""Rehearses a model's run on simulated devices: its real code, accelerate's real hooks, no weights, no GPU."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from itertools import chain
from typing import TYPE_CHECKING

import torch

from devmap_cli.model.kv_dtypes import generation_options
from devmap_cli.simulation.attention_choice import attention_of
from devmap_cli.simulation.backend import simulated_devices
from devmap_cli.simulation.cache_growth import grow, tensors_of
from devmap_cli.simulation.defects import mended
from devmap_cli.simulation.inputs import cast_by_people, make_inputs
from devmap_cli.simulation.machine import active_machine
from devmap_cli.simulation.memory import DeviceRehearsal, PhaseMemory
from devmap_cli.simulation.placement import device_of, normalized, placed
from devmap_cli.simulation.quantized_cache import quantized_layers
from devmap_cli.simulation.shapes import Shapes
from devmap_cli.simulation.taping import taped_functions
from devmap_cli.simulation.tensor import DeviceTensor
from devmap_cli.simulation.work import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    from devmap_cli.devices.capability import Capability
    from devmap_cli.simulation.machine import Machine, SimulatedDevice, Transfer
    from devmap_cli.simulation.memory import MemoryUse
    from devmap_cli.simulation.trace import Recorder
    from devmap_cli.simulation.workload import Workload


@dataclass(frozen=True)
class Failure:
    """What stopped the run, as the real one would have been stopped."""

    phase: str
    module: str
    error: RuntimeError | ValueError | IndexError


@dataclass(frozen=True)
class Rehearsal:
    """What a run was seen to do: `phases` of a device are load, prefill and decode, as far as it got."""

    devices: tuple[DeviceRehearsal, ...]
    transfers: tuple[Transfer, ...]
    module_order: tuple[str, ...]
    assumptions: tuple[str, ...]
    failure: Failure | None

    def raise_failure(self) -> None:
        """Raise what stopped the run, if anything did."""
        if self.failure is not None:
            raise self.failure.error


def rehearse(
    model: Any,
    device_map: Mapping[str, int | str],
    workload: Workload,
    capacities: Sequence[int],
    *,
    expandable_segments: bool = False,
    compute_capabilities: Sequence[Capability] | None = None,
    recorder: Recorder | None = None,
) -> Rehearsal:
    """Run `workload` through `model`, made on the meta device, with its parts placed by `device_map`.

    `capacities` are bytes, one per device, as `compute_capabilities` are; `recorder` is told of what is allocated. What
    stops the run is the result's `failure`: no memory left, tensors that meet across devices, a map that accelerate
    refuses. The model is left as it was. Raises ValueError for a workload that the model cannot be given,
    NotImplementedError for an operator without shape inference.
    """
    assumptions: dict[str, None] = {}

    def assume(assumption: str) -> None:
        machine = active_machine()
        assumptions.setdefault(f"{machine.modules.current}: {assumption}")
        if machine.tape is not None:
            machine.tape.spoil()

    with (
        simulated_devices(
            capacities,
            numbers=Shapes(assume),
            expandable_segments=expandable_segments,
            compute_capabilities=compute_capabilities,
            recorder=recorder,
        ) as machine,
        torch.no_grad(),
        attention_of(model, workload.attention),
        quantized_layers(),
        mended(model, assumptions.setdefault),
        taped_functions(model),
    ):
        machine.modules.watch(model)
        run = _Run(model, normalized(device_map), workload, machine)
        run.execute()
        return Rehearsal(
            devices=tuple(run.report(device) for device in machine.devices),
            transfers=run.transfers(),
            module_order=tuple(machine.modules.order),
            assumptions=tuple(assumptions),
            failure=run.failure,
        )


class _Run:
    """One rehearsal: loads, generates two tokens, and lets the cache grow to its final length between them."""

    def __init__(self, model: Any, device_map: dict[str, int | str], workload: Workload, machine: Machine) -> None:
        self.model = model
        self.device_map = device_map
        self.workload = workload
        self.machine = machine
        self.failure: Failure | None = None
        self._phase = ""
        self._phase_scope = ExitStack()
        self._weights: dict[SimulatedDevice, int] | None = None
        self._kv_cache: dict[str, dict[SimulatedDevice, int]] = {}
        self._inputs = make_inputs(model.config, workload)

    def execute(self) -> None:
        """Run it, until its end or the error that the real one would have ended with."""
        try:
            with self._phase_scope:
                self._enter("load")
                with placed(self.model, self.device_map, self.machine, self._dtype()):
                    self._weights = {device: device.use.allocated_bytes for device in self.machine.devices}
                    self._enter("prefill")
                    self._generate()
                    if self.machine.recorder is not None:
                        self._end(self.machine.recorder)
        except NotImplementedError as error:
            module = self.machine.modules.raised_in(error)
            raise NotImplementedError(f"{error}: it cannot be rehearsed, {module or 'the model'} calls it") from error
        except (RuntimeError, ValueError, IndexError) as error:
            self.failure = Failure(self._phase, self.machine.modules.raised_in(error), error)

    def _end(self, recorder: Recorder) -> None:
        for tensor in chain(self.model.parameters(), self.model.buffers()):
            shared = getattr(tensor, "kept_beside", None)
            if shared is not None:
                recorder.once(shared.allocation.number)
        recorder.stop()

    def _enter(self, phase: str) -> None:
        self._phase_scope.close()
        self._phase = phase
        self._phase_scope.enter_context(self.machine.phase(phase))
        if self.machine.recorder is not None and phase != "load":
            self.machine.recorder.phase(phase)

    def _dtype(self) -> torch.dtype | None:
        dtype: torch.dtype | None = getattr(torch, self.workload.dtype) if self.workload.dtype else None
        return dtype

    def _generate(self) -> None:
        device = self._first_device()
        inputs = {name: value.to(device) for name, value in self._inputs.items()}
        for name in inputs.keys() & set(cast_by_people(self.model.config)):
            inputs[name] = inputs[name].to(self._dtype() or self.model.dtype)
        if not self.model.can_generate():
            self.model(**inputs)
            return
        with _after_each_step(self.model, self._after_step), _moves_told(self.model, self.machine.recorder):
            self.model.generate(**inputs, **self._generation_options())

    def _generation_options(self) -> dict[str, Any]:
        num_steps = min(2, self.workload.max_new_tokens)
        options = {
            "max_new_tokens": num_steps,
            "min_new_tokens": num_steps,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": self.model.config.get_text_config().vocab_size - 1,  # none that is chosen here
            **generation_options(self.workload.kv_dtype),
        }
        if hasattr(self.model.generation_config, "use_mtp"):
            # Several tokens per step: some models want it by default, though their class has no layers for it.
            options["use_mtp"] = False
        return options

    def _first_device(self) -> torch.device:
        """The device where people put the inputs: that of the input embeddings, or the main device."""
        for parameter in self.model.get_input_embeddings().parameters():
            if isinstance(parameter, DeviceTensor):
                return parameter.device
        numbers = {place for place in self.device_map.values() if isinstance(place, int)}
        return self.machine.device(next(iter(numbers), 0)).torch_device

    def _after_step(self, outputs: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        cache = outputs.get("cache", outputs.get("past_key_values"))
        self._kv_cache[self._phase] = self._kept(cache)
        if self._phase == "decode" or self.workload.max_new_tokens == 1:
            return model_kwargs
        self._enter("decode")
        num_between = self.workload.max_new_tokens - 2
        if num_between == 0:
            return model_kwargs
        grow(cache, num_between, getattr(self.model.config.get_text_config(), "cross_attention_layers", ()))
        return _longer(model_kwargs, num_between, is_encoder_decoder=self.model.config.is_encoder_decoder)

    def _kept(self, cache: Any) -> dict[SimulatedDevice, int]:
        """Bytes of `cache` by device."""
        allocations = {tensor.allocation for tensor in tensors_of(cache) if isinstance(tensor, DeviceTensor)}
        if self.machine.recorder is not None:
            self.machine.recorder.cached({item.number for item in allocations if item.number is not None})
        total: dict[SimulatedDevice, int] = {}
        for allocation in allocations:
            total[allocation.device] = total.get(allocation.device, 0) + allocation.block_bytes
        return total

    def transfers(self) -> tuple[Transfer, ...]:
        """The copies made; what accelerate read from memory here for a module on disk comes from the disk."""
        return tuple(
            replace(move, source="disk")
            if move.source == "cpu" and device_of(move.module, self.device_map) == "disk"
            else move
            for move in self.machine.transfers
        )

    def report(self, device: SimulatedDevice) -> DeviceRehearsal:
        """What was seen of `device`."""
        allocated = {phase: use.allocated_bytes for phase, use in device.phases.items()}
        return DeviceRehearsal(
            index=device.index or 0,
            capacity_bytes=device.total_bytes,
            phases={phase: self._memory(device, phase, use) for phase, use in device.phases.items()},
            allocated_bytes=allocated,
            peak_phase=max(allocated, key=lambda phase: allocated[phase]),
            work={phase: device.counter.work(phase) for phase in PHASES},
            block_work=device.counter.by_block(),
        )

    def _memory(self, device: SimulatedDevice, phase: str, use: MemoryUse) -> PhaseMemory:
        return PhaseMemory.of(
            use,
            # Until all are loaded, weights are all there is.
            weights_bytes=use.allocated_bytes if self._weights is None else self._weights[device],
            kv_cache_bytes=self._kv_cache.get(phase, {}).get(device, 0),
            workspace_bytes=0 if phase == "load" else device.workspace_bytes,
        )


def _longer(model_kwargs: dict[str, Any], num_tokens: int, *, is_encoder_decoder: bool) -> dict[str, Any]:
    """The arguments of the next step as they are `num_tokens` later."""
    prefix = "decoder_" if is_encoder_decoder else ""
    mask = model_kwargs.get(f"{prefix}attention_mask")
    if mask is not None:
        longer = torch.cat([mask, mask.new_ones((mask.shape[0], num_tokens))], dim=-1)
        model_kwargs = {**model_kwargs, f"{prefix}attention_mask": longer}
    positions = model_kwargs.get(f"{prefix}position_ids")
    if positions is not None:
        model_kwargs = {**model_kwargs, f"{prefix}position_ids": positions + num_tokens}
    return model_kwargs


@contextmanager
def _moves_told(model: Any, recorder: Recorder | None) -> Iterator[None]:
    """Let `recorder` know of the inputs that `generate` moves to the device of the first weight before each step."""
    if recorder is None:
        yield
        return
    first, _ = next(model.named_parameters())
    original = model.prepare_inputs_for_generation

    @wraps(original)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        with recorder.moving(first):
            return original(*args, **kwargs)

    model.prepare_inputs_for_generation = prepare
    try:
        yield
    finally:
        del model.prepare_inputs_for_generation


@contextmanager
def _after_each_step(model: Any, callback: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Let `callback` see the outputs of each step of `generate`, and change the arguments of the next one."""
    original = model._update_model_kwargs_for_generation

    def update(outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        return callback(outputs, original(outputs, model_kwargs, *args, **kwargs))

    model._update_model_kwargs_for_generation = update
    try:
        yield
    finally:
        del model._update_model_kwargs_for_generation
