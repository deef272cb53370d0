"""What `devmap plan` answers beside a plan: all strategies, how many cards, how much fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

import typer

from devmap_cli.cli.streams import print_json
from devmap_cli.errors import RequestError

if TYPE_CHECKING:
    from devmap_cli.cli.planning import Planning
    from devmap_cli.devices.cards import Card
    from devmap_cli.devices.device import Device
    from devmap_cli.model.spec import ModelSpec
    from devmap_cli.planning.means import PlanRequest
    from devmap_cli.planning.nouns import Infeasible, Placement
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
        print_json(document)
    else:
        from devmap_cli.render.console import out
        from devmap_cli.render.plan import speed_basis

        out().print(compare_table(candidates, {device: card.name for device, card in request.cards.items()}))
        basis = "" if pace is None else f"; {speed_basis(pace, request.budgets.devices)}"
        figures = "sizes are those of weights" if request.weights_only else "peaks and speed are predicted"
        out().print(f"{figures}, and no map is written{basis}")
    if not any(isinstance(item.answer, Placement) for item in candidates):
        raise typer.Exit(EXIT_NO)


def fewest_cards(
    planning: Planning, request: PlanRequest, card_text: str
) -> tuple[PlanRequest, Placement | Infeasible, int]:
    """The smallest number of cards of one kind that holds the workload: the request for them, its answer, the number.

    Where no number does, they are as many as could help.

    Raises:
        RequestError: `card_text` names several cards.
    """
    from devmap_cli.devices.budgets import Budgets
    from devmap_cli.devices.cards import parse_gpus
    from devmap_cli.planning.blocks import blocks_of
    from devmap_cli.planning.nouns import Infeasible
    from devmap_cli.planning.searching import fewest

    named = parse_gpus(card_text)
    kinds = {card.name for card in named.values()}
    card = next(iter(named.values()))
    if len(kinds) > 1 or len(named) > card.num_gpus:
        raise RequestError("--how-many counts cards of one kind", f"name it alone: --gpus '{card.name}'")
    tiers = {device: size for device, size in request.budgets if not device.is_accelerator}
    most = min(_MAX_CARDS, -(-len(blocks_of(planning.spec, 0, 1)) // card.num_gpus))
    limit = 1 if card.kind == "mps" else max(1, most)

    def with_cards(count: int) -> PlanRequest:
        cards = parse_gpus(f"{count}x{card.name}")
        sizes = {device: item.usable_bytes for device, item in cards.items()}
        return replace(request, budgets=Budgets.of({**sizes, **tiers}, dict(request.budgets.reserved)), cards=cards)

    def attempt(count: int) -> Placement | Infeasible:
        return planning.plan(with_cards(count), rehearse=False, is_probe=True)

    found = fewest(attempt, limit)
    if isinstance(found, Infeasible):
        return with_cards(limit), found, limit
    count = found[0]
    answer = planning.plan(with_cards(count))
    while isinstance(answer, Infeasible) and count < limit:
        count += 1
        answer = planning.plan(with_cards(count))
    while count > 1 and not isinstance(fewer := planning.plan(with_cards(count - 1)), Infeasible):
        count, answer = count - 1, fewer
    return with_cards(count), answer, count


def solve_for(planning: Planning, request: PlanRequest, what: Solve) -> tuple[Largest, PlanRequest] | Infeasible:
    """The largest workload that fits and got through a rehearsal, and the request for it.

    Raises:
        RequestError: `images` without an image, or a workload that the model cannot take at all.
    """
    from devmap_cli.planning.nouns import Infeasible
    from devmap_cli.planning.searching import largest

    if what is Solve.images and not request.workload.images:
        raise RequestError("--solve images repeats an image, and none is given", "add --image 1024x768")
    tried = _Attempts(planning, request, what)
    while True:
        found = largest(tried, tried.first, tried.limit, tried.foresee)
        if isinstance(found, Infeasible):
            return found
        answer = tried.answers[found.value] = planning.plan(tried.asked(found.value))
        if not isinstance(answer, Infeasible):
            break
    next_value = None if found.next_value is None else found.next_value * tried.unit
    solved = replace(found, value=found.value * tried.unit, placement=answer, next_value=next_value)
    return solved, tried.asked(found.value)


class _Attempts:
    """Plans for values of what is solved for, counted in units that the model takes, each value once."""

    def __init__(self, planning: Planning, request: PlanRequest, what: Solve) -> None:
        from devmap_cli.cli.workload import prompt_step

        self.answers: dict[int, Placement | Infeasible] = {}
        self._planning, self._request, self._what = planning, request, what
        workload, limit = request.workload, _LIMITS[what.value]
        given = {
            Solve.context: workload.prompt_tokens,
            Solve.batch: workload.batch_size,
            Solve.images: len(workload.images),
        }[what]
        if what is Solve.context and planning.spec.max_positions:
            limit = max(1, planning.spec.max_positions - workload.max_new_tokens)
        self.unit = min(prompt_step(workload.kv_dtype), limit) if what is Solve.context else 1
        self.first, self.limit = given // self.unit, limit // self.unit

    def __call__(self, value: int) -> Placement | Infeasible:
        """The plan for a value; one that the model cannot take does not fit, if a smaller one can be taken."""
        if value not in self.answers:
            self.answers[value] = self._planned(value)
        return self.answers[value]

    def foresee(self, known: Sequence[int]) -> int | None:
        """The largest value that would fit if all sizes lay on polynomials through those of the `known` ones.

        The first of these fits, the second does not. None where that cannot be told, as where a larger value makes the
        model do something else.
        """
        from devmap_cli.planning.nouns import Placement
        from devmap_cli.planning.planner import make_plan
        from devmap_cli.planning.searching import shares, smallest
        from devmap_cli.simulation.trace import are_alike, mixed

        first = self._planning.profile(self.asked(known[0]))
        if first is None:
            return None
        alike = {known[0]: first.trace}
        for value in known[1:]:
            profile = self._planning.profile(self.asked(value))
            if profile is not None and profile.groups == first.groups and are_alike(profile.trace, first.trace):
                alike[value] = profile.trace
        if known[1] not in alike:
            return None

        def is_too_much(value: int) -> bool:
            trace = mixed(list(alike.values()), shares(list(alike), value))
            plan = make_plan(self._planning.spec, self.asked(value), replace(first, trace=trace), is_probe=True)
            return not isinstance(plan, Placement)

        low, high = known[:2]
        return low if is_too_much(low + 1) else smallest(is_too_much, low + 1, high) - 1

    def asked(self, value: int) -> PlanRequest:
        """The request for a value."""
        workload, amount = self._request.workload, value * self.unit
        if self._what is Solve.context:
            return replace(self._request, workload=replace(workload, prompt_tokens=amount))
        if self._what is Solve.batch:
            return replace(self._request, workload=replace(workload, batch_size=amount))
        images = (workload.images * amount)[:amount]
        seen = self._planning.with_room_for_media(replace(workload, images=images))
        return replace(self._request, workload=seen)

    def _planned(self, value: int) -> Placement | Infeasible:
        from devmap_cli.planning.nouns import Infeasible

        try:
            request = self.asked(value)
            limit, workload = self._planning.spec.max_positions, request.workload
            if limit is not None and workload.prompt_tokens + workload.max_new_tokens > limit and value > 1:
                return Infeasible("", "the model ends there", 0, 0)
            return self._planning.plan(request, rehearse=False)
        except RequestError as error:
            larger = [answer for answer in self.answers.values() if isinstance(answer, Infeasible)]
            if value == 1 and not larger:
                raise
            return larger[0] if value == 1 else Infeasible("", error.message, 0, 0)


def how_many_note(count: int, cards: Mapping[Device, Card]) -> str:
    """The answer to `--how-many` in words."""
    card = next(iter(cards.values()))
    gpus = f", {len(cards)} devices" if len(cards) != count else ""
    fewer = "" if count == 1 else f": {count - 1} {'is' if count == 2 else 'are'} not enough"
    return f"{count} × {card.name}{gpus} needed{fewer}"


def solve_note(what: Solve, found: Largest, spec: ModelSpec) -> str:
    """The answer to `--solve` in words, with the device that binds."""
    from devmap_cli.units import format_bytes

    unit = {
        Solve.context: "tokens of prompt",
        Solve.batch: "sequences at once",
        Solve.images: "images in a prompt",
    }[what]
    refusal = found.refusal
    if refusal is None or found.next_value is None:
        end = "the model ends there" if what is Solve.context and spec.max_positions else "no more were tried"
        return f"{found.value:,} {unit} at most: {end}"
    if not refusal.missing_bytes:
        return f"{found.value:,} {unit} at most: {refusal.reason}"
    binds = "" if refusal.device is None else f"{refusal.device.label} binds, "
    missing = f"{binds}{format_bytes(refusal.missing_bytes)} missing"
    return f"{found.value:,} {unit} fit, {found.next_value:,} do not: {missing}"
