"""`devmap plan MODEL`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from devmap_cli.cli.budgeting import budgets_from_options, cards_from_option, local_cards, refuse_old_cards
from devmap_cli.cli.options import DtypeOption, Json, Model, QuantizeOption, Revision, Strategy, TrustRemoteCode
from devmap_cli.cli.planning import Planning
from devmap_cli.cli.questions import (
    Solve,
    compare_strategies,
    fewest_cards,
    how_many_note,
    solve_for,
    solve_note,
)
from devmap_cli.cli.workload import (
    Attention,
    BatchSize,
    Images,
    KvDtype,
    KvDtypeOption,
    MaxNewTokens,
    PromptTokens,
    Videos,
    workload_for,
)
from devmap_cli.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from devmap_cli.devices.device import Device
    from devmap_cli.mapfile import MapFile
    from devmap_cli.model.spec import ModelSpec
    from devmap_cli.planning.means import PlanRequest
    from devmap_cli.planning.nouns import Infeasible, Placement


def plan(
    context: typer.Context,
    model: Model,
    strategy: Annotated[
        Strategy,
        typer.Option(
            "--strategy",
            help="balanced: the smallest highest use over the GPUs; auto: the same while all fits there, else the "
            "least is offloaded; balanced_low_0: as little as possible on the first GPU; sequential: filled in order; "
            "fewest: as few GPUs as hold it; all: a table of all of them, and no map.",
        ),
    ] = Strategy.auto,
    max_memory: Annotated[
        str | None,
        typer.Option(
            "--max-memory",
            metavar="DEVICE:SIZE,…",
            help="What the process may take, like '0:10GB,1:80%,cpu:-2GiB'; without it, what is free on this machine.",
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            metavar="COUNTxCARD,…",
            help="Plan for these cards, like '2xT4,1xA10', not for this machine; --max-memory can add cpu and disk.",
        ),
    ] = None,
    reserve: Annotated[
        list[str] | None,
        typer.Option("--reserve", metavar="DEVICE=SIZE", help="Keep this much free; repeatable."),
    ] = None,
    no_offload: Annotated[bool, typer.Option("--no-offload", help="Use neither cpu nor disk.")] = False,
    weights_only: Annotated[
        bool,
        typer.Option("--weights-only", help="Let budgets cap weights alone, as accelerate's max_memory does."),
    ] = False,
    pin: Annotated[
        list[str] | None,
        typer.Option("--pin", metavar="MODULE=DEVICE", help="Place a module, glob or {0..9} range; repeatable."),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option("--rules", metavar="FILE", help="Pins from a file, one MODULE=DEVICE a line."),
    ] = None,
    weight: Annotated[
        list[str] | None,
        typer.Option("--weight", metavar="DEVICE=FACTOR", help="Count a GPU as a part, like 0=0.5; repeatable."),
    ] = None,
    prompt_tokens: PromptTokens = None,
    max_new_tokens: MaxNewTokens = None,
    batch_size: BatchSize = 1,
    image: Images = None,
    video: Videos = None,
    attention: Annotated[Attention, typer.Option("--attention", help="How attention is computed.")] = Attention.sdpa,
    kv_dtype: KvDtypeOption = KvDtype.auto,
    solve: Annotated[
        Solve | None, typer.Option("--solve", help="Find the largest prompt, batch or number of images that fits.")
    ] = None,
    how_many: Annotated[
        bool, typer.Option("--how-many", help="Find how many cards of the kind that --gpus names are needed.")
    ] = False,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where the map goes, - for stdout; map.json by default."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Draw the plan: a picture (.svg), or a page with it (.html)."),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Tell each decision with its numbers.")] = False,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Decide where each part of a model goes and write the map. Needs no weights and no GPU."""
    from devmap_cli.devices.capability import kernels_of
    from devmap_cli.mapfile import write_map
    from devmap_cli.model.load import load_spec
    from devmap_cli.planning.mapping import map_file
    from devmap_cli.planning.means import PlanRequest
    from devmap_cli.planning.nouns import Infeasible
    from devmap_cli.planning.pins import load_rules, parse_pin, parse_weights

    _check_targets(strategy, output, report)
    _check_questions(strategy, solve=solve, gpus=gpus, how_many=how_many, output=output, weights_only=weights_only)
    is_local = gpus is None and max_memory is None
    cards = local_cards() if is_local else cards_from_option(gpus)
    pins = (*(load_rules(rules) if rules else ()), *map(parse_pin, pin or ()))
    budgets = budgets_from_options(max_memory, reserve or [], no_offload=no_offload, cards={} if is_local else cards)
    gpu_weights = parse_weights(weight or [])
    kernels = kernels_of(cards.values(), budgets)
    spec = load_spec(
        model,
        revision=revision,
        dtype=dtype.value if dtype else None,
        quantize=quantize.value if quantize else None,
        trust_remote_code=trust_remote_code,
        kernels=kernels,
    )
    workload = workload_for(
        spec,
        prompt_tokens=prompt_tokens,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        images=image or (),
        videos=video or (),
        attention=attention,
        kv_dtype=kv_dtype,
    )
    refuse_old_cards(attention.value, spec.quantization, cards.values())
    planning = Planning(spec, kernels, is_local=is_local, trust_remote_code=trust_remote_code)
    if prompt_tokens is None:
        workload = planning.with_room_for_media(workload)
    request = PlanRequest(strategy.value, budgets, workload, pins, gpu_weights, weights_only, cards)
    if strategy is Strategy.all:
        compare_strategies(planning, request, as_json=as_json)
        return
    answer, request, found = _answer(planning, request, solve=solve, gpus=gpus if how_many else None)
    if isinstance(answer, Infeasible):
        from devmap_cli.cli.refusal import Given, refuse

        refuse(answer, planning, request, Given.of(context), as_json=as_json)
    document = map_file(spec, request, answer)
    target = ("-" if as_json else "map.json") if output is None else output
    write_map(document, target)
    if as_json and output not in (None, "-"):
        write_map(document, "-")
    if not as_json or report is not None:
        names = {device: card.name for device, card in request.cards.items()}
        shown = Shown(document, answer, spec, names, _notes(planning, request, document, answer, found))
        if report is not None:
            shown.write_report(report)
        if not as_json:
            shown.show(target, explain=explain, report=report)


def _check_targets(strategy: Strategy, output: str | None, report: Path | None) -> None:
    """Refuse a report that has nothing to show, or would lie where the map does."""
    if report is None:
        return
    if strategy is Strategy.all:
        raise RequestError("--report draws one plan, and --strategy all makes none", "name one strategy")
    if output not in (None, "-") and Path(str(output)).resolve() == report.resolve():
        raise RequestError(f"--output and --report both name {report}", "give --report another file")
    from devmap_cli.render.report import check_report_path

    check_report_path(report)


def _check_questions(
    strategy: Strategy, *, solve: Solve | None, gpus: str | None, how_many: bool, output: str | None, weights_only: bool
) -> None:
    """Refuse options that don't go together."""
    if how_many and gpus is None:
        raise RequestError("--how-many needs the kind of card", "name it: --gpus T4 --how-many")
    if how_many and solve is not None:
        raise RequestError("--how-many and --solve are two questions", "ask one of them")
    if strategy is Strategy.all and (how_many or solve is not None or output is not None):
        raise RequestError(
            "--strategy all only compares: it writes no map and answers no other question",
            "name one strategy, for example --strategy balanced",
        )
    if weights_only and solve is not None:
        raise RequestError(
            "--solve asks what a workload takes, and --weights-only leaves it out", "drop --weights-only"
        )


def _answer(
    planning: Planning, request: PlanRequest, *, solve: Solve | None, gpus: str | None
) -> tuple[Placement | Infeasible, PlanRequest, list[str]]:
    """The plan, the request that it answers, and what was found on the way."""
    from devmap_cli.planning.nouns import Infeasible

    if gpus is not None:
        request, answer, number = fewest_cards(planning, request, gpus)
        return answer, request, [] if isinstance(answer, Infeasible) else [how_many_note(number, request.cards)]
    if solve is None:
        return planning.plan(request), request, []
    largest = solve_for(planning, request, solve)
    if isinstance(largest, Infeasible):
        return largest, request, []
    found, request = largest
    return found.placement, request, [solve_note(solve, found, planning.spec)]


def _notes(
    planning: Planning, request: PlanRequest, document: MapFile, placement: Placement, found: list[str]
) -> list[str]:
    from devmap_cli.planning.explaining import unused_accelerators
    from devmap_cli.planning.pins import todays_pins
    from devmap_cli.render.plan import plan_notes, speed_note

    notes = plan_notes(
        planning.spec,
        document,
        unused_accelerators(placement),
        weights_only=request.weights_only,
        reason=planning.reason,
    )
    renamed = [
        f"{pin.pattern} is called {todays.pattern} in the installed transformers"
        for pin, todays in zip(request.pins, todays_pins(request.pins, planning.spec), strict=True)
        if pin != todays
    ]
    pace = planning.shown_pace(request, placement)
    return [*found, *renamed, *notes, *([] if pace is None else [speed_note(pace.of(placement), pace, placement)])]


@dataclass(frozen=True, slots=True)
class Shown:
    """A plan as it is shown."""

    document: MapFile
    placement: Placement
    spec: ModelSpec
    names: Mapping[Device, str]
    notes: list[str]

    def write_report(self, path: Path) -> None:
        """Draw it."""
        from devmap_cli.render.report import Report, write_report

        write_report(path, Report.of(self.document, self.spec, cards=self.names, notes=self.notes))

    def show(self, target: str, *, explain: bool, report: Path | None) -> None:
        """Print it, on stderr where the map goes to stdout."""
        from devmap_cli.render.console import err, out
        from devmap_cli.render.plan import BAR_WIDTH, DeviceTable, layer_bar

        console = err() if target == "-" else out()
        console.print(DeviceTable(self.document, self.names))
        console.print()
        console.print(layer_bar(self.document, min(BAR_WIDTH, console.width)))
        for note in self.notes:
            console.print(note)
        if explain:
            from devmap_cli.render.explanation import Explanation

            console.print()
            console.print(Explanation(self.placement, self.names, self.spec.ties))
        for written in (None if target == "-" else target, report):
            if written is not None:
                err().print(f"wrote {written}")
