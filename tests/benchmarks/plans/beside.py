"""devmap's placements beside those of transformers' own planner and beside the optimum, by weights alone."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import CPU, Device
from devmap_cli.errors import DevmapError
from devmap_cli.mapfile import MapWorkload
from devmap_cli.model.names import join, parent
from devmap_cli.model.spec import ModelSpec
from devmap_cli.planning.blocks import blocks_of
from devmap_cli.planning.means import PlanRequest
from devmap_cli.planning.nouns import Infeasible
from devmap_cli.planning.planner import make_plan
from tests.benchmarks.plans.optimum import Optimum

CONFIGS = Path(__file__).parents[3].parent / "shared" / "corpus" / "configs"
STRATEGIES = ("balanced", "balanced_low_0", "sequential")
TOLERANCE = 1.001
"""How far above the optimum the highest use of `balanced` may be."""
NEGLIGIBLE = 1.0001
"""As good as equal: devmap has buffers of a few bytes where they are used, transformers has them at the end."""
MAX_SHOWN = 5
Loads = dict[int, int]
"""Bytes on each GPU, by its number."""


@dataclass(frozen=True)
class Case:
    """A model and budgets: bytes by the number of the GPU, and room enough on the cpu."""

    model: str
    number: int
    shape: str
    gpus: dict[int, int]

    def __str__(self) -> str:
        return f"{self.model} --case {self.number} ({self.shape}: {self.gpus})"


@dataclass
class Tally:
    """What came of all cases with one strategy."""

    num_cases: int = 0
    num_possible: int = 0
    found: Counter[str] = field(default_factory=Counter)
    ratios: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    num_compared: int = 0
    num_fuller: int = 0
    violations: Counter[str] = field(default_factory=Counter)


class Subject:
    """One model of the corpus: its description, the empty model, and what only depends on them."""

    def __init__(self, spec: ModelSpec, model: Any) -> None:
        self.spec = spec
        self.model = model
        self.weights = [block.weights_bytes for block in blocks_of(spec, 0, 1)]
        self.forwards = Optimum(self.weights)
        self.backwards = Optimum(self.weights[::-1])
        self._below = _bytes_below(spec)

    def loads(self, device_map: Mapping[str, Any]) -> Loads | None:
        """Bytes on each GPU; None where anything is elsewhere."""
        loads: Loads = {}
        for key, value in device_map.items():
            if not isinstance(value, int):
                return None
            loads[value] = loads.get(value, 0) + self._below[key]
        return loads


def run(console: Console, seed: int, num_models: int | None, num_cases: int, only: str, case: int | None) -> bool:
    """Print how both planners did; False where what must hold does not."""
    if not CONFIGS.is_dir():
        console.print(f"A: skipped, {CONFIGS} is not here")
        return True
    tallies = {strategy: Tally() for strategy in STRATEGIES}
    shown: Counter[tuple[str, str]] = Counter()
    subjects = 0
    for name, subject in _subjects(console, seed, num_models, only):
        subjects += 1
        for number in range(num_cases) if case is None else [case]:
            for strategy, broken, example in _judged(subject, _case(subject, name, number, seed), tallies):
                shown[strategy, broken] += 1
                if shown[strategy, broken] <= MAX_SHOWN:
                    console.print(f"{strategy}: {broken}: {example}", soft_wrap=True)
    console.print(_table(tallies, subjects))
    return not any(tally.violations for tally in tallies.values())


def _subjects(console: Console, seed: int, num_models: int | None, only: str) -> Iterator[tuple[str, Subject]]:
    from transformers import CONFIG_MAPPING

    from devmap_cli.model.load import empty_model, load_spec

    folders = [path.parent for path in sorted(CONFIGS.glob("*/config.json")) if only in path.parent.name]
    native = [folder for folder in folders if _model_type(folder) in CONFIG_MAPPING]
    if num_models is not None and num_models < len(native):
        native = sorted(Random(seed).sample(native, num_models))
    for folder in native:
        try:
            spec = load_spec(str(folder))
            subject = Subject(spec, empty_model(spec, trust_remote_code=False))
        except DevmapError as error:
            console.print(f"skipped {folder.name}: {error}", soft_wrap=True)
            continue
        yield folder.name, subject


def _model_type(folder: Path) -> str | None:
    kind: str | None = json.loads((folder / "config.json").read_text()).get("model_type")
    return kind


def _case(subject: Subject, name: str, number: int, seed: int) -> Case:
    """Random budgets for 1 to 8 GPUs, which hold 1.02 to 1.5 times the weights together."""
    random = Random(f"{seed} {name} {number}")
    num_gpus = random.randint(1, 8)
    shape = random.choice(("equal", "equal", "two sizes", "unequal"))
    ids = list(range(num_gpus)) if random.random() < 0.7 else sorted(random.sample(range(12), num_gpus))
    shares = {
        "equal": [1.0] * num_gpus,
        "two sizes": [random.choice((1.0, 2.0)) for _ in ids],
        "unequal": [random.uniform(0.3, 1.5) for _ in ids],
    }[shape]
    total = sum(subject.weights) * random.choice((random.uniform(1.02, 1.15), random.uniform(1.02, 1.5)))
    gpus = {index: int(total * share / sum(shares)) for index, share in zip(ids, shares, strict=True)}
    return Case(name, number, f"{shape}{'' if ids[-1] < num_gpus else ', gaps'}", gpus)


def _judged(subject: Subject, case: Case, tallies: Mapping[str, Tally]) -> Iterator[tuple[str, str, str]]:
    """Count one case, and tell what must hold and does not."""
    budgets = list(case.gpus.values())
    optimum = subject.forwards.in_any_order(budgets)
    in_order = subject.forwards.in_this_order(budgets)
    for strategy, tally in tallies.items():
        try:
            ours = _devmap(subject, case, strategy)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a case to print
            tally.violations["raises"] += 1
            yield strategy, "raises", f"{case} {error!r}"
            continue
        theirs = _transformers(subject, case, strategy)
        tally.num_cases += 1
        tally.num_possible += optimum <= 1
        uses = {"devmap": _highest_use(ours, case), "transformers": _highest_use(theirs, case)}
        for planner, use in uses.items():
            if use is not None and optimum <= 1:
                tally.found[planner] += 1
                tally.ratios[planner].append(use / (in_order if in_order <= 1 else optimum))
        for broken in _broken(subject, case, strategy, ours, theirs):
            tally.violations[broken] += 1
            yield strategy, broken, f"{case} devmap {ours} transformers {theirs}"
        if len(set(budgets)) == 1 and uses["devmap"] is not None and uses["transformers"] is not None:
            tally.num_compared += 1
            tally.num_fuller += uses["devmap"] > uses["transformers"] * NEGLIGIBLE


def _broken(subject: Subject, case: Case, strategy: str, ours: Loads | None, theirs: Loads | None) -> Iterator[str]:
    """What must hold and does not."""
    budgets = list(case.gpus.values())
    optimum = subject.forwards.in_any_order(budgets)
    if ours is None:
        if optimum <= 1:
            yield "a contiguous placement on the GPUs is missed"
        return
    use = _highest_use(ours, case)
    if use is None:
        yield "over budget"
        return
    in_order = subject.forwards.in_this_order(budgets)
    best = in_order if in_order <= 1 else optimum
    if strategy == "balanced" and best <= 1 and use > TOLERANCE * best:
        yield "not the optimum"
    if strategy == "balanced_low_0" and not _is_low_first(subject, case, ours):
        yield "not the optimum"
    if strategy == "sequential" and in_order <= 1 and ours != _filled(subject.weights, case.gpus):
        yield "not filled in order"
    is_valid = theirs is not None and _highest_use(theirs, case) is not None
    if theirs is not None and is_valid and len(set(budgets)) == 1 and not _is_as_good(strategy, case, ours, theirs):
        yield "behind transformers on equal GPUs"


def _is_as_good(strategy: str, case: Case, ours: Loads, theirs: Loads) -> bool:
    """Whether devmap's loads on equal GPUs are at least as balanced as transformers'.

    For `balanced_low_0` that is what the first GPU takes, then the highest use of the others.
    """
    first, *others = case.gpus
    if strategy == "balanced_low_0" and others:
        if ours.get(first, 0) != theirs.get(first, 0):
            return ours.get(first, 0) <= theirs.get(first, 0) * NEGLIGIBLE
        ours, theirs = ({index: loads.get(index, 0) for index in others} for loads in (ours, theirs))
    return max(ours.values()) <= max(theirs.values()) * NEGLIGIBLE


def _is_low_first(subject: Subject, case: Case, ours: Loads) -> bool:
    """Whether the first GPU takes the shortest front that the others can't, and the others are as even as can be."""
    first, *others = case.gpus
    budgets = [case.gpus[index] for index in others]
    num_blocks = len(subject.weights)
    rest = subject.backwards.reach_in_any_order(budgets)
    front = sum(subject.weights[: num_blocks - rest])
    if front > case.gpus[first]:
        return True  # no front does it: devmap then takes what part it can
    if ours.get(first, 0) > front:
        return False
    in_order = subject.backwards.in_this_order(budgets[::-1], rest)
    best = in_order if in_order <= 1 else subject.backwards.in_any_order(budgets, rest)
    use = max((ours.get(index, 0) / case.gpus[index] for index in others), default=0)
    return use <= TOLERANCE * best


def _filled(weights: Sequence[int], gpus: Mapping[int, int]) -> Loads:
    """GPUs filled in order, with room on the first for the largest block to come if it evens out the loads."""
    full, spared = _filled_in_order(weights, gpus, spare=False), _filled_in_order(weights, gpus, spare=True)
    assert full is not None, "they fit in this order"

    def use(loads: Loads) -> float:
        return max(load / gpus[index] for index, load in loads.items())

    return spared if spared is not None and use(spared) < use(full) else full


def _filled_in_order(weights: Sequence[int], gpus: Mapping[int, int], *, spare: bool) -> Loads | None:
    first = next(iter(gpus))
    loads = dict.fromkeys(gpus, 0)
    waiting = iter(gpus)
    index: int | None = next(waiting)
    for number, size in enumerate(weights):
        kept = max(weights[number + 1 :], default=0) if spare and index == first else 0
        while index is not None and loads[index] + size + kept > gpus[index]:
            index, kept = next(waiting, None), 0
        if index is None:
            return None
        loads[index] += size
    return {index: load for index, load in loads.items() if load}


def _highest_use(loads: Loads | None, case: Case) -> float | None:
    """The highest load / budget; None where not all is on the GPUs, or one is over its budget."""
    if loads is None or any(load > case.gpus[index] for index, load in loads.items()):
        return None
    return max(load / case.gpus[index] for index, load in loads.items())


def _devmap(subject: Subject, case: Case, strategy: str) -> Loads | None:
    gpus = {Device("cuda", index): size for index, size in case.gpus.items()}
    budgets = Budgets.of({**gpus, CPU: 2 * sum(subject.weights)})
    answer = make_plan(subject.spec, PlanRequest(strategy, budgets, MapWorkload(), weights_only=True))
    if isinstance(answer, Infeasible) or CPU in answer.devices:
        return None
    loads: Counter[int] = Counter()
    for block, device in zip(answer.blocks, answer.devices, strict=True):
        loads[device.index or 0] += block.weights_bytes
    return {index: loads[index] for index in case.gpus if loads[index]}


def _transformers(subject: Subject, case: Case, strategy: str) -> Loads | None:
    """The map that `from_pretrained(device_map=strategy)` would use; None also where it raises."""
    from transformers.integrations.accelerate import _get_device_map

    from devmap_cli.model.quiet import quiet_libraries

    max_memory: dict[int | str, int] = dict(case.gpus.items())
    max_memory["cpu"] = 2 * sum(subject.weights)
    with quiet_libraries(), Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
        try:
            device_map = _get_device_map(subject.model, strategy, max_memory, None)
        except Exception:  # noqa: BLE001 - whatever stops it, there is no map
            return None
    return subject.loads(device_map)


def _bytes_below(spec: ModelSpec) -> Counter[str]:
    """Bytes at or below each module and of each tensor; shared ones count at their owner."""
    below: Counter[str] = Counter()
    tied = spec.tied_to_another()
    for fqn, module in spec.modules():
        for tensor in module.tensors:
            name = join(fqn, tensor.name)
            while name and join(fqn, tensor.name) not in tied:
                below[name] += tensor.num_bytes
                name = parent(name)
    below[""] = sum(size for name, size in below.items() if "." not in name)
    return below


def _table(tallies: Mapping[str, Tally], num_models: int) -> Table:
    title = f"A: devmap beside transformers' planner, {num_models} models, random budgets, weights only"
    table = Table("strategy", "planner", "cases", "all on the GPUs", "highest use / optimum", "worst", title=title)
    for strategy, tally in tallies.items():
        for planner in ("devmap", "transformers"):
            found, ratios = tally.found[planner], tally.ratios[planner] or [1.0]
            share = f"{found} of {tally.num_possible} ({100 * found / max(1, tally.num_possible):.1f} %)"
            table.add_row(strategy, planner, str(tally.num_cases), share, f"{mean(ratios):.4f}", f"{max(ratios):.4f}")
        for broken, count in tally.violations.items():
            of = f" of {tally.num_compared}" if "equal GPUs" in broken else f" of {tally.num_possible}"
            table.add_row(strategy, f"BROKEN: {broken}", f"{count}{of}")
        compared = f"{tally.num_fuller} of {tally.num_compared}"
        table.add_row(strategy, "on equal GPUs a fuller fullest GPU than transformers'", compared)
    return table
