"""Plans by what a run really takes: a profile of the workload, and a rehearsal of what comes out."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from devmap_cli.cli.workload import with_room_for_media

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from devmap_cli.checking.assurance import Assurance
    from devmap_cli.devices.capability import Capability
    from devmap_cli.devices.device import Device
    from devmap_cli.mapfile import MapWorkload
    from devmap_cli.model.spec import ModelSpec
    from devmap_cli.planning.means import PlanRequest
    from devmap_cli.planning.nouns import Infeasible, Placement
    from devmap_cli.planning.pace import Pace
    from devmap_cli.planning.profile import Profile
    from devmap_cli.planning.profiling import Profiler


_MUCH = 4
"""Activations are named where they take one part in so many of a device, or more."""


class Planning:
    """Answers planning requests for one model, and remembers its profiles.

    `kernels` is the capability that the model was loaded for. `is_local` says that the devices are in this machine.
    `reason` says why the last request was planned by weights and KV cache alone; None where it was not.
    """

    def __init__(
        self, spec: ModelSpec, kernels: Capability | None = None, *, is_local: bool = True, trust_remote_code: bool
    ) -> None:
        self.spec = spec
        self.is_local = is_local
        self._kernels = kernels
        self.reason: str | None = None
        self._trust_remote_code = trust_remote_code
        self._profiles: dict[tuple[MapWorkload, Capability], Profile | None] = {}
        self._reasons: dict[tuple[MapWorkload, Capability], str | None] = {}
        self._profiler: Profiler | None = None

    def plan(self, request: PlanRequest, *, rehearse: bool = True, is_probe: bool = False) -> Placement | Infeasible:
        """The placement, or why there is none.

        It is rehearsed before if the model is at hand, which it is where its workload is new, and where it is so close
        that only a rehearsal can tell. `is_probe` is for those who only ask whether it fits.

        Raises:
            RequestError: the model cannot take the workload, or a pin, a weight or the strategy does not go with it.
        """
        from devmap_cli.planning.planner import make_plan

        profile = self.profile(request)
        self.reason = self._reasons.get((request.workload, request.capability))
        pace = self.pace(request)
        if profile is None or is_probe:
            return make_plan(self.spec, request, profile, pace=pace, is_probe=is_probe)
        confirm = self._rehearsal(request)
        is_at_hand = self._profiler is not None and self._profiler.model is not None
        missing = confirm if rehearse and is_at_hand else None
        return make_plan(self.spec, request, profile, missing, pace, confirm=confirm)

    def _rehearsal(self, request: PlanRequest) -> Callable[[Mapping[str, Device]], Mapping[Device, int]]:
        """What tells of device maps what devices lack; the model is built when the first one is asked about."""

        @cache
        def assurance() -> Assurance:
            from devmap_cli.checking.assurance import Assurance
            from devmap_cli.checking.rehearsed import Rehearser

            model = self._made_profiler().empty_model()
            return Assurance(Rehearser(model, self.spec, request.workload, dict(request.budgets), request.cards))

        return lambda device_map: assurance().missing(device_map)

    def with_room_for_media(self, workload: MapWorkload) -> MapWorkload:
        """`workload` with a prompt that has room for its images and videos, and for a question about them.

        Raises:
            RequestError: the model cannot take them.
        """
        if not workload.images and not workload.videos:
            return workload
        return with_room_for_media(workload, self._made_profiler().media_tokens(workload))

    def largest_activation(self, request: PlanRequest) -> str | None:
        """The block that needs most beside what stays, in words; None where that is little beside the budgets."""
        profile = self.profile(request)
        accelerators = request.budgets.accelerators
        if profile is None or not accelerators:
            return None
        from devmap_cli.planning.blocks import blocks_of
        from devmap_cli.units import format_bytes

        block = max(profile.blocks(blocks_of(self.spec, 0, 1)), key=lambda block: block.largest_transient_bytes)
        largest = max(request.budgets[device] for device in accelerators)
        if _MUCH * block.largest_transient_bytes < largest:
            return None
        return f"the activations of {block.fqns[0]} take {format_bytes(block.largest_transient_bytes)}"

    def with_weights(self, *, dtype: str | None = None, quantize: str | None = None) -> Planning:
        """The same for the model's weights in another dtype, or quantized while they are loaded."""
        from devmap_cli.model.load import load_spec

        spec = load_spec(
            self.spec.model_id,
            revision=self.spec.revision,
            dtype=dtype or self.spec.dtype,
            quantize=quantize,
            trust_remote_code=self._trust_remote_code,
            kernels=self._kernels,
        )
        return Planning(spec, self._kernels, is_local=self.is_local, trust_remote_code=self._trust_remote_code)

    def pace(self, request: PlanRequest) -> Pace | None:
        """What tells the speed of placements for a request; None without a profile."""
        profile = self.profile(request)
        if profile is None:
            return None
        from devmap_cli.planning.pace import Pace

        return Pace(profile, self.spec.dtype, request.cards)

    def shown_pace(self, request: PlanRequest, placement: Placement) -> Pace | None:
        """The pace to tell of: with what was measured where this machine's RAM or disk takes part.

        It is measured now if torch is there already, as on the first plan of a workload. Plans are made without, so
        that they don't depend on what a machine happens to reach.
        """
        pace = self.pace(request)
        if pace is None or not self.is_local or all(device.is_accelerator for device in placement.devices):
            return pace
        from devmap_cli.devices.measuring import measured, measured_before
        from devmap_cli.model.cache import cache_folder

        known = measured(cache_folder()) if "torch" in sys.modules else measured_before(cache_folder())
        return replace(pace, measured=known)

    def profile(self, request: PlanRequest) -> Profile | None:
        """What the model needs for the workload; None where only weights count, or nothing else is known."""
        if request.weights_only or not request.budgets.devices:
            return None
        key = (request.workload, request.capability)
        if key not in self._profiles:
            profiler = self._made_profiler()
            self._profiles[key] = profiler.profile(*key)
            self._reasons[key] = profiler.reason
        return self._profiles[key]

    def _made_profiler(self) -> Profiler:
        if self._profiler is None:
            from devmap_cli.planning.profiling import Profiler

            self._profiler = Profiler(self.spec, trust_remote_code=self._trust_remote_code)
        return self._profiler
