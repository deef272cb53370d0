"""What `devmap plan` answers beside a plan: all strategies, how many cards, how much fits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

import typer

from devmap_cli.errors import RequestError
from devmap_cli.units import format_bytes

if TYPE_CHECKING:
    from devmap_cli.cli.planning import Planning
    from devmap_cli.devices.cards import Card
    from devmap_cli.devices.device import Device
    from devmap_cli.mapfile import MapWorkload
    from devmap_cli.model.spec import ModelSpec
    from devmap_cli.planning.nouns import Infeasible, Placement
    from devmap_cli.planning.planner import PlanRequest
    from devmap_cli.planning.searching import Largest

_MAX_CARDS = 256
_LIMITS = {"context": 1 << 24, "batch": 1 << 16, "images": 1 << 10}


class Solve(str, Enum):
    """What `--solve` looks for the largest of."""

    context = "context"
    batch = "batch"
    images = "images"


def compare_strategies(planning: Planning, request: PlanRequest, *, as_json: bool) -> None:
    """Print what each strategy makes of a request, and write no map.

    Raises:
        Exit: no strategy fits.
    """
    from devmap_cli.errors import EXIT_NO
    from devmap_cli.planning.nouns import Placement
    from devmap_cli.planning.strategies import STRATEGIES
    from devmap_cli.render.compare import Candidate, compare_table

    pace = planning.pace(request)
    candidates = []
    for name in STRATEGIES:
        answer = planning.plan(replace(request, strategy=name), rehearse=False)
        speed = pace.of(answer) if pace is not None and isinstance(answer, Placement) else None
        candidates.append(Candidate(name, answer, speed))
    if as_json:
        document = {"format": "devmap.compare/1", "strategies": [item.to_document() for item in candidates]}
        typer.echo(json.dumps(document, indent=2))
    else:
        from devmap_cli.render.console import out
        from devmap_cli.render.plan import speed_basis

        out().print(compare_table(candidates, {device: card.name for device, card in request.cards.items()}))
        basis = "" if pace is None else f"; {speed_basis(pace, request.budgets.devices)}"
        out().print(f"peaks and speed are predicted, and no map is written{basis}")
    if not any(isinstance(item.answer, Placement) for item in candidates):
        raise typer.Exit(EXIT_NO)


def fewest_cards(
    planning: Planning, request: PlanRequest, card_text: str
) -> tuple[int, PlanRequest, Placement] | Infeasible:
    """The smallest number of cards of one kind that holds the workload, with the request and the placement for them.

    Raises:
        RequestError: `card_text` names several cards.
    """
    from devmap_cli.devices.budgets import Budgets
    from devmap_cli.devices.cards import parse_gpus
    from devmap_cli.planning.nouns import Infeasible
    from devmap_cli.planning.searching import fewest

    named = parse_gpus(card_text)
    kinds = {card.name for card in named.values()}
    card = next(iter(named.values()))
    if len(kinds) > 1 or len(named) > card.num_gpus:
        raise RequestError("--how-many counts cards of one kind", f"name it alone: --gpus '{card.name}'")
    tiers = {device: size for device, size in request.budgets if not device.is_accelerator}
    limit = 1 if card.kind == "mps" else _MAX_CARDS

    def with_cards(count: int) -> PlanRequest:
        cards = parse_gpus(f"{count}x{card.name}")
        sizes = {device: item.usable_bytes for device, item in cards.items()}
        return replace(request, budgets=Budgets.of({**sizes, **tiers}), cards=cards)

    def attempt(count: int) -> Placement | Infeasible:
        return planning.plan(with_cards(count), rehearse=False, is_probe=True)

    found = fewest(attempt, limit)
    if isinstance(found, Infeasible):
        return found
    count, _ = found
    asked = with_cards(count)
    placement = planning.plan(asked)
    return (count, asked, placement) if not isinstance(placement, Infeasible) else placement


def solve_for(planning: Planning, request: PlanRequest, what: Solve) -> tuple[Largest, PlanRequest] | Infeasible:
    """The largest workload that fits, and the request for it.

    Raises:
        RequestError: `images` without an image.
    """
    from devmap_cli.planning.nouns import Infeasible
    from devmap_cli.planning.searching import largest

    workload = request.workload
    if what is Solve.images and not workload.images:
        raise RequestError("--solve images repeats an image, and none is given", "add --image 1024x768")
    limit = _limit(planning.spec, workload, what)

    def asked(value: int) -> PlanRequest:
        changed = _changed(workload, what, value)
        return replace(request, workload=planning.with_room_for_media(changed) if what is Solve.images else changed)

    first = {"context": workload.prompt_tokens, "batch": 2, "images": 2}[what.value]
    found = largest(lambda value: _attempt(planning, asked, value), first, limit)
    return found if isinstance(found, Infeasible) else (found, asked(found.value))


def _attempt(planning: Planning, asked: Callable[[int], PlanRequest], value: int) -> Placement | Infeasible:
    """The plan for a value; one that the model cannot take does not fit, if a smaller one can be taken."""
    from devmap_cli.planning.nouns import Infeasible

    try:
        request = asked(value)
        limit, workload = planning.spec.max_positions, request.workload
        if limit is not None and workload.prompt_tokens + workload.max_new_tokens > limit and value > 1:
            return Infeasible("", "the model ends there", 0, 0, 0)
        return planning.plan(request, rehearse=False)
    except RequestError as error:
        if value == 1:
            raise
        return Infeasible("", str(error), 0, 0, 0)


def _changed(workload: MapWorkload, what: Solve, value: int) -> MapWorkload:
    if what is Solve.context:
        return replace(workload, prompt_tokens=value)
    if what is Solve.batch:
        return replace(workload, batch_size=value)
    images = (workload.images * value)[:value]
    return replace(workload, images=images)


def _limit(spec: ModelSpec, workload: MapWorkload, what: Solve) -> int:
    if what is Solve.context and spec.max_positions:
        return max(1, spec.max_positions - workload.max_new_tokens)
    return _LIMITS[what.value]


def how_many_note(count: int, cards: Mapping[Device, Card]) -> str:
    """The answer to `--how-many` in words."""
    card = next(iter(cards.values()))
    gpus = f", {len(cards)} devices" if len(cards) != count else ""
    fewer = "" if count == 1 else f": {count - 1} {'is' if count == 2 else 'are'} not enough"
    return f"{count} × {card.name}{gpus} needed{fewer}"


def solve_note(what: Solve, found: Largest, spec: ModelSpec) -> str:
    """The answer to `--solve` in words, with the device that binds."""
    unit = {
        Solve.context: "tokens of prompt",
        Solve.batch: "sequences at once",
        Solve.images: "images in a prompt",
    }[what]
    answer = f"{found.value:,} {unit} at most"
    if found.refusal is None or found.next_value is None:
        end = "the model ends there" if what is Solve.context and spec.max_positions else "no more were tried"
        return f"{answer}: {end}"
    if not found.refusal.missing_bytes:
        return f"{answer}: {found.refusal.reason}"
    binding = found.refusal.device or found.refusal.grow_device
    device = "all devices together bind" if binding is None else f"{binding.label} binds"
    return f"{answer}: {device}, {found.next_value:,} need {format_bytes(found.refusal.missing_bytes)} more"
