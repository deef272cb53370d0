"""Rehearses maps: the model's real code on simulated devices, with the budgets as their memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from devmap_cli.checking import diagnosis
from devmap_cli.checking.coverage import weights_by_device
from devmap_cli.checking.diagnosis import Scene
from devmap_cli.checking.findings import any_error
from devmap_cli.checking.forecast import PHASES, Copy, DeviceForecast, Forecast, Move, PhasePeak, allocatable_bytes
from devmap_cli.checking.layers import quantized_off_gpu
from devmap_cli.checking.lengths import check_length
from devmap_cli.devices.capability import capability_of
from devmap_cli.devices.device import CPU, DISK
from devmap_cli.errors import first_line
from devmap_cli.model.kv_dtypes import AUTO, refusal
from devmap_cli.model.names import owner
from devmap_cli.simulation.asking import inputs_for
from devmap_cli.simulation.memory import UNLIMITED_BYTES
from devmap_cli.simulation.workload import simulated

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from devmap_cli.checking.findings import Finding
    from devmap_cli.devices.cards import Card
    from devmap_cli.devices.device import Device
    from devmap_cli.mapfile import MapWorkload
    from devmap_cli.model.spec import ModelSpec
    from devmap_cli.simulation.memory import DeviceRehearsal, PhaseMemory
    from devmap_cli.simulation.rehearsal import Failure, Rehearsal

_TOO_LONG = "it is longer than what the model has positions for"
_SOUND = "a prompt of sound as long as the model takes; the tokens of the prompt count for nothing"
_AS_ON_A_GPU = "the cpu's kernels take for a moment what a GPU's do"
_MAX_TRIALS = 8
"""How many moves are tried on a map whose tensors meet across devices."""


@dataclass(frozen=True, slots=True)
class Rehearser:
    """Rehearses maps of one model for one workload.

    Args:
        model: the empty model that `spec` describes.
        budgets: bytes per device; one without a budget is unlimited.
        cards: of the accelerators, as far as they are known.
        is_all: whether there are no accelerators but those with a budget.
    """

    model: Any
    spec: ModelSpec
    workload: MapWorkload
    budgets: Mapping[Device, int]
    cards: Mapping[Device, Card] = field(default_factory=dict)
    is_all: bool = False

    def forecast(self, device_map: Mapping[str, Device]) -> Forecast:
        """What a run with `device_map`, in today's names, will take, and what will stop it.

        What transformers would refuse before a run is not rehearsed: of that, only weights are told.

        Raises:
            RequestError: the model cannot take the workload, whatever the map.
        """
        takes_text = "input_ids" in inputs_for(self.model, self.workload)
        too_long = tuple(check_length(self.model, self.workload, takes_text=takes_text))
        skipped = self._reason_to_skip(device_map) or (_TOO_LONG if any_error(too_long) else None)
        trial = _Trial(self, device_map)
        forecast = trial.skipped(skipped) if skipped else trial.forecast()
        return replace(
            forecast,
            findings=(*forecast.findings, *too_long),
            assumptions=(*(() if takes_text else (_SOUND,)), *forecast.assumptions),
        )

    def _reason_to_skip(self, device_map: Mapping[str, Device]) -> str | None:
        if set(device_map.values()) == {DISK}:
            return "nothing is on a device that computes"
        if any(quantized_off_gpu(device_map, self.spec)):
            return "quantized weights are where they cannot run"
        left_out = [name for name in self.model.state_dict() if owner(name, device_map) is None]
        if left_out:
            return f"{left_out[0]}{f' and {len(left_out) - 1} more' if len(left_out) > 1 else ''} would have no device"
        return None


class _Trial:
    """The rehearsals of one map."""

    def __init__(self, rehearser: Rehearser, device_map: Mapping[str, Device]) -> None:
        self._rehearser = rehearser
        self._scene = Scene(rehearser.model, rehearser.spec, device_map)
        self._capacities = [
            allocatable_bytes(rehearser.budgets[device], device) if device in rehearser.budgets else UNLIMITED_BYTES
            for device in self._scene.computing
        ]
        cards = rehearser.cards
        self._capabilities = [capability_of(cards.get(device)) for device in self._scene.computing]

    def forecast(self) -> Forecast:
        """Rehearse with all the memory that it takes; where that is more than there is, again with what there is.

        A run that never needs more than there is goes alike with and without the limit. One that does may still fit,
        because the allocator then gives back what it keeps for later.
        """
        unlimited = self._rehearse_unlimited()
        if unlimited.failure is not None:
            return self._stopped(unlimited, unlimited.failure)
        if self._scene.computing == [CPU]:
            return self._on_cpu(unlimited)
        if not self._may_be_short(unlimited, self._capacities):
            return self._told(unlimited)
        return self._within_limits(unlimited)

    def _on_cpu(self, unlimited: Rehearsal) -> Forecast:
        """What the cpu alone takes, whose allocator keeps nothing for later: what is in tensors has to fit."""
        told, (capacity,) = self._told(unlimited), self._capacities
        cpu = told.devices[0]
        over = [phase.phase for phase in cpu.phases if phase.peak_bytes > capacity]
        if not over:
            return told
        short = self._shortage(CPU, cpu.highest.peak_bytes, cpu.highest, capacity)
        return replace(told, findings=(diagnosis.out_of_memory(short, over[0]),), stopped_in=over[0])

    def _within_limits(self, unlimited: Rehearsal) -> Forecast:
        """Each device that is too small, found one after the other: what ran out gets all it takes the next time."""
        capacities = list(self._capacities)
        findings: dict[int, Finding] = {}
        stopped_in: str | None = None
        while (rehearsal := self._rehearse(self._scene.places(), capacities)).failure is not None:
            failure = rehearsal.failure
            short = self._short(unlimited, failure, capacities)
            if not short:
                return self._told(
                    unlimited, (*findings.values(), diagnosis.run_fails(self._scene, failure)), stopped_in
                )
            for index, finding in short.items():
                findings[index] = finding
                capacities[index] = UNLIMITED_BYTES
            stopped_in = stopped_in or failure.phase
            if not self._may_be_short(unlimited, capacities):
                rehearsal = unlimited
                break
        return self._told(rehearsal, tuple(findings[index] for index in sorted(findings)), stopped_in)

    def skipped(self, reason: str, findings: tuple[Finding, ...] = ()) -> Forecast:
        """No rehearsal, because of `reason`: the weights of each device are all that is known."""
        return Forecast(devices=tuple(self._weights()), findings=findings, skipped=reason)

    def _rehearse_unlimited(self) -> Rehearsal:
        return self._rehearse(self._scene.places(), [UNLIMITED_BYTES] * len(self._scene.computing))

    def _rehearse(self, places: Mapping[str, int | str], capacities: list[int]) -> Rehearsal:
        """Rehearse the map `places`; any error of the model's code is the rehearsal's failure."""
        from devmap_cli.model.quiet import quiet_libraries
        from devmap_cli.simulation.rehearsal import Failure, Rehearsal, rehearse

        try:
            with quiet_libraries():
                return rehearse(
                    self._scene.model,
                    places,
                    simulated(self._rehearser.workload),
                    capacities,
                    compute_capabilities=self._capabilities[: len(capacities)],
                )
        except Exception as error:  # noqa: BLE001 - model code may raise anything
            return Rehearsal((), (), (), (), Failure("", "", error))  # type: ignore[arg-type]  # any error will do

    @staticmethod
    def _may_be_short(unlimited: Rehearsal, capacities: list[int]) -> bool:
        """Whether a device took more than it may; it may still be enough, with less kept for later."""
        return any(seen.most_reserved_bytes > capacities[seen.index] for seen in unlimited.devices)

    def _short(self, unlimited: Rehearsal, failure: Failure, capacities: list[int]) -> dict[int, Finding]:
        """By position, the device that ran out, and the others that hold more in tensors than they have."""
        first = self._scene.named_in(str(failure.error))[:1]
        findings = {}
        for seen in unlimited.devices:
            index = seen.index
            if capacities[index] == UNLIMITED_BYTES:
                continue
            device = self._scene.computing[index]
            over = [phase for phase in PHASES if seen.allocated_bytes.get(phase, 0) > capacities[index]]
            budget = self._rehearser.budgets[device]
            needed = seen.most_reserved_bytes + budget - allocatable_bytes(budget, device)
            short = self._shortage(device, needed, seen.peak, budget)
            if device in first:
                findings[index] = diagnosis.out_of_memory(short, failure.phase, failure.module)
            elif over:
                findings[index] = diagnosis.out_of_memory(short, over[0])
        return findings

    def _shortage(
        self, device: Device, needed_bytes: int, peak: PhaseMemory | PhasePeak, budget: int
    ) -> diagnosis.Shortage:
        workload = self._rehearser.workload
        media = (("take smaller images", workload.images), ("take fewer frames", workload.videos))
        ways = ("shorten the prompt", *(way for way, given in media if given))
        return diagnosis.Shortage(device, needed_bytes, peak.weights_bytes, peak.activation_bytes, budget, ways)

    def _stopped(self, rehearsal: Rehearsal, failure: Failure) -> Forecast:
        stopped_in = failure.phase or PHASES[0]
        if diagnosis.is_mixed(failure):
            remedy = self._remedy(rehearsal, failure)
            told = self._told(rehearsal, (diagnosis.mixed_devices(self._scene, failure, remedy),), stopped_in)
            return replace(told, remedy=remedy)
        if self._rehearse({"": 0}, [UNLIMITED_BYTES]).failure is None:
            return self._told(rehearsal, (diagnosis.run_fails(self._scene, failure),), stopped_in)
        self._refuse_kv_dtype(failure)
        finding = diagnosis.not_rehearsed(self._scene, failure)
        return self.skipped("its code does not get through a rehearsal on one device either", (finding,))

    def _refuse_kv_dtype(self, failure: Failure) -> None:
        """Refuse a quantized cache that the model's code does not go with, which it does without."""
        rehearser, workload = self._rehearser, self._rehearser.workload
        if workload.kv_dtype == AUTO:
            return
        plain = _Trial(replace(rehearser, workload=replace(workload, kv_dtype=AUTO)), self._scene.device_map)
        if plain._rehearse({"": 0}, [UNLIMITED_BYTES]).failure is None:
            raise refusal(rehearser.spec.model_id, workload.kv_dtype, first_line(failure.error))

    def _remedy(self, rehearsal: Rehearsal, failure: Failure) -> tuple[Move, ...]:
        """Moves with which the run gets through: of those tried, each one with which it gets further than before."""
        if self._scene.cause(failure.module) is not None:
            return ()
        trial: _Trial = self
        found: list[Move] = []
        num_trials = 0
        while True:
            for move in diagnosis.moves(trial._scene, rehearsal.module_order, failure):
                if num_trials == _MAX_TRIALS:
                    return ()
                num_trials += 1
                moved = _Trial(self._rehearser, move.applied(trial._scene.device_map))
                seen = moved._rehearse_unlimited()
                if seen.failure is None:
                    return (*found, move)
                if diagnosis.is_mixed(seen.failure) and _progress(seen) > _progress(rehearsal):
                    trial, rehearsal, failure = moved, seen, seen.failure
                    found.append(move)
                    break
            else:
                return ()

    def _told(
        self, rehearsal: Rehearsal, findings: tuple[Finding, ...] = (), stopped_in: str | None = None
    ) -> Forecast:
        device, seen = self._scene.device, rehearsal.devices
        computing = self._scene.computing if seen else []
        return Forecast(
            devices=(
                *map(self._device_forecast, seen),
                *(item for item in self._weights() if item.device not in computing),
            ),
            findings=findings,
            assumptions=(
                *((_AS_ON_A_GPU,) if computing == [CPU] else ()),
                *(text.removeprefix(": ") for text in rehearsal.assumptions),
            ),
            copies=tuple(
                Copy(item.phase, device(item.source), device(item.target), item.module, item.num_bytes)
                for item in rehearsal.transfers
            ),
            stopped_in=stopped_in,
        )

    def _device_forecast(self, seen: DeviceRehearsal) -> DeviceForecast:
        device = self._scene.computing[seen.index]
        phases = {
            phase: PhasePeak(
                phase,
                memory.weights_bytes,
                memory.kv_cache_bytes,
                memory.activation_bytes,
                memory.overhead_bytes if device.is_accelerator else 0,  # the cpu has no caching allocator
            )
            for phase, memory in seen.phases.items()
        }
        budget = self._rehearser.budgets.get(device)
        highest = max(phases, key=lambda phase: (phases[phase].peak_bytes, seen.allocated_bytes[phase]))
        return DeviceForecast(device, budget, tuple(phases.values()), phases[highest])

    def _weights(self) -> Iterator[DeviceForecast]:
        """What the map alone says of each device, accelerators first."""
        held = weights_by_device(self._scene.device_map, self._rehearser.spec)
        for device in sorted(held, key=lambda device: (not device.is_accelerator, device)):
            load = PhasePeak(PHASES[0], held[device], 0, 0, 0)
            yield DeviceForecast(device, self._rehearser.budgets.get(device), (load,), load)


def _progress(rehearsal: Rehearsal) -> tuple[int, int]:
    """How far a rehearsal got: its phase, and how many modules had run."""
    phase = rehearsal.failure.phase if rehearsal.failure is not None else PHASES[-1]
    return PHASES.index(phase) if phase in PHASES else 0, len(rehearsal.module_order)
