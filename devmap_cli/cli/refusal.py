"""The answer "no" of `devmap plan`: what is missing, and commands that would fit, each tried beforehand."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from devmap_cli.cli import fail
from devmap_cli.cli.budgeting import cards_from_option
from devmap_cli.cli.streams import print_json
from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.capability import BFLOAT16_CAPABILITY
from devmap_cli.devices.device import CPU, Device
from devmap_cli.errors import EXIT_NO, DevmapError
from devmap_cli.model.kv_dtypes import QUANTIZED
from devmap_cli.planning.blocks import blocks_of
from devmap_cli.planning.nouns import Infeasible, Placement
from devmap_cli.planning.searching import smallest
from devmap_cli.units import format_bytes

if TYPE_CHECKING:
    from devmap_cli.cli.planning import Planning
    from devmap_cli.planning.means import PlanRequest

_NOT_REPEATED = ("model", "--max-memory", "--gpus", "--solve", "--report", "--explain", "--json")
_UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6, "MiB": 2**20, "B": 1}
_MAX_WAYS = 4
_MOST_HALVINGS = 4
_RAM_STEP_BYTES = 10**8
_LAST_HINT = "give more memory, other devices, or take a smaller model"
_LEAST_PROMPT_TOKENS = 64
_SMALLER_KV_DTYPE = "int4"
_QUANTIZABLE_KINDS = ("cuda", "xpu")


@dataclass(frozen=True, slots=True)
class Given:
    """The options of a command by name, without those that say how much memory there is.

    Args:
        options: each with its values, none for a flag; those that were not given are not in it.
        gpus: the value of --gpus.
    """

    options: Mapping[str, tuple[str, ...]]
    gpus: str | None = None

    @classmethod
    def of(cls, context: typer.Context) -> Given:
        """What the command line of `context` has, without what says where answers go and what else is asked."""
        options: dict[str, tuple[str, ...]] = {}
        for parameter in context.command.params:
            name, value = parameter.opts[0], context.params.get(parameter.name or "")
            source = context.get_parameter_source(parameter.name or "")
            if name not in _NOT_REPEATED and source is not None and source.name == "COMMANDLINE":
                values = value if isinstance(value, (list, tuple)) else [] if value is True else [value]
                options[name] = tuple(item.value if isinstance(item, Enum) else str(item) for item in values)
        return cls(options, context.params.get("gpus"))

    @property
    def counts_cards(self) -> bool:
        """Whether --how-many is given, so that more cards of the kind don't help."""
        return "--how-many" in self.options

    def having(self, **changes: str) -> Given:
        """The same with other values of some options, whose names have underscores here."""
        named = {f"--{name.replace('_', '-')}": (value,) for name, value in changes.items()}
        return replace(self, options={**self.options, **named})

    def having_lists(self, **changes: tuple[str, ...]) -> Given:
        """The same with other values of options that are repeated."""
        return replace(self, options={**self.options, **{f"--{name}": values for name, values in changes.items()}})

    def command(self, model: str, budgets: Budgets) -> str:
        """The command with these options and budgets."""
        words = ["devmap plan", shlex.quote(model), _as_options(budgets, self.gpus)]
        for name, values in self.options.items():
            words += [f"{name} {shlex.quote(value)}" for value in values] or [name]
        return " ".join(filter(None, words))


def refuse(answer: Infeasible, planning: Planning, request: PlanRequest, given: Given, *, as_json: bool) -> NoReturn:
    """Say why nothing fits, on stdout too with `as_json`, and exit with code 1."""
    ways = list(islice(_ways_out(answer, planning, request, given), _MAX_WAYS))
    if as_json:
        print_json({**infeasible_document(answer), "ways_out": ways})
    reason = "; ".join(filter(None, (answer.reason, planning.largest_activation(request))))
    cards = " on any number of these cards" if given.counts_cards else ""
    message = f"{planning.spec.model_id} does not fit{cards}{_what_is_missing(answer, request.budgets)}: {reason}"
    raise typer.Exit(fail(EXIT_NO, message, "; or ".join(ways) or _LAST_HINT))


def _what_is_missing(answer: Infeasible, budgets: Budgets) -> str:
    """The figures of an answer in words: needed less budget is missing."""
    missing = format_bytes(answer.missing_bytes)
    needed, budget = format_bytes(answer.needed_bytes), format_bytes(answer.budget_bytes)
    if answer.device is None or len(budgets.devices) == 1:
        place = "" if answer.device is None else f" on {answer.device.label}"
        return f"{place}: needed {needed}, budget {budget}, missing {missing}"
    label = answer.device.label
    return f": with the other devices as they are, {label} needs {needed}, budget {budget}, missing {missing}"


def infeasible_document(answer: Infeasible) -> dict[str, Any]:
    """The answer "no" as plain data: what `device` needs less its budget is missing."""
    return {
        "format": "devmap.infeasible/1",
        "strategy": answer.strategy,
        "reason": answer.reason,
        "device": None if answer.device is None else answer.device.map_value,
        "needed_bytes": answer.needed_bytes,
        "budget_bytes": answer.budget_bytes,
        "missing_bytes": answer.missing_bytes,
    }


def _ways_out(answer: Infeasible, planning: Planning, request: PlanRequest, given: Given) -> Iterator[str]:
    """Commands that fit, the cheapest change first."""
    model = planning.spec.model_id
    if not request.weights_only:
        yield from _lighter_workloads(planning, request, given)
    for option, value in _smaller_weights(planning, request):
        if _fits(planning.with_weights(**{option: value}), request):
            yield given.having(**{option: value}).command(model, request.budgets)
    if given.counts_cards:
        return
    for budgets, gpus in _larger(answer, planning, request, given):
        if _fits(planning, replace(request, budgets=budgets, cards=cards_from_option(gpus) or request.cards)):
            yield replace(given, gpus=gpus).command(model, budgets)


def _lighter_workloads(planning: Planning, request: PlanRequest, given: Given) -> Iterator[str]:
    model, workload = planning.spec.model_id, request.workload
    for tokens in _shorter(workload.prompt_tokens):
        if _fits(planning, replace(request, workload=replace(workload, prompt_tokens=tokens))):
            yield given.having(prompt_tokens=str(tokens)).command(model, request.budgets)
            break
    if _bits(workload.kv_dtype) > _bits(_SMALLER_KV_DTYPE) and _fits(
        planning, replace(request, workload=replace(workload, kv_dtype=_SMALLER_KV_DTYPE))
    ):
        yield given.having(kv_dtype=_SMALLER_KV_DTYPE).command(model, request.budgets)
    for fewer, changes in _less_to_see(request):
        if _fits(planning, fewer):
            yield given.having_lists(**changes).command(model, request.budgets)
            break


def _fits(planning: Planning, request: PlanRequest) -> bool:
    try:
        return isinstance(planning.plan(request, rehearse=False, is_probe=True), Placement)
    except DevmapError:
        return False  # images that a shorter prompt has no room for, say


def _shorter(prompt_tokens: int) -> Iterator[int]:
    """Half of it, a quarter and so on."""
    for _ in range(_MOST_HALVINGS):
        prompt_tokens //= 2
        if prompt_tokens >= _LEAST_PROMPT_TOKENS:
            yield prompt_tokens


def _bits(kv_dtype: str) -> int:
    return QUANTIZED[kv_dtype].nbits or 8 if kv_dtype in QUANTIZED else 16


def _less_to_see(request: PlanRequest) -> Iterator[tuple[PlanRequest, dict[str, tuple[str, ...]]]]:
    """Half of the frames of each video and of the images, a quarter and so on, with the options that say so."""
    workload = request.workload
    images, videos = workload.images, workload.videos
    for _ in range(_MOST_HALVINGS):
        if len(images) < 2 and all(frames < 4 for _, _, frames in videos):
            return
        images = images[: -(-len(images) // 2)]
        videos = tuple((height, width, -(-frames // 2)) for height, width, frames in videos)
        changes = {
            "image": tuple(f"{width}x{height}" for height, width in images),
            "video": tuple(f"{width}x{height}x{frames}" for height, width, frames in videos),
        }
        changed = replace(request, workload=replace(workload, images=images, videos=videos))
        yield changed, {name: values for name, values in changes.items() if values}


def _smaller_weights(planning: Planning, request: PlanRequest) -> Iterator[tuple[str, str]]:
    """Options that load the weights with fewer bits, or in a type that old GPUs have fused attention for."""
    spec = planning.spec
    if spec.dtype == "bfloat16" and request.capability < BFLOAT16_CAPABILITY:
        yield "dtype", "float16"
    if spec.dtype == "float32" and spec.quantization is None:
        yield "dtype", "bfloat16"
    if spec.quantization is None and any(device.kind in _QUANTIZABLE_KINDS for device in request.budgets.accelerators):
        yield "quantize", "nf4"


def _larger(
    answer: Infeasible, planning: Planning, request: PlanRequest, given: Given
) -> Iterator[tuple[Budgets, str | None]]:
    """Larger budgets to try, with the --gpus for them: just enough RAM, one more GPU, more on the device that binds."""
    budgets = request.budgets
    sizes, reserved = dict(budgets), dict(budgets.reserved)
    may_offload = "--no-offload" not in given.options
    if not budgets.tiers and may_offload and (size := _enough_ram(planning, request)) is not None:
        yield Budgets.of({**sizes, CPU: size}, reserved), given.gpus
    if budgets.accelerators:
        yield from _one_more(budgets, given.gpus)
    device = answer.device
    if device is None or (given.gpus is not None and device.is_accelerator):
        return
    kept = budgets.whole(device) - budgets.get(device)
    if kept and not budgets.get(device):
        return  # --reserve may ask for more than the whole budget: how much is not known here
    if device.is_accelerator or may_offload:
        yield Budgets.of({**sizes, device: _rounded_up(answer.needed_bytes + kept) - kept}, reserved), given.gpus


def _enough_ram(planning: Planning, request: PlanRequest) -> int | None:
    """The least RAM to offload to that makes it fit, in whole steps; None where none does."""
    sizes, reserved = dict(request.budgets), dict(request.budgets.reserved)
    step = _RAM_STEP_BYTES

    def suffices(num_steps: int) -> bool:
        return _fits(planning, replace(request, budgets=Budgets.of({**sizes, CPU: num_steps * step}, reserved)))

    most = -(-sum(block.weights_bytes for block in blocks_of(planning.spec, 0, 1)) // step) + 1
    return smallest(suffices, 0, most) * step if suffices(most) else None


def _one_more(budgets: Budgets, gpus: str | None) -> Iterator[tuple[Budgets, str | None]]:
    """One more device like the last one; a card that is several devices brings all of them."""
    sizes, reserved = dict(budgets), dict(budgets.reserved)
    last = budgets.accelerators[-1]
    if last.index is None:
        return
    if gpus is None:
        largest = max(device.index or 0 for device in budgets.accelerators)
        yield Budgets.of({**sizes, Device(last.kind, largest + 1): budgets.whole(last)}, reserved), None
        return
    from devmap_cli.devices.cards import parse_gpus

    name = list(parse_gpus(gpus).values())[-1].name
    is_alone = len({card.name for card in parse_gpus(gpus).values()}) == 1
    card = next(iter(parse_gpus(name).values()))
    more = f"{len(parse_gpus(gpus)) // card.num_gpus + 1}x{name}" if is_alone else f"{gpus},{name}"
    devices = parse_gpus(more)
    added = {device: item.usable_bytes for device, item in devices.items() if device not in sizes}
    yield Budgets.of({**sizes, **added}, reserved), more


def _rounded_up(num_bytes: int) -> int:
    """The next tenth of a GB, or whole MB below one GB."""
    step = 10**8 if num_bytes > 10**9 else 10**6
    return -(-num_bytes // step) * step


def _as_options(budgets: Budgets, gpus: str | None) -> str:
    items = [(device, size) for device, size in budgets if gpus is None or not device.is_accelerator]
    text = ",".join(f"{device.map_value}:{_size(budgets.whole(device))}" for device, _ in items)
    options = [f"--gpus {shlex.quote(gpus)}"] if gpus else []
    options += [f"--max-memory {shlex.quote(text)}"] if text else []
    return " ".join(options)


def _size(num_bytes: int) -> str:
    """The size in the largest unit in which it has at most one decimal."""
    unit = next(
        name for name, size in _UNITS.items() if size == 1 or (num_bytes >= size and num_bytes * 10 % size == 0)
    )
    return f"{num_bytes / _UNITS[unit]:g}{unit}" if unit != "B" else f"{num_bytes}B"
