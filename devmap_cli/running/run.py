"""`run_map`: check, load, generate, measure, report."""

from __future__ import annotations

import shlex
import time
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING

from devmap_cli.checking import Finding, check_map
from devmap_cli.devices.detection import accelerator_kind
from devmap_cli.devices.device import CPU, DISK, Device
from devmap_cli.errors import FindingsError, RequestError
from devmap_cli.model.kv_dtypes import AUTO, check_kv_dtype_for
from devmap_cli.model.names import owner
from devmap_cli.model.positions import position_limit
from devmap_cli.model.quiet import quiet_libraries
from devmap_cli.model.reference import resolve
from devmap_cli.running.failures import Stage, told_in_our_words
from devmap_cli.running.generating import generate
from devmap_cli.running.kv_cache import check_kv_backend
from devmap_cli.running.loading import Loadable, Recipe, load, prepare
from devmap_cli.running.meters import MemoryMeter, meter_for
from devmap_cli.running.offloading import offload_folder
from devmap_cli.running.placing import check_devices_here, on_this_machine, transformers_map
from devmap_cli.running.prompting import EncodedPrompt, encode, load_tokenizer
from devmap_cli.running.report import DeviceReport, RunReport
from devmap_cli.running.request import Listener, RunRequest
from devmap_cli.running.simulated import SIMULATED_KIND, simulated_machine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from devmap_cli.mapfile import MapFile, MapWorkload
    from devmap_cli.model.spec import ModelSpec

DEFAULT_MAX_NEW_TOKENS = 256


def run_map(
    document: MapFile,
    spec: ModelSpec,
    request: RunRequest,
    listener: Listener | None = None,
    *,
    simulate: bool = False,
) -> RunReport:
    """Load the model `spec` with the map `document`, generate what `request` asks for, and measure both.

    With `simulate` the map's accelerators are simulated ones, with their budgets as memory.

    Raises:
        RequestError: the map is of another model, or the model cannot be loaded or cannot generate.
        FindingsError: the map has errors.
        SurroundingsError: devices, packages or room on the disk are missing.
        OutOfMemoryError: a device or the host ran out of memory.
    """
    run = _Run(document, spec, request, listener or Listener())
    if not simulate:
        return run.run(accelerator_kind())
    with simulated_machine(document):
        return run.run(SIMULATED_KIND)


class _Run:
    """One run, step by step."""

    def __init__(self, document: MapFile, spec: ModelSpec, request: RunRequest, listener: Listener) -> None:
        self._document = document
        self._spec = spec
        self._request = request
        self._listener = listener
        self._warnings: list[str] = []
        self._stage = Stage()

    def run(self, kind: str | None) -> RunReport:
        """See `run_map`."""
        self._check_map()
        self._is_simulated = kind == SIMULATED_KIND
        self._here = {key: on_this_machine(device, kind) for key, device in self._document.device_map.items()}
        check_devices_here(self._here.values(), kind, self._spec.model_id)
        with ExitStack() as stack:
            stack.enter_context(told_in_our_words(self._stage, self._spec.model_id))
            stack.enter_context(quiet_libraries())
            self._folder = stack.enter_context(
                offload_folder(self._request.offload_folder) if DISK in self._here.values() else nullcontext()
            )
            self._meters: dict[Device, MemoryMeter] = {
                device: stack.enter_context(meter_for(device, self._folder))
                for device in dict.fromkeys((*self._here.values(), CPU))
            }
            return self._measured_run()

    def _check_map(self) -> None:
        model = self._document.model
        if model is not None and model.class_name != self._spec.class_name:
            raise RequestError(
                f"the map is for {model.class_name}, and {self._spec.model_id} is a {self._spec.class_name}",
                f"plan again: devmap plan {shlex.quote(self._spec.model_id)} -o map.json",
            )
        budgets = {item.device: item.budget_bytes for item in self._document.devices}
        findings = check_map(self._document.device_map, self._spec, budgets)
        if sum(finding.code == "unmatched-key" for finding in findings) == len(self._document.device_map):
            raise RequestError(
                f"the map is of another model: none of its keys names a part of {self._spec.class_name}",
                f"plan again: devmap plan {shlex.quote(self._spec.model_id)} -o map.json",
            )
        errors = [finding for finding in findings if finding.severity == "error"]
        if errors:
            raise _refusal(errors)
        for finding in findings:
            self._warn(f"{finding.message}; {finding.fix}")

    def _measured_run(self) -> RunReport:
        request = self._request
        reference = resolve(self._spec.model_id, self._spec.revision)
        loadable = prepare(reference, self._recipe())
        tokenizer = load_tokenizer(reference, trust_remote_code=request.trust_remote_code)
        prompt = encode(tokenizer, request.prompt, raw=request.raw, batch_size=request.batch_size)
        max_new_tokens = self._max_new_tokens()
        self._check_length(prompt, max_new_tokens, position_limit(loadable.config))
        kv_dtype = self._kv_dtype(loadable)

        started = time.perf_counter()
        model = load(loadable, self._listener.on_progress)
        for meter in self._meters.values():
            meter.synchronize()
        load_seconds = time.perf_counter() - started
        weights = weights_loaded(model, self._here, self._spec)
        generation = generate(
            model,
            tokenizer,
            prompt,
            request,
            max_new_tokens,
            kv_dtype=kv_dtype,
            stage=self._stage,
            on_text=self._listener.on_text,
        )
        return RunReport(
            model_id=self._spec.model_id,
            class_name=self._spec.class_name,
            batch_size=request.batch_size,
            load_seconds=load_seconds,
            devices=self._device_reports(weights),
            generation=generation,
            warnings=tuple(self._warnings),
        )

    def _recipe(self) -> Recipe:
        model, workload = self._document.model, self._document.workload
        return Recipe(
            class_name=self._spec.class_name,
            dtype=self._spec.dtype if model is None else model.dtype,
            device_map=transformers_map(self._here),
            attention=self._request.attention or (_planned_attention(workload) if workload else None),
            quantization=model.quantization if model else None,
            offload_folder=self._folder,
            trust_remote_code=self._request.trust_remote_code,
        )

    def _max_new_tokens(self) -> int:
        workload = self._document.workload
        planned = workload.max_new_tokens if workload else DEFAULT_MAX_NEW_TOKENS
        return self._request.max_new_tokens or planned

    def _kv_dtype(self, loadable: Loadable) -> str:
        """What the KV cache is kept in, if the model and this machine can."""
        workload = self._document.workload
        kv_dtype = self._request.kv_dtype or (workload.kv_dtype if workload else AUTO)
        check_kv_dtype_for(self._spec.model_id, loadable.model_class, loadable.config, kv_dtype)
        if not self._is_simulated:
            check_kv_backend(kv_dtype, self._here.values())
        return kv_dtype

    def _check_length(self, prompt: EncodedPrompt, max_new_tokens: int, limit: int | None) -> None:
        if limit is not None and prompt.num_tokens + max_new_tokens > limit:
            self._warn(
                f"{prompt.num_tokens} tokens of prompt and {max_new_tokens} new ones are more than the "
                f"{limit} positions that the model was made for"
            )

    def _warn(self, text: str) -> None:
        self._warnings.append(text)
        self._listener.on_warning(text)

    def _device_reports(self, weights: Mapping[Device, int]) -> tuple[DeviceReport, ...]:
        """One report for each device of the map, in its order, and one for the host if it holds weights."""
        planned = {item.device: item for item in self._document.devices}
        map_devices = {
            here: named for named, here in zip(self._document.device_map.values(), self._here.values(), strict=True)
        }
        return tuple(
            DeviceReport(
                device=map_devices.get(here, here),
                planned=planned.get(map_devices.get(here, here)),
                weights_bytes=weights.get(here, 0),
                memory=meter.read(),
                basis=meter.basis,
            )
            for here, meter in sorted(self._meters.items(), key=lambda item: _placing_order(item[0]))
            if here in map_devices or here in weights
        )


def _planned_attention(workload: MapWorkload) -> str | None:
    """The map's attention; None for sdpa, which transformers takes by itself for each model that has it."""
    return None if workload.attention == "sdpa" else workload.attention


def _placing_order(device: Device) -> tuple[int, Device]:
    return (1 if device == CPU else 2 if device == DISK else 0), device


def _refusal(errors: list[Finding]) -> FindingsError:
    first = errors[0]
    more = f", and {len(errors) - 1} more errors" if len(errors) > 1 else ""
    return FindingsError(f"the map is wrong: {first.message}{more}", first.fix)


def weights_loaded(model: PreTrainedModel, device_map: Mapping[str, Device], spec: ModelSpec) -> dict[Device, int]:
    """Bytes of parameters and buffers that are really there, by device.

    Tensors in memory count where they are, by storage, once each; offloaded ones (on the meta device until a
    layer computes) where the map puts them, shared ones once.
    """
    totals: dict[Device, int] = {}
    seen: set[tuple[str, int]] = set()
    shared = spec.tied_to_another()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            key = owner(name, device_map)
            if key is None or name in shared:
                continue
            device, num_bytes = device_map[key], tensor.nbytes
        else:
            storage = tensor.untyped_storage()
            device, num_bytes = Device(tensor.device.type, tensor.device.index), storage.nbytes()
            if (str(device), storage.data_ptr()) in seen:
                continue
            seen.add((str(device), storage.data_ptr()))
        totals[device] = totals.get(device, 0) + num_bytes
    return totals
