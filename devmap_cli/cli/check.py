"""`devmap check --map map.json`."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from devmap_cli.cli.options import Json, Revision, TrustRemoteCode
from devmap_cli.errors import EXIT_NO, RequestError

if TYPE_CHECKING:
    from devmap_cli.checking.check import CheckReport, Repair
    from devmap_cli.checking.rehearsed import Rehearser
    from devmap_cli.devices.device import Device
    from devmap_cli.mapfile import MapFile, MapWorkload

_IMAGE = re.compile(r"(?P<width>[1-9]\d*)[xX×](?P<height>[1-9]\d*)")
_DEFAULT_PROMPT_TOKENS = 2048
_REHEARSED = ("sdpa", "eager", "flash_attention_2")


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
        typer.Option("--prompt-tokens", min=1, help="Length of the prompt [default: the map's, or 2048]."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", min=1, help="Length of the answer [default: the map's, or 256]."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="Sequences at once [default: the map's, or 1].")
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option("--image", metavar="WxH", help="An image in the prompt, in pixels; repeatable."),
    ] = None,
    video: Annotated[
        list[str] | None,
        typer.Option(
            "--video",
            metavar="WxHxFRAMES",
            help="A video in the prompt: pixels, and the frames that the model sees; repeatable.",
        ),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option("--attention", metavar="NAME", help="sdpa, eager or flash_attention_2 [default: the map's]."),
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option(
            "--max-memory",
            metavar="DEVICE:SIZE,…",
            help="What the process may take, like '0:10GB,1:80%' [default: the map's budgets, or no limit].",
        ),
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Write a repaired map beside the given one.")] = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where --fix writes, - for stdout [default: *.fixed.json]."
        ),
    ] = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Rehearse a map, devmap's or written by hand, and list what is wrong. Needs no weights and no GPU."""
    from devmap_cli.checking.check import check_document, repair_document
    from devmap_cli.mapfile import read_map

    target = _target(map_path, output, fix=fix, as_json=as_json)
    images, videos = tuple(map(_image, image or ())), tuple(map(_video, video or ()))
    document = read_map(map_path)
    workload = _workload(document, prompt_tokens, max_new_tokens, batch_size, images, videos, attention)
    budgets = _budgets(document, max_memory)
    rehearser = _rehearser(document, model, revision, workload, budgets, trust_remote_code=trust_remote_code)
    report = check_document(document, rehearser)
    repaired = repair_document(document, rehearser) if fix else None
    written = _write(repaired, target, always=output is not None)
    if as_json:
        _print_json(report, repaired, written, rehearser)
    else:
        _show(report, repaired, written, rehearser)
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


def _image(text: str) -> tuple[int, int]:
    """Height and width of `WxH`."""
    match = _IMAGE.fullmatch(text.strip())
    if match is None:
        raise RequestError(f"--image: {text!r} is not WIDTHxHEIGHT in pixels", "--image 1024x768")
    return int(match["height"]), int(match["width"])


def _video(text: str) -> tuple[int, int, int]:
    """Height, width and number of frames of `WxHxFRAMES`."""
    size, _, frames = text.strip().lower().replace("×", "x").rpartition("x")
    match = _IMAGE.fullmatch(size)
    if match is None or not frames.isdecimal() or int(frames) < 1:
        raise RequestError(f"--video: {text!r} is not WIDTHxHEIGHTxFRAMES", "--video 1280x720x16")
    return int(match["height"]), int(match["width"]), int(frames)


def _workload(
    document: MapFile,
    prompt_tokens: int | None,
    max_new_tokens: int | None,
    batch_size: int | None,
    images: tuple[tuple[int, int], ...],
    videos: tuple[tuple[int, int, int], ...],
    attention: str | None,
) -> MapWorkload:
    """What was asked for, else the map's own, else what `plan` takes."""
    from devmap_cli.mapfile import MapWorkload, check_attention

    if attention is not None:
        check_attention(attention, "--attention")
        if attention not in _REHEARSED:
            raise RequestError(
                f"--attention: {attention!r} is none that a rehearsal knows", f"one of {', '.join(_REHEARSED)}"
            )
    planned = document.workload or MapWorkload(prompt_tokens=_DEFAULT_PROMPT_TOKENS)
    return MapWorkload(
        batch_size=batch_size or planned.batch_size,
        prompt_tokens=prompt_tokens or planned.prompt_tokens,
        max_new_tokens=max_new_tokens or planned.max_new_tokens,
        images=images or planned.images,
        videos=videos or planned.videos,
        attention=attention or planned.attention,
    )


def _budgets(document: MapFile, max_memory: str | None) -> dict[Device, int]:
    if max_memory is None:
        return {item.device: item.budget_bytes for item in document.devices}
    from devmap_cli.cli.plan import budgets_from_options

    return dict(budgets_from_options(max_memory, [], no_offload=False))


def _rehearser(
    document: MapFile,
    model: str | None,
    revision: str | None,
    workload: MapWorkload,
    budgets: dict[Device, int],
    *,
    trust_remote_code: bool,
) -> Rehearser:
    """For the model that --model names, else the map's own."""
    from devmap_cli.checking.rehearsed import Rehearser, empty_model
    from devmap_cli.model.load import load_spec

    named = document.model
    if model is None and named is None:
        raise RequestError("the map does not name its model", "add --model MODEL: a hub id or a folder")
    reference = model if model is not None else named.id if named else ""
    spec = load_spec(
        reference,
        revision=revision or (named.revision if named and reference == named.id else None),
        dtype=named.dtype if named else None,
        quantize=(named.quantization or {}).get("scheme") if named else None,
        trust_remote_code=trust_remote_code,
    )
    return Rehearser(empty_model(spec, trust_remote_code=trust_remote_code), spec, workload, budgets)


def _write(repaired: Repair | None, target: str | None, *, always: bool) -> str | None:
    """Write the repaired map, if there is one and it differs or was asked for, and give back where."""
    from devmap_cli.mapfile import write_map

    if repaired is None or target is None or not (repaired.changes or always):
        return None
    write_map(repaired.document, target)
    return target


def _print_json(report: CheckReport, repaired: Repair | None, written: str | None, rehearser: Rehearser) -> None:
    from devmap_cli.checking.check import to_document

    typer.echo(json.dumps(to_document(report, repaired, written, rehearser), indent=2))


def _show(report: CheckReport, repaired: Repair | None, written: str | None, rehearser: Rehearser) -> None:
    from devmap_cli.render.check import full_report
    from devmap_cli.render.console import err, out

    console = err() if written == "-" else out()
    console.print(full_report(report, repaired, written, rehearser.workload))
    if written not in (None, "-"):
        err().print(f"wrote {written}")
    left = (repaired.report if repaired else report).findings
    if any(finding.code in ("out-of-memory", "over-budget") for finding in left):
        err().print(f"hint: let devmap place it: {_plan_command(rehearser)}", soft_wrap=True)


def _plan_command(rehearser: Rehearser) -> str:
    """What plans the same model for the same budgets and workload."""
    budgets = ",".join(f"{device.map_value}:{size}B" for device, size in rehearser.budgets.items())
    workload = rehearser.workload
    return (
        f"devmap plan {shlex.quote(rehearser.spec.model_id)} --max-memory '{budgets}' "
        f"--prompt-tokens {workload.prompt_tokens} --max-new-tokens {workload.max_new_tokens}"
    )
