"""`devmap check --map map.json`."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from devmap_cli.cli.budgeting import budgets_from_options, cards_from_option, refuse_old_cards
from devmap_cli.cli.options import DtypeOption, Json, QuantizeOption, Revision, TrustRemoteCode
from devmap_cli.cli.streams import print_json
from devmap_cli.cli.workload import (
    DEFAULT_PROMPT_TOKENS,
    Attention,
    Images,
    KvDtype,
    MapsKvDtypeOption,
    Videos,
    parse_image,
    parse_video,
    with_room_for_media,
)
from devmap_cli.errors import EXIT_NO, RequestError
from devmap_cli.model.kv_dtypes import AUTO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from devmap_cli.checking.check import CheckReport, Repair
    from devmap_cli.checking.rehearsed import Rehearser
    from devmap_cli.devices.budgets import Budgets
    from devmap_cli.devices.capability import Capability
    from devmap_cli.devices.cards import Card
    from devmap_cli.devices.device import Device
    from devmap_cli.mapfile import MapFile, MapWorkload
    from devmap_cli.model.spec import ModelSpec

_REHEARSED = tuple(name.value for name in Attention)


def check(
    map_path: Annotated[
        str, typer.Option("--map", metavar="FILE", help="The map to check; - reads it from standard input.")
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="The model, for a map that does not name one, or another copy."),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--prompt-tokens",
            min=1,
            help="Length of the prompt [default: the map's, or 2048, or what the model has positions for].",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", min=1, help="Length of the answer [default: the map's, or 256]."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="Sequences at once [default: the map's, or 1].")
    ] = None,
    image: Images = None,
    video: Videos = None,
    attention: Annotated[
        str | None,
        typer.Option("--attention", metavar="NAME", help="sdpa, eager or flash_attention_2 [default: the map's]."),
    ] = None,
    kv_dtype: MapsKvDtypeOption = None,
    max_memory: Annotated[
        str | None,
        typer.Option(
            "--max-memory",
            metavar="DEVICE:SIZE,…",
            help="What the process may take, like '0:10GB,1:80%' [default: the map's budgets, or no limit].",
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            metavar="COUNTxCARD,…",
            help="The cards that the map is for, like '2xT4,1xA10' [default: the map's].",
        ),
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Write a repaired map beside the given one.")] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where --fix writes, - for stdout [default: *.fixed.json]."
        ),
    ] = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Rehearse a map, devmap's or written by hand, and list what is wrong. Needs no weights and no GPU."""
    from devmap_cli.checking.check import check_document, repair_document
    from devmap_cli.checking.rehearsed import Rehearser
    from devmap_cli.devices.capability import kernels_of
    from devmap_cli.mapreader import read_map
    from devmap_cli.model.load import empty_model
    from devmap_cli.simulation.positions import usual_prompt_tokens

    target = _target(map_path, output, fix=fix, as_json=as_json)
    images, videos = tuple(map(parse_image, image or ())), tuple(map(parse_video, video or ()))
    document = read_map(map_path)
    workload = _workload(document, prompt_tokens, max_new_tokens, batch_size, images, videos, attention, kv_dtype)
    cards = _cards(document, gpus)
    budgets = _budgets(document, max_memory, cards if gpus else {})
    refuse_old_cards(workload.attention, None, cards.values())
    spec = _spec(
        document,
        model,
        revision,
        dtype.value if dtype else None,
        quantize.value if quantize else None,
        kernels_of(cards.values(), budgets) if gpus else _planned_kernels(document),
        trust_remote_code=trust_remote_code,
    )
    empty = empty_model(spec, trust_remote_code=trust_remote_code)
    if prompt_tokens is None and document.workload is None and not (images or videos):
        usual = usual_prompt_tokens(empty, DEFAULT_PROMPT_TOKENS, workload.max_new_tokens)
        workload = replace(workload, prompt_tokens=usual)
    if prompt_tokens is None and (images or videos):
        from devmap_cli.simulation.asking import tokens_of_media

        workload = with_room_for_media(workload, tokens_of_media(empty, workload))
    is_all = gpus is not None or (max_memory is None and bool(document.devices))
    rehearser = Rehearser(empty, spec, workload, dict(budgets), cards, is_all)
    report = check_document(document, rehearser)
    repaired = repair_document(document, rehearser, report) if fix else None
    written = _write(repaired, target, always=output is not None)
    if as_json:
        _print_json(report, repaired, written, rehearser)
    else:
        named = dtype.value if dtype else document.model.dtype if document.model else None
        plan_command = _plan_command(rehearser, named, trust_remote_code=trust_remote_code)
        _show(report, repaired, written, rehearser, plan_command)
    if not (repaired.report if repaired else report).passed:
        raise typer.Exit(EXIT_NO)


def _target(map_path: str, output: str | None, *, fix: bool, as_json: bool) -> str | None:
    """Where the repaired map goes; None without --fix."""
    if not fix:
        if output is not None:
            raise RequestError("--output is where --fix writes, and --fix is not given", "add --fix")
        return None
    if output is None and map_path == "-":
        raise RequestError("there is no file beside standard input to write to", "add -o FILE, or -o - for stdout")
    if output == "-" and as_json:
        raise RequestError("--json and --output - both want standard output", "give --output a file")
    path = Path(map_path)
    target = output if output is not None else str(path.with_name(f"{path.stem}.fixed.json"))
    if "-" not in (target, map_path) and Path(target).resolve() == path.resolve():
        raise RequestError(f"--fix does not write over {map_path}", "give --output another file")
    return target


def _workload(
    document: MapFile,
    prompt_tokens: int | None,
    max_new_tokens: int | None,
    batch_size: int | None,
    images: tuple[tuple[int, int], ...],
    videos: tuple[tuple[int, int, int], ...],
    attention: str | None,
    kv_dtype: KvDtype | None,
) -> MapWorkload:
    """What was asked for, else the map's own, else what `plan` takes."""
    from devmap_cli.mapfile import MapWorkload

    planned = document.workload or MapWorkload(prompt_tokens=DEFAULT_PROMPT_TOKENS)
    if (attention or planned.attention) not in _REHEARSED:
        where, name = ("--attention", attention) if attention else ("the map's attention", planned.attention)
        raise RequestError(
            f"{where}: {name!r} is none that a rehearsal knows",
            " or ".join(f"--attention {known}" for known in _REHEARSED),
        )
    return MapWorkload(
        batch_size=batch_size or planned.batch_size,
        prompt_tokens=prompt_tokens or planned.prompt_tokens,
        max_new_tokens=max_new_tokens or planned.max_new_tokens,
        images=images or planned.images,
        videos=videos or planned.videos,
        attention=attention or planned.attention,
        kv_dtype=kv_dtype.value if kv_dtype else planned.kv_dtype,
    )


def _cards(document: MapFile, gpus: str | None) -> dict[Device, Card]:
    """Those that --gpus names, else those that the map was planned for, as far as it says."""
    if gpus is not None:
        return cards_from_option(gpus)
    named = {item.device: item.card for item in document.devices if item.card is not None}
    if not named:
        return {}
    from devmap_cli.devices.cards import cards_named

    found = {device: cards_named(name) for device, name in named.items()}
    for device, cards in found.items():
        if len(cards) != 1:
            raise RequestError(
                f"the map says that {device.label} is a {named[device]}, which is none of the cards that devmap knows",
                "name the cards: --gpus 2xA10",
            )
    return {device: cards[0] for device, cards in found.items()}


def _budgets(document: MapFile, max_memory: str | None, cards: Mapping[Device, Card]) -> Budgets:
    from devmap_cli.devices.budgets import Budgets

    if max_memory is None and not cards:
        known = () if document.weights_only else document.devices
        return Budgets.of({item.device: item.budget_bytes for item in known})
    return budgets_from_options(max_memory, [], no_offload=False, cards=cards)


def _planned_kernels(document: MapFile) -> Capability | None:
    """What the map's quantization says of kernels for packed floats; None for a map without."""
    from devmap_cli.devices.capability import ALL_KERNELS, NO_KERNELS
    from devmap_cli.model.quantization.scheme import quantization_in_map

    quantization = quantization_in_map(document.model.quantization if document.model else None)
    if quantization is None:
        return None
    return NO_KERNELS if quantization.is_unpacked else ALL_KERNELS


def _spec(
    document: MapFile,
    model: str | None,
    revision: str | None,
    dtype: str | None,
    quantize: str | None,
    kernels: Capability | None,
    *,
    trust_remote_code: bool,
) -> ModelSpec:
    """The model that --model names, else the map's own, loaded as the map says or, for a bare one, the options."""
    from devmap_cli.model.load import load_spec

    named = document.model
    if model is None and named is None:
        raise RequestError("the map does not name its model", "add --model MODEL: a hub id or a folder")
    reference = model if model is not None else named.id if named else ""
    if named is not None:
        if dtype or quantize:
            again = f"devmap plan {shlex.quote(reference)}"
            options = f"{f' --dtype {dtype}' if dtype else ''}{f' --quantize {quantize}' if quantize else ''}"
            raise RequestError("the map itself says how its model is loaded", f"plan again: {again}{options}")
        dtype, quantize = named.dtype, (named.quantization or {}).get("scheme")
    return load_spec(
        reference,
        revision=revision or (named.revision if named and reference == named.id else None),
        dtype=dtype,
        quantize=quantize,
        trust_remote_code=trust_remote_code,
        kernels=kernels,
    )


def _write(repaired: Repair | None, target: str | None, *, always: bool) -> str | None:
    """Write the repaired map, if there is one and it differs or was asked for, and give back where."""
    from devmap_cli.mapfile import write_map

    if repaired is None or target is None or not (repaired.changes or always):
        return None
    write_map(repaired.document, target)
    return target


def _print_json(report: CheckReport, repaired: Repair | None, written: str | None, rehearser: Rehearser) -> None:
    from devmap_cli.checking.check import to_document

    print_json(to_document(report, repaired, written, rehearser))


def _show(
    report: CheckReport, repaired: Repair | None, written: str | None, rehearser: Rehearser, plan_command: str
) -> None:
    from devmap_cli.render.check import full_report
    from devmap_cli.render.console import err, out

    console = err() if written == "-" else out()
    console.print(full_report(report, repaired, written, rehearser.workload))
    if written not in (None, "-"):
        err().print(f"wrote {written}", soft_wrap=True)
    hint = _plan_hint(repaired.report if repaired else report, rehearser, plan_command)
    if hint:
        err().print(f"hint: {hint}", soft_wrap=True)


def _plan_hint(report: CheckReport, rehearser: Rehearser, plan_command: str) -> str:
    """The command that places a model which is too large where the map puts it; "" where no budget says how."""
    accelerators = {device for device in report.device_map.values() if device.is_accelerator}
    is_short = any(finding.code in ("out-of-memory", "over-budget") for finding in report.findings)
    if not is_short or not accelerators <= rehearser.budgets.keys():
        return ""
    weights_bytes = sum(device.highest.weights_bytes for device in report.forecast.devices)
    fits = sum(rehearser.budgets.values()) >= weights_bytes
    return f"{'let devmap place it' if fits else 'all budgets are too small, see what would do'}: {plan_command}"


def _gpus(rehearser: Rehearser) -> str | None:
    """The --gpus that gives the same budgets; None where none does."""
    from devmap_cli.devices.cards import gpus_option, parse_gpus

    sizes = {device: size for device, size in rehearser.budgets.items() if device.is_accelerator}
    cards = [rehearser.cards[device] for device in sizes if device in rehearser.cards]
    if not cards or len(cards) < len(sizes):
        return None
    text = gpus_option(cards)
    return text if {device: card.usable_bytes for device, card in parse_gpus(text).items()} == sizes else None


def _plan_command(rehearser: Rehearser, dtype: str | None, *, trust_remote_code: bool) -> str:
    """What plans the same model, loaded alike, for the same budgets and workload."""
    spec, workload = rehearser.spec, rehearser.workload
    from devmap_cli.units import exact_bytes

    gpus = _gpus(rehearser)
    budgets = ",".join(
        f"{device.map_value}:{exact_bytes(size)}"
        for device, size in rehearser.budgets.items()
        if not (gpus and device.is_accelerator)
    )
    scheme = (spec.quantization or {}).get("scheme")
    options = {
        "--gpus": gpus,
        "--max-memory": budgets or None,
        "--revision": spec.revision,
        "--dtype": dtype,
        "--quantize": scheme,
        "--prompt-tokens": workload.prompt_tokens,
        "--max-new-tokens": workload.max_new_tokens,
        "--batch-size": workload.batch_size if workload.batch_size > 1 else None,
        "--attention": workload.attention if workload.attention != Attention.sdpa.value else None,
        "--kv-dtype": workload.kv_dtype if workload.kv_dtype != AUTO else None,
    }
    media = [
        *(f"--image {width}x{height}" for height, width in workload.images),
        *(f"--video {width}x{height}x{frames}" for height, width, frames in workload.videos),
    ]
    said = [f"{name} {shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    trusted = ["--trust-remote-code"] if trust_remote_code else []
    return " ".join(["devmap plan", shlex.quote(spec.model_id), *said, *media, *trusted])
