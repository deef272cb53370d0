"""Rehearses maps: the model's real code on simulated devices, with the budgets as their memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from devmap_cli.checking import diagnosis
from devmap_cli.checking.coverage import weights_by_device
from devmap_cli.checking.diagnosis import Scene
from devmap_cli.checking.forecast import PHASES, Copy, DeviceForecast, Forecast, Move, PhasePeak
from devmap_cli.errors import RequestError, first_line
from devmap_cli.model.names import owner

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from devmap_cli.checking.findings import Finding
    from devmap_cli.devices.device import Device
    from devmap_cli.mapfile import MapWorkload
    from devmap_cli.model.spec import ModelSpec
    from devmap_cli.simulation.rehearsal import DeviceRehearsal, Failure, Rehearsal
    from devmap_cli.simulation.workload import Workload

_UNLIMITED_BYTES = 1 << 50
_MAX_TRIALS = 6
"""How many moves are tried on a map whose tensors meet across devices."""


def empty_model(spec: ModelSpec, *, trust_remote_code: bool) -> Any:
    """The model that `spec` describes, without weights.

    Raises:
        RequestError: transformers cannot build it.
        SurroundingsError: the hub or a package is missing.
    """
    from devmap_cli.model.empty import build_quantized
    from devmap_cli.model.quantization.scheme import quantization_in_map
    from devmap_cli.model.quiet import quiet_libraries
    from devmap_cli.model.reference import resolve

    reference = resolve(spec.model_id, spec.revision)
    with quiet_libraries():
        quantization = quantization_in_map(spec.quantization)
        return build_quantized(reference, spec.dtype, quantization, trust_remote_code=trust_remote_code).model


@dataclass(frozen=True, slots=True)
class Rehearser:
    """Rehearses maps of one model for one workload.

    Args:
        model: the empty model that `spec` describes.
        budgets: bytes per device; one without a budget is unlimited.
    """

    model: Any
    spec: ModelSpec
    workload: MapWorkload
    budgets: Mapping[Device, int]

    def forecast(self, device_map: Mapping[str, Device]) -> Forecast:
        """What a run with `device_map`, in today's names, will take, and what will stop it.

        What transformers would refuse before a run is not rehearsed: of that, only weights are told.

        Raises:
            RequestError: the model cannot take the workload, whatever the map.
        """
        from devmap_cli.simulation.inputs import make_inputs

        try:
            make_inputs(self.model.config, self.simulated_workload())
        except ValueError as error:
            raise RequestError(first_line(error).rstrip("."), "see --prompt-tokens, --image and --video") from error
        skipped = self._reason_to_skip(device_map)
        trial = _Trial(self, device_map)
        return trial.skipped(skipped) if skipped else trial.forecast()

    def simulated_workload(self) -> Workload:
        """The workload as the simulation takes it."""
        from devmap_cli.simulation.workload import Workload

        asked = self.workload
        return Workload(
            batch_size=asked.batch_size,
            prompt_tokens=asked.prompt_tokens,
            max_new_tokens=asked.max_new_tokens,
            images=tuple((width, height) for height, width in asked.images),
            videos=tuple((width, height, num_frames) for height, width, num_frames in asked.videos),
            attention=asked.attention,
        )

    def _reason_to_skip(self, device_map: Mapping[str, Device]) -> str | None:
        if not any(device.is_accelerator for device in device_map.values()):
            return "nothing is on a GPU"
        left_out = [name for name in self.model.state_dict() if owner(name, device_map) is None]
        if left_out:
            return f"{left_out[0]}{f' and {len(left_out) - 1} more' if len(left_out) > 1 else ''} would have no device"
        return None


class _Trial:
    """The rehearsals of one map."""

    def __init__(self, rehearser: Rehearser, device_map: Mapping[str, Device]) -> None:
        self._rehearser = rehearser
        self._scene = Scene(rehearser.model, rehearser.spec, device_map)
        self._capacities = [rehearser.budgets.get(device, _UNLIMITED_BYTES) for device in self._scene.accelerators]

    def forecast(self) -> Forecast:
        """Rehearse with all the memory that it takes; where that is more than there is, again with what there is.

        A run that never needs more than there is goes alike with and without the limit. One that does may still fit,
        because the allocator then gives back what it keeps for later.
        """
        unlimited = self._rehearse_unlimited()
        if unlimited.failure is not None:
            return self._stopped(unlimited, unlimited.failure)
        if not any(_most_reserved(device) > capacity for device, capacity in self._with_capacities(unlimited)):
            return self._told(unlimited)
        limited = self._rehearse(self._scene.places(), self._capacities)
        if limited.failure is None:
            return self._told(limited)
        return self._told(unlimited, self._out_of_memory(unlimited, limited.failure), limited.failure.phase)

    def skipped(self, reason: str, findings: tuple[Finding, ...] = ()) -> Forecast:
        """No rehearsal, because of `reason`: the weights of each device are all that is known."""
        return Forecast(devices=tuple(self._weights()), findings=findings, skipped=reason)

    def _rehearse_unlimited(self) -> Rehearsal:
        return self._rehearse(self._scene.places(), [_UNLIMITED_BYTES] * len(self._scene.accelerators))

    def _rehearse(self, places: Mapping[str, int | str], capacities: list[int]) -> Rehearsal:
        """Rehearse the map `places`; any error of the model's code is the rehearsal's failure."""
        from devmap_cli.model.quiet import quiet_libraries
        from devmap_cli.simulation.rehearsal import Failure, Rehearsal, rehearse

        try:
            with quiet_libraries():
                return rehearse(self._scene.model, places, self._rehearser.simulated_workload(), capacities)
        except Exception as error:  # noqa: BLE001 - model code may raise anything
            return Rehearsal((), (), (), (), Failure("", "", error))  # type: ignore[arg-type]  # any error will do

    def _with_capacities(self, rehearsal: Rehearsal) -> list[tuple[DeviceRehearsal, int]]:
        return list(zip(rehearsal.devices, self._capacities, strict=True))

    def _out_of_memory(self, unlimited: Rehearsal, failure: Failure) -> tuple[Finding, ...]:
        """The device that ran out first, and the others that hold more in tensors than they have."""
        first = self._scene.named_in(str(failure.error))[:1]
        findings = []
        for seen, capacity in self._with_capacities(unlimited):
            device = self._scene.accelerators[seen.index]
            over = [phase for phase in PHASES if seen.allocated_bytes.get(phase, 0) > capacity]
            needed = seen.peak.reserved_bytes if seen.peak.reserved_bytes > capacity else _most_reserved(seen)
            short = diagnosis.Shortage(device, needed, seen.peak.weights_bytes, capacity)
            if device in first:
                findings.append(diagnosis.out_of_memory(short, failure.phase, failure.module))
            elif over:
                findings.append(diagnosis.out_of_memory(short, over[0]))
        return tuple(findings)

    def _stopped(self, rehearsal: Rehearsal, failure: Failure) -> Forecast:
        stopped_in = failure.phase or PHASES[0]
        if diagnosis.is_mixed(failure):
            remedy = self._remedy(rehearsal, failure)
            told = self._told(rehearsal, (diagnosis.mixed_devices(self._scene, failure, remedy),), stopped_in)
            return replace(told, remedy=remedy)
        if self._rehearse({"": 0}, [_UNLIMITED_BYTES]).failure is None:
            return self._told(rehearsal, (diagnosis.run_fails(self._scene, failure),), stopped_in)
        finding = diagnosis.not_rehearsed(self._scene, failure)
        return self.skipped(finding.message, (finding,))

    def _remedy(self, rehearsal: Rehearsal, failure: Failure) -> Move | None:
        """A move of one module with which the run gets through."""
        for move in islice(diagnosis.moves(self._scene, rehearsal.module_order, failure), _MAX_TRIALS):
            trial = _Trial(self._rehearser, move.applied(self._scene.device_map))
            if trial._rehearse_unlimited().failure is None:
                return move
        return None

    def _told(
        self, rehearsal: Rehearsal, findings: tuple[Finding, ...] = (), stopped_in: str | None = None
    ) -> Forecast:
        device = self._scene.device
        return Forecast(
            devices=(
                *map(self._device_forecast, rehearsal.devices),
                *(item for item in self._weights() if not item.device.is_accelerator),
            ),
            findings=findings,
            assumptions=rehearsal.assumptions,
            copies=tuple(
                Copy(item.phase, device(item.source), device(item.target), item.module, item.num_bytes)
                for item in rehearsal.transfers
            ),
            stopped_in=stopped_in,
        )

    def _device_forecast(self, seen: DeviceRehearsal) -> DeviceForecast:
        phases = {
            phase: PhasePeak(
                phase, memory.weights_bytes, memory.kv_cache_bytes, memory.activation_bytes, memory.overhead_bytes
            )
            for phase, memory in seen.phases.items()
        }
        device = self._scene.accelerators[seen.index]
        budget = self._rehearser.budgets.get(device)
        return DeviceForecast(device, budget, tuple(phases.values()), phases[seen.peak_phase])

    def _weights(self) -> Iterator[DeviceForecast]:
        """What the map alone says of each device, accelerators first."""
        held = weights_by_device(self._scene.device_map, self._rehearser.spec)
        for device in sorted(held, key=lambda device: (not device.is_accelerator, device)):
            load = PhasePeak(PHASES[0], held[device], 0, 0, 0)
            yield DeviceForecast(device, self._rehearser.budgets.get(device), (load,), load)


def _most_reserved(seen: DeviceRehearsal) -> int:
    return max(memory.reserved_bytes for memory in seen.phases.values())
