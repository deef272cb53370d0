"""Makes profiles, and keeps them between runs, so that a second plan needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from devmap_cli.devices.capability import DEFAULT_CAPABILITY, Capability
from devmap_cli.errors import RequestError, first_line
from devmap_cli.model.cache import key_of, read_document, write_document
from devmap_cli.model.kv_dtypes import AUTO, refusal
from devmap_cli.planning.blocks import blocks_of
from devmap_cli.planning.profile import DECODE, PREFILL, Profile
from devmap_cli.simulation.work import Work

if TYPE_CHECKING:
    from devmap_cli.mapfile import MapWorkload
    from devmap_cli.model.spec import ModelSpec
    from devmap_cli.simulation.recording import Recording

_FOLDER = "profiles"
_MEDIA_FOLDER = "media"


@dataclass
class Profiler:
    """Profiles of one model; it is built, without weights, only for a workload that is new.

    Args:
        model: the empty model where it is there already.
    """

    spec: ModelSpec
    trust_remote_code: bool = False
    model: Any = None
    reason: str | None = field(default=None, init=False)
    """Why the last profile could not be made."""

    def profile(self, workload: MapWorkload, capability: Capability = DEFAULT_CAPABILITY) -> Profile | None:
        """What the model needs for `workload`; None, with the `reason`, where its code cannot be rehearsed.

        Args:
            capability: the compute capability of the devices, which decides between attention kernels.

        Raises:
            RequestError: the model cannot take the workload.
        """
        key = self._key(workload, capability)
        document = read_document(_FOLDER, key) if key else None
        if document is not None:
            try:
                return Profile.from_document(document)
            except (KeyError, TypeError, ValueError):
                pass  # damaged: made again
        profile = self._record(workload, capability)
        if key and profile is not None:
            write_document(_FOLDER, key, profile.to_document())
        return profile

    def empty_model(self) -> Any:
        """The model, without weights.

        Raises:
            RequestError: transformers cannot build it.
        """
        if self.model is None:
            from devmap_cli.model.load import empty_model

            self.model = empty_model(self.spec, trust_remote_code=self.trust_remote_code)
        return self.model

    def media_tokens(self, workload: MapWorkload) -> int:
        """How many tokens of a prompt its images and videos take.

        Raises:
            RequestError: the model cannot take them.
        """
        media = {"images": workload.images, "videos": workload.videos}
        key = None if self.spec.key is None else key_of(self.spec.key, media)
        document = read_document(_MEDIA_FOLDER, key) if key else None
        if isinstance(document, dict) and isinstance(document.get("tokens"), int):
            return int(document["tokens"])
        from devmap_cli.simulation.asking import tokens_of_media

        tokens = tokens_of_media(self.empty_model(), workload)
        if key:
            write_document(_MEDIA_FOLDER, key, {"tokens": tokens})
        return tokens

    def _key(self, workload: MapWorkload, capability: Capability) -> str | None:
        if self.spec.key is None:
            return None
        return key_of(self.spec.key, asdict(workload), capability)

    def _record(self, workload: MapWorkload, capability: Capability) -> Profile | None:
        from devmap_cli.model.quiet import quiet_libraries
        from devmap_cli.simulation.recording import record
        from devmap_cli.simulation.workload import simulated

        model = self.empty_model()
        with quiet_libraries():
            self._check(workload)
            blocks = [block.fqns for block in blocks_of(self.spec, 0, 1)]
            try:
                return _profile(record(model, blocks, simulated(workload), compute_capability=capability))
            except Exception as error:  # noqa: BLE001 - model code may raise anything
                reason = first_line(error) or type(error).__name__
        if workload.kv_dtype != AUTO and self.profile(replace(workload, kv_dtype=AUTO), capability) is not None:
            raise refusal(self.spec.model_id, workload.kv_dtype, reason)
        self.reason = reason
        return None

    def _check(self, workload: MapWorkload) -> None:
        """Refuse a workload that the model cannot take."""
        from devmap_cli.model.positions import position_limit
        from devmap_cli.simulation.asking import inputs_for
        from devmap_cli.simulation.positions import positions_needed, table_of_positions

        takes_text = "input_ids" in inputs_for(self.model, workload)
        limit = position_limit(self.model.config)
        if limit is None or positions_needed(self.model, workload, takes_text=takes_text) <= limit:
            return
        table = table_of_positions(self.model, limit)
        if table is not None:
            raise RequestError(
                f"{self.spec.model_id} has {limit:,} positions (the rows of {table}), fewer than the workload needs",
                f"--prompt-tokens {max(1, limit - min(workload.max_new_tokens, limit // 2))} "
                f"--max-new-tokens {min(workload.max_new_tokens, limit // 2)}",
            )


def _profile(recording: Recording) -> Profile:
    trace = recording.trace
    homes = trace.homes
    works: dict[tuple[int, str], Work] = {}
    for device in recording.rehearsal.devices:
        for number, phases in device.block_work.items():
            for phase, work in phases.items():
                key = (homes[number], phase)
                works[key] = works.get(key, Work()) + work
    return Profile(
        trace=trace,
        groups=recording.groups,
        work={
            phase: tuple(works.get((block, phase), Work()) for block in range(trace.num_blocks))
            for phase in (PREFILL, DECODE)
            if phase in trace.phases
        },
        assumptions=recording.rehearsal.assumptions,
    )
