"""`devmap run --map map.json`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from devmap_cli.cli.options import Json, TrustRemoteCode
from devmap_cli.cli.streams import print_json
from devmap_cli.cli.workload import MapsKvDtypeOption
from devmap_cli.errors import RequestError, SurroundingsError

if TYPE_CHECKING:
    from devmap_cli.mapfile import MapFile
    from devmap_cli.model.spec import ModelSpec
    from devmap_cli.running.request import Progress

_PROMPT_HINT = "--prompt 'What is the capital of France?'"


def run(
    map_path: Annotated[
        str, typer.Option("--map", metavar="FILE", help="The map to load with; - reads it from standard input.")
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="The model, for a map that does not name one, or another copy."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="What to generate from; else standard input.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", metavar="FILE", help="A text file with the prompt.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without the chat template.")] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", min=1, help="Stop there at the latest [default: the map's, or 256]."),
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 always takes the likeliest token.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Make drawn tokens repeatable.")] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="How often to give the prompt at once.")] = 1,
    attention: Annotated[
        str | None,
        typer.Option("--attention", metavar="NAME", help="sdpa, eager, flash_attention_2 … [default: the map's]."),
    ] = None,
    kv_dtype: MapsKvDtypeOption = None,
    offload_folder: Annotated[
        Path | None,
        typer.Option("--offload-folder", metavar="FOLDER", help="Keep offloaded weights there [default: temporary]."),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Run on simulated GPUs with the map's budgets as memory.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Load a model with a map, generate, and show what it took beside what was planned."""
    from devmap_cli.mapfile import check_attention
    from devmap_cli.mapreader import read_map

    if attention is not None:
        check_attention(attention, "--attention")
    text = _prompt(prompt, prompt_file, map_path)
    document = read_map(map_path)
    spec = _spec(document, model, trust_remote_code=trust_remote_code)

    from devmap_cli.render.console import err
    from devmap_cli.render.run import run_report
    from devmap_cli.running.request import Listener, RunRequest
    from devmap_cli.running.run import run_map

    request = RunRequest(
        prompt=text,
        raw=raw,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        batch_size=batch_size,
        attention=attention,
        kv_dtype=kv_dtype.value if kv_dtype else None,
        offload_folder=offload_folder,
        trust_remote_code=trust_remote_code,
    )
    with _progress() as on_progress:
        listener = Listener(
            on_text=_ignore if as_json else _write,
            on_progress=on_progress,
            on_warning=_warn,
        )
        report = run_map(document, spec, request, listener, simulate=simulate)
    if as_json:
        print_json(report.to_document())
        return
    _write("\n")
    err().print(run_report(report))


def _prompt(prompt: str | None, prompt_file: Path | None, map_path: str) -> str:
    if prompt is not None and prompt_file is not None:
        raise RequestError("--prompt and --prompt-file are both given", "give one of them")
    if prompt is not None:
        return prompt
    if prompt_file is not None:
        return _read_prompt(prompt_file)
    if map_path == "-":
        raise RequestError("standard input is the map, so there is no prompt", _PROMPT_HINT)
    text = "" if sys.stdin.isatty() else _text(sys.stdin.buffer.read(), "standard input")
    if not text:
        raise RequestError("there is no prompt", _PROMPT_HINT)
    return text


def _read_prompt(path: Path) -> str:
    try:
        return _text(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist", _PROMPT_HINT) from None
    except IsADirectoryError:
        raise RequestError(f"{path} is a folder, not a text file", _PROMPT_HINT) from None
    except OSError as error:
        raise SurroundingsError(f"cannot read {path}: {error.strerror}", _PROMPT_HINT) from error


def _text(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError:
        raise RequestError(f"{source} is not UTF-8 text", "iconv -t UTF-8 converts it") from None


def _spec(document: MapFile, model: str | None, *, trust_remote_code: bool) -> ModelSpec:
    """The model that `--model` names, else the map's own."""
    from devmap_cli.model.load import load_spec

    named = document.model
    if model is None and named is None:
        raise RequestError("the map does not name its model", "add --model MODEL: a hub id or a folder")
    reference = model if model is not None else named.id if named else ""
    return load_spec(
        reference,
        revision=named.revision if named and reference == named.id else None,
        dtype=named.dtype if named else None,
        trust_remote_code=trust_remote_code,
    )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _warn(text: str) -> None:
    sys.stderr.write(f"warning: {text}\n")


def _ignore(_: object) -> None:
    pass


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """A bar on the terminal of stderr; nothing where stderr is no terminal."""
    from devmap_cli.render.console import err

    if not err().is_terminal:
        yield _ignore
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err(),
        transient=True,
    )
    task = bars.add_task("Loading weights", total=None)

    def show(progress: Progress) -> None:
        bars.update(task, description=progress.step, completed=progress.done, total=progress.total or None)
        bars.refresh()
        if progress.total and progress.done >= progress.total:
            bars.stop()
        else:
            bars.start()

    try:
        yield show
    finally:
        bars.stop()
