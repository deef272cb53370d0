"""Random plans for random workloads: none may run out of memory in a rehearsal, and none be refused without need."""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations_with_replacement, groupby, pairwise, permutations
from math import comb, factorial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from devmap_cli.checking.assurance import Assurance
from devmap_cli.checking.rehearsed import Rehearser
from devmap_cli.cli.workload import with_room_for_media
from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import CPU, Device
from devmap_cli.devices.runtime import CUDA_RUNTIME_BYTES, runtime_overhead_bytes
from devmap_cli.errors import RequestError
from devmap_cli.mapfile import MapWorkload
from devmap_cli.model.quantization.scheme import off_gpu
from devmap_cli.model.spec import ModelSpec
from devmap_cli.planning.blocks import blocks_of, device_map_of
from devmap_cli.planning.mapping import places_of
from devmap_cli.planning.means import PlanRequest
from devmap_cli.planning.nouns import Infeasible, Placement
from devmap_cli.planning.pace import Pace
from devmap_cli.planning.pins import Pin
from devmap_cli.planning.planner import make_plan
from devmap_cli.planning.profile import Profile
from devmap_cli.planning.profiling import Profiler
from devmap_cli.planning.strategies import STRATEGIES
from devmap_cli.simulation.memory import UNLIMITED_BYTES
from devmap_cli.simulation.pool import LARGE_SEGMENT_BYTES
from devmap_cli.simulation.replay import Replay, Seat, replay
from tests.benchmarks.plans.beside import CONFIGS
from tests.support.toys import write_toy

if TYPE_CHECKING:
    from devmap_cli.simulation.rehearsal import Rehearsal

PLANS_PER_WORKLOAD = 4
TOLERANCE = 0.005
"""How far what a profile tells of a device may be above what a rehearsal does."""
SLACK_BYTES = 16 << 10
"""What small tensors that are copied may make of a difference between a trace and a rehearsal."""
MAX_CUTS = 150
"""So many ways to cut a refused model are tried, those with the evenest weights and as many drawn by lot."""
MAX_EVENED = 40
"""So many ways are tried of either sort where a plan is to be the evenest."""
GRANULARITY = 0.001
"""By so much of its highest use another way may be better, and by one segment of an allocator."""
MAX_LOOKED_AT = 200_000
"""From so many ways these are taken, drawn by lot where there are more."""
ON_CPU = -1
MAX_SHOWN = 10
_LONG = {"max_position_embeddings": 16_384}
TOYS: dict[str, dict[str, Any]] = {
    "qwen2": {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 8000, "num_hidden_layers": 12, **_LONG},
    "gpt2": {"n_embd": 128, "n_layer": 6, "n_positions": 10_000, "vocab_size": 2000},
    "opt": {"hidden_size": 192, "ffn_dim": 512, "num_hidden_layers": 5, **_LONG},
    "mixtral": {"hidden_size": 128, "num_hidden_layers": 6, **_LONG},
    "gemma3": {"vocab_size": 16_000, **_LONG},
    "qwen3_next": _LONG,
    "t5": {"d_model": 128, "num_layers": 4, "decoder_start_token_id": 0},
}
CORPUS = (
    "Qwen__Qwen2.5-0.5B",
    "Qwen__Qwen2.5-7B",
    "Qwen__Qwen2.5-VL-7B-Instruct",
    "Qwen__Qwen2-VL-2B-Instruct",
    "Qwen__Qwen3-1.7B",
    "Qwen__Qwen3-8B-FP8",
    "google__gemma-2-2b",
    "google__gemma-3-1b-it",
    "meta-llama__Llama-3.1-8B-Instruct",
    "meta-llama__Meta-Llama-3.1-8B",
    "mistralai__Mistral-7B-v0.1",
    "HuggingFaceTB__SmolLM-1.7B",
    "TheBloke__Llama-2-7B-GPTQ",
    "microsoft__Phi-3-mini-128k-instruct",
)
SEEING = ("Qwen__Qwen2.5-VL-7B-Instruct", "Qwen__Qwen2-VL-2B-Instruct")
IMAGES = ((224, 224), (640, 480), (1280, 720))


@dataclass
class Job:
    """A model with a workload, what it takes on one device, and its profile."""

    name: str
    spec: ModelSpec
    model: Any
    workload: MapWorkload
    profile: Profile
    peak_bytes: int


@dataclass
class Tally:
    """What came of all plans."""

    counts: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    told: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def run(console: Console, seed: int, num_cases: int, case: int | None) -> bool:
    """Print what came of the plans; False where what must hold does not."""
    tally = Tally()
    job: Job | None = None
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(num_cases) if case is None else [case]:
            if number % PLANS_PER_WORKLOAD == 0 or case is not None:
                job = _job(number // PLANS_PER_WORKLOAD, seed, Path(scratch), tally)
            if job is None:
                tally.counts["not planned: the workload cannot be rehearsed"] += 1
                continue
            request = _request(job, Random(f"{seed} plan {number}"))
            for broken in _judged(job, request, tally, Random(f"{seed} cuts {number}")):
                kind = broken.partition(":")[0]
                tally.broken[kind] += 1
                if tally.broken[kind] <= MAX_SHOWN:
                    again = f"python -m tests.benchmarks.plans B --seed {seed} --case {number}"
                    console.print(f"{broken}\n  {job.name} {_told(request)}\n  {again}", soft_wrap=True)
    console.print(_table(tally))
    return not tally.broken


def _job(number: int, seed: int, scratch: Path, tally: Tally) -> Job | None:
    """A random model and workload; None where a rehearsal cannot tell what it takes."""
    from devmap_cli.model.quiet import quiet_libraries
    from devmap_cli.simulation.rehearsal import rehearse
    from devmap_cli.simulation.workload import simulated

    random = Random(f"{seed} job {number}")
    there = [name for name in CORPUS if (CONFIGS / name).is_dir()]
    name = random.choice(there) if there and random.random() < 0.5 else random.choice(list(TOYS))
    spec, profiler = _subject(name, scratch)
    workload = _workload(random, spec.max_positions or 1 << 14)
    if name in SEEING and random.random() < 0.7:
        workload = replace(workload, images=tuple(random.choices(IMAGES, k=random.randint(1, 3))), batch_size=1)
        workload = with_room_for_media(workload, profiler.media_tokens(workload))
    try:
        profile = profiler.profile(workload)
    except RequestError as error:
        tally.counts[f"refused workload: {error}"] += 1
        return None
    if profile is None:
        tally.counts[f"no profile: {profiler.reason}"] += 1
        return None
    model = profiler.empty_model()
    with quiet_libraries():
        seen = rehearse(model, {"": 0}, simulated(workload), [UNLIMITED_BYTES])
    if seen.failure is not None:
        tally.counts[f"no rehearsal: {seen.failure.error}"] += 1
        return None
    return Job(name, spec, model, workload, profile, seen.devices[0].most_reserved_bytes)


@cache
def _subject(name: str, scratch: Path) -> tuple[ModelSpec, Profiler]:
    from devmap_cli.model.load import load_spec

    folder = write_toy(scratch / name, name, **TOYS[name]) if name in TOYS else CONFIGS / name
    spec = load_spec(str(folder))
    return spec, Profiler(spec)


def _workload(random: Random, max_tokens: int) -> MapWorkload:
    new_tokens = random.choice((1, 2, 16, random.randint(3, 512)))
    return MapWorkload(
        batch_size=random.choice((1, 1, 2, 4, 8)),
        prompt_tokens=max(1, min(int(2 ** random.uniform(0, 13)), max_tokens - new_tokens)),
        max_new_tokens=new_tokens,
        attention=random.choice(("sdpa", "sdpa", "eager", "flash_attention_2")),
    )


def _told(request: PlanRequest) -> str:
    sizes = {str(device): size for device, size in request.budgets}
    return f"{request.workload} {request.strategy} {sizes} {' '.join(map(str, request.pins))}"


def _request(job: Job, random: Random) -> PlanRequest:
    """A strategy, at times a pin of what comes first, and budgets: 0.7 to 2 times what the run takes on one device.

    With a cpu beside them, rather less.
    """
    num_gpus = random.randint(1, 4)
    has_cpu = random.random() < 0.35
    need = job.peak_bytes + (num_gpus - 1) * job.profile.shared_bytes
    ranges = ((0.5, 1.1), (0.9, 1.3)) if has_cpu else ((0.7, 1.2), (1, 1.6), (1.2, 2))
    total = need * random.uniform(*random.choice(ranges))
    shares = random.choice(([1.0] * num_gpus, [random.uniform(0.4, 1.6) for _ in range(num_gpus)]))
    budgets = {
        Device("cuda", index): _with_runtime(int(total * share / sum(shares))) for index, share in enumerate(shares)
    }
    if has_cpu:
        weights = sum(size for _, size in job.profile.trace.weights)
        budgets[CPU] = int(weights * random.uniform(0.2, 1.5))
    pins: tuple[Pin, ...] = ()
    if random.random() < 0.15:
        first = blocks_of(job.spec, 0, 1)[job.profile.groups[0][0]]
        pins = (Pin(first.fqns[0], Device("cuda", num_gpus - 1)),)
    return PlanRequest(random.choice(list(STRATEGIES)), Budgets.of(budgets), job.workload, pins)


def _with_runtime(num_bytes: int) -> int:
    """The budget of which `num_bytes` are left beside what the driver takes."""
    return min(num_bytes + CUDA_RUNTIME_BYTES, -(-num_bytes * 8 // 7))


def _left(budgets: Budgets) -> list[int]:
    """What tensors and the allocator's cache may take of each GPU."""
    return [size - runtime_overhead_bytes(device.kind, size) for device, size in budgets if device.is_accelerator]


def _judged(job: Job, request: PlanRequest, tally: Tally, random: Random) -> Iterator[str]:
    """Plan, count, and tell what must hold and does not."""
    budgets = request.budgets
    pace = Pace(job.profile, job.spec.dtype, {})
    tally.counts["plans"] += 1
    try:
        answer = make_plan(job.spec, request, job.profile, pace=pace, confirm=_assurance(job, request).missing)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a case to print
        yield f"raises: {error!r}"
        return
    if isinstance(answer, Infeasible):
        tally.counts["refused, and cuts tried by hand"] += 1
        yield from _missed(job, request, tally, random)
        return
    if not answer.main_device.is_accelerator:
        tally.counts["all on cpu"] += 1
        return
    tally.counts["fits, some on cpu" if CPU in answer.devices else "fits on the GPUs"] += 1
    yield from _differences(job, budgets, answer, tally)
    if request.strategy in ("auto", "balanced") and all(device.is_accelerator for device in answer.devices):
        yield from _beaten(job, request, answer, tally, random)


def _beaten(job: Job, request: PlanRequest, placement: Placement, tally: Tally, random: Random) -> Iterator[str]:
    """Another way to cut the model, with a lower highest use, if one is found by trying some."""
    sizes = [size for device, size in request.budgets if device.is_accelerator]
    devices = request.budgets.accelerators
    mine = max(placement.memory(device).peak_bytes / size for device, size in zip(devices, sizes, strict=True))
    least = mine
    for numbers in _candidates(job, request, random, MAX_EVENED, is_in_order=True):
        if ON_CPU in numbers:
            continue
        tally.counts["ways tried to be evener by hand"] += 1
        seats, unlimited = [Seat(number) for number in numbers], [UNLIMITED_BYTES] * len(sizes)
        seen = replay(job.profile.trace, seats, unlimited, min(numbers)).devices
        uses = [
            (device.peak.reserved_bytes + runtime_overhead_bytes("cuda", size)) / size if index in numbers else 0
            for index, (device, size) in enumerate(zip(seen, sizes, strict=True))
        ]
        least = min(least, max(uses))
    tally.told["evenest by hand"].append(least / mine - 1)
    if least < mine * (1 - GRANULARITY) - LARGE_SEGMENT_BYTES / min(sizes):
        yield f"evener by hand: {100 * least:.2f} % instead of {100 * mine:.2f} %"


def _assurance(job: Job, request: PlanRequest) -> Assurance:
    return Assurance(Rehearser(job.model, job.spec, job.workload, dict(request.budgets)))


def _differences(job: Job, budgets: Budgets, placement: Placement, tally: Tally) -> Iterator[str]:
    """Where a rehearsal of the placement says something else than the plan."""
    from devmap_cli.model.quiet import quiet_libraries
    from devmap_cli.simulation.rehearsal import rehearse
    from devmap_cli.simulation.workload import simulated

    device_map = device_map_of(job.spec, placement)
    workload, capacities = simulated(job.workload), _left(budgets)
    with quiet_libraries():
        unlimited = seen = rehearse(job.model, device_map, workload, [UNLIMITED_BYTES] * len(capacities))
        if any(device.most_reserved_bytes > left for device, left in zip(seen.devices, capacities, strict=True)):
            tally.counts["rehearsed where the allocator has to give back what it keeps"] += 1
            seen = rehearse(job.model, device_map, workload, capacities)
    if seen.failure is not None:
        kind = "out of memory" if unlimited.failure is None else "does not run"
        yield f"{kind}: {seen.failure.phase} {seen.failure.module} {seen.failure.error}"
        return
    main = placement.main_device.index or 0
    played = replay(job.profile.trace, _seats(placement), [UNLIMITED_BYTES] * len(capacities), main)
    for device, size in budgets:
        if device.is_accelerator and device in placement.devices:
            in_table = placement.memory(device).peak_bytes - runtime_overhead_bytes(device.kind, size)
            yield from _compared(_Figures(device, in_table, played, unlimited, seen), tally)


@dataclass(frozen=True)
class _Figures:
    """What is told of a device: in the plan's table, by a replay, and by rehearsals without and with its budget."""

    device: Device
    in_table: int
    played: Replay
    unlimited: Rehearsal
    seen: Rehearsal


def _compared(figures: _Figures, tally: Tally) -> Iterator[str]:
    """Where a plan tells less than a rehearsal or much more, or its profile something else."""
    index = figures.device.index or 0
    told, device, last = (side.devices[index] for side in (figures.played, figures.unlimited, figures.seen))
    in_tensors = max(device.allocated_bytes.values())
    pairs = {
        "held by tensors": (max(told.allocated_bytes.values()), in_tensors, max(SLACK_BYTES, TOLERANCE * in_tensors)),
        "reserved": (told.most_reserved_bytes, device.most_reserved_bytes, TOLERANCE * device.most_reserved_bytes),
        "reserved, in the table": (figures.in_table, last.peak.reserved_bytes, 0),
    }
    for what, (mine, real, below) in pairs.items():
        tally.told[what].append(mine / real - 1)
        if not real - below <= mine <= real * (1 + TOLERANCE):
            yield f"told otherwise than is {what}: {mine} instead of {real} on {figures.device.label}"


def _seats(placement: Placement) -> list[Seat]:
    main = placement.main_device.index or 0
    return [
        Seat(device.index or 0) if device.is_accelerator else Seat(main, is_offloaded=True)
        for device in placement.devices
    ]


def _missed(job: Job, request: PlanRequest, tally: Tally, random: Random) -> Iterator[str]:
    """A placement of runs of blocks that would have fitted, if one is found by trying them."""
    left = _left(request.budgets)
    for numbers in _candidates(job, request, random, MAX_CUTS):
        tally.counts["cuts tried by hand"] += 1
        main = min(number for number in numbers if number != ON_CPU)
        seats = [Seat(main, is_offloaded=True) if number == ON_CPU else Seat(number) for number in numbers]
        if replay(job.profile.trace, seats, left, main).failure is not None:
            continue
        if _is_rehearsed(job, request, numbers):
            yield f"refused though it fits: {_in_short(numbers)}"
            return
        tally.counts["refused, and fits by the trace alone, not in a rehearsal"] += 1


def _is_rehearsed(job: Job, request: PlanRequest, numbers: Sequence[int]) -> bool:
    """Whether the model's code gets through with the blocks on these devices."""
    blocks = job.profile.blocks(blocks_of(job.spec, 0, 1))
    places = tuple(CPU if number == ON_CPU else Device("cuda", number) for number in numbers)
    placement = Placement("by hand", blocks, places, request.budgets)
    return not _assurance(job, request).missing(places_of(job.spec, placement))


def _candidates(
    job: Job, request: PlanRequest, random: Random, limit: int, *, is_in_order: bool = False
) -> Iterator[tuple[int, ...]]:
    """Devices of all blocks, for cuts that leave no device with more weights than fit: the evenest and some others.

    A cpu takes a run of blocks too, unless weights run on GPUs alone. With `is_in_order` the GPUs are not tried in
    other orders than the given one.
    """
    left, pinned = _left(request.budgets), {}
    weights = [0] * job.profile.trace.num_blocks
    for block, size in (*job.profile.trace.weights, *job.profile.trace.buffers):
        weights[block] += size
    if request.pins:
        pinned[0] = request.pins[0].device.index or 0
    may_offload = CPU in request.budgets.devices and off_gpu(job.spec.quantization) is None
    ram = request.budgets.get(CPU) if may_offload else None
    limits = dict(enumerate(left)) | ({} if ram is None else {ON_CPU: ram})
    free = [index for index in range(len(weights)) if index not in pinned]
    orders = list(permutations(limits)) if len(set(limits.values())) > 1 and not is_in_order else [tuple(limits)]
    found: list[tuple[float, int, tuple[int, ...]]] = []
    for order in orders:
        for cut in _cuts(len(free), len(order) - 1, MAX_LOOKED_AT // factorial(len(order)), random):
            numbers = [0] * len(weights)
            for index, number in pinned.items():
                numbers[index] = number
            for number, (start, stop) in zip(order, pairwise((0, *cut, len(free))), strict=True):
                for index in free[start:stop]:
                    numbers[index] = number
            loads = _loads(job.profile, numbers, weights, limits)
            fits = all(load <= limits[number] for number, load in loads.items())
            if fits and any(number != ON_CPU for number in numbers):
                use = max(loads[number] / max(1, size) for number, size in enumerate(left))
                found.append((use, len(found), tuple(numbers)))
    found.sort()
    yield from (numbers for _, _, numbers in found[:limit])
    yield from (numbers for _, _, numbers in random.sample(found[limit:], min(limit, len(found[limit:]))))


def _loads(profile: Profile, numbers: Sequence[int], weights: Sequence[int], devices: Iterable[int]) -> dict[int, int]:
    """Bytes of weights on each device, and on a cpu what loading one after the other takes beside them."""
    loads = dict.fromkeys(devices, 0)
    for number, size in zip(numbers, weights, strict=True):
        loads[number] += size
    if ON_CPU in loads:
        sizes = zip(numbers, profile.trace.conversion_bytes, strict=True)
        loads[ON_CPU] += max((size for number, size in sizes if number == ON_CPU), default=0)
    return loads


def _cuts(num_blocks: int, num_cuts: int, limit: int, random: Random) -> Iterable[tuple[int, ...]]:
    """All ways to cut so many blocks, or so many of them drawn by lot."""
    if comb(num_blocks + num_cuts, num_cuts) <= limit:
        return combinations_with_replacement(range(num_blocks + 1), num_cuts)
    return (tuple(sorted(random.choices(range(num_blocks + 1), k=num_cuts))) for _ in range(limit))


def _in_short(numbers: Sequence[int]) -> str:
    runs = [(number, len(list(run))) for number, run in groupby(numbers)]
    return ", ".join(f"{count} on {'cpu' if number == ON_CPU else f'GPU {number}'}" for number, count in runs)


def _table(tally: Tally) -> Table:
    table = Table("what", "number", title="B: random plans for random workloads, rehearsed")
    rows: Mapping[str, int] = tally.counts
    for what, count in sorted(rows.items(), key=lambda item: -item[1]):
        table.add_row(what[:110], str(count))
    for what, errors in tally.told.items():
        span = f"{100 * min(errors):+.3f} to {100 * max(errors):+.3f} %"
        title = "highest use" if what.startswith("evenest") else "told beside rehearsed"
        table.add_row(f"{title}: {what} ({len(errors)} figures)", span)
    for kind, count in tally.broken.items():
        table.add_row(f"BROKEN: {kind}", str(count))
    return table
