"""The table of cards: what a card has and can do by its makers' documents, and the `--gpus` grammar.

The table is cards.tsv, one card a line; an empty cell is a figure that is not stated, or that the hardware lacks.

- `vendor` decides the kind of device; `gpus` is how many devices of this kind one card shows itself as (the A16 has
  four GPUs, the MI250X two), and every other figure is that of one of them.
- `usable_gib` is a number where the total that torch reports (`cudaMemGetInfo`, less than the label because of the
  driver, the firmware and ECC) is publicly known from listings and out-of-memory reports: the smallest found, for this
  card or another with the same memory and architecture, its ECC as it is delivered: workstation cards lose 1/16 where
  it is switched on. Elsewhere it names a rule of `_usable_gib`.
- `fp32` … `fp8` are peak TFLOP/s (TOP/s for int8) without sparsity; for matrix products where the card has units for
  them, with FP32 accumulation, as torch multiplies. GeForce cards do that at half the rate that is advertised. Pascal
  cards but the P100 have fp16 only at 1/64 of fp32, and multiply it as fp32: no figure. Laptop cards have none, because
  their power limits, and so their clocks, are up to the laptop's maker.
- `bandwidth_gb_s` and `link_gb_s` are 10⁹ bytes/s; the latter is NVLink or Infinity Fabric, both directions and all
  links together, as vendors state it. `pcie` is GENERATIONxLANES.
- `source` names the vendor's document.
"""

from __future__ import annotations

import csv
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Final

from devmap_cli.devices.card_names import CardName, likeness, readings
from devmap_cli.devices.device import Device
from devmap_cli.errors import RequestError

GIB: Final = 1 << 30
MAX_GPUS: Final = 1024
"""The most devices that one `--gpus` may name; more is taken for a slip of the finger."""

_KINDS: Final = {"NVIDIA": "cuda", "AMD": "cuda", "Intel": "xpu", "Huawei": "npu", "Apple": "mps"}
_PCIE_LANE_BYTES_PER_SECOND: Final = {3: 8e9 / 8 * 128 / 130, 4: 16e9 / 8 * 128 / 130, 5: 32e9 / 8 * 128 / 130}
_DTYPE_COLUMNS: Final = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int8": "int8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}
_MEMORY_BONUS: Final = 0.4
"""What the memory asked for adds to the likeness of a card's name."""
_LEAST_LIKENESS: Final = 0.65
_LEAST_OF_BEST: Final = 0.6
"""What is less like a name than this share of the likeliest is not named."""
_MOST_CLOSE: Final = 4
_COUNT_FIRST = re.compile(r"(\d{1,4})(?:\s*[x*]\s*|\s+)(.+)", re.IGNORECASE)
_COUNT_LAST = re.compile(r"(.+?)\s*[x*]\s*(\d{1,4})", re.IGNORECASE)


def _usable_gib(rule: str, label_gib: int) -> float:
    """What is usable of a label where no figure is known: a little less than any published one of the family.

    NVIDIA: published totals lie up to 0.66 GiB below the label with GDDR memory; ECC in GDDR takes 1/16 before that;
    with HBM they lie up to 1.5 % below. AMD reports all but 16 MiB, 0.13 GiB (RDNA 4) or 0.31 GiB (CDNA 3 and 4).
    Intel's Arc A770 reports 94.4 %, Huawei's 910B 92.2 % (HBM) and 310P 90.1 % (LPDDR4X). Apple's Metal recommends a
    working set of two thirds of the memory up to 32 GB, and of three quarters above. Of what a GPU shares with its
    CPU, a Jetson Orin shows 95 % (61.4 GiB of 64), and the firmware of a Ryzen AI Max gives three quarters at most.
    """
    usable = {
        "gddr": label_gib - 0.7,
        "gddr-ecc": label_gib * 15 / 16 - 0.7,
        "hbm": label_gib * 0.98,
        "radeon": label_gib - 0.02,
        "rdna4": label_gib - 0.15,
        "cdna3": label_gib - 0.32,
        "arc": label_gib * 0.94,
        "ascend": label_gib * 0.92,
        "ascend-lpddr": label_gib * 0.875,
        "strix": label_gib * 3 / 4,
        "jetson": label_gib * 0.93,
        "metal": label_gib * (2 / 3 if label_gib <= 32 else 3 / 4),
    }
    return usable[rule]


@dataclass(frozen=True, slots=True)
class Card:
    """One device of a card (most cards are one), as its vendor states it; None is a figure not stated or not had.

    Args:
        kind: of device: "cuda" (also AMD's under ROCm), "xpu", "npu" or "mps".
        num_gpus: devices that one card shows itself as.
        label_bytes: memory by the label, in GiB as it is counted there.
        usable_bytes: what a process can get at most.
        usable_is_published: whether `usable_bytes` is a published total rather than a family's rule.
        bandwidth_bytes_per_second: of its memory.
        tflops: peak 10¹² operations per second by column of the table (`fp32`, `fp16`, `bf16`, `int8`, `fp8`).
        pcie: generation and lanes.
        link_bytes_per_second: to others of its kind beside PCIe, both directions and all links together.
        compute_capability: NVIDIA's, (major, minor).
        source: the vendor's document.
    """

    name: str
    aliases: tuple[str, ...]
    vendor: str
    num_gpus: int
    label_bytes: int
    usable_bytes: int
    usable_is_published: bool
    bandwidth_bytes_per_second: float
    tflops: tuple[tuple[str, float], ...]
    pcie: tuple[int, int] | None
    link_bytes_per_second: float | None
    compute_capability: tuple[int, int] | None
    source: str

    @property
    def kind(self) -> str:
        """The kind of device that torch shows it as."""
        return _KINDS[self.vendor]

    @property
    def pcie_bytes_per_second(self) -> float | None:
        """PCIe's bytes per second in one direction, line code taken off and protocol not."""
        return None if self.pcie is None else _PCIE_LANE_BYTES_PER_SECOND[self.pcie[0]] * self.pcie[1]

    def peak_flops(self, dtype: str) -> float | None:
        """Peak operations per second of matrix products in `dtype`, torch's name of it; None where not stated.

        A type that the hardware lacks is converted: bfloat16, float16 and float8 run as the next wider type it has.
        """
        wider = {"fp8": ("fp8", "bf16", "fp16", "fp32"), "bf16": ("bf16", "fp32"), "fp16": ("fp16", "fp32")}
        column = _DTYPE_COLUMNS[dtype]
        known = dict(self.tflops)
        found = next((known[name] for name in wider.get(column, (column,)) if name in known), None)
        return None if found is None else found * 1e12


@lru_cache(maxsize=1)
def cards() -> tuple[Card, ...]:
    """All cards, in the table's order."""
    text = Path(__file__).with_name("cards.tsv").read_text(encoding="utf-8")
    return tuple(_card(row) for row in csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))


def _card(row: Mapping[str, str]) -> Card:
    label_gib, usable = int(row["memory_gib"]), row["usable_gib"]
    is_published = usable[0].isdigit()
    generation, _, lanes = row["pcie"].partition("x")
    major, _, minor = row["compute"].partition(".")
    return Card(
        name=row["name"],
        aliases=tuple(filter(None, row["aliases"].split(", "))),
        vendor=row["vendor"],
        num_gpus=int(row["gpus"]),
        label_bytes=label_gib * GIB,
        usable_bytes=int(GIB * (float(usable) if is_published else _usable_gib(usable, label_gib))),
        usable_is_published=is_published,
        bandwidth_bytes_per_second=float(row["bandwidth_gb_s"]) * 1e9,
        tflops=tuple((name, float(row[name])) for name in ("fp32", "fp16", "bf16", "int8", "fp8") if row[name]),
        pcie=(int(generation), int(lanes)) if lanes else None,
        link_bytes_per_second=float(row["link_gb_s"]) * 1e9 if row["link_gb_s"] else None,
        compute_capability=(int(major), int(minor)) if minor else None,
        source=row["source"],
    )


def cards_named(name: str) -> tuple[Card, ...]:
    """The cards that a name can mean, as people or drivers write it: none, one, or several where it leaves it open.

    Case, spaces, dashes, vendors' and brands' names do not matter, `RTX`, `GTX` and `RX` may be left out, and memory
    is needed only where cards of one name differ in it, and not for what is the whole name of one. A name that leaves
    only the form open means SXM.
    """
    found = (_meant(reading) for reading in readings(name))
    return next(filter(None, found), ())


def _meant(asked: CardName) -> tuple[Card, ...]:
    """The cards of the name that was read, with the memory and of the makers that it states."""
    by_key, whole_names = _by_key(), _by_whole_name()
    entries: Mapping[Card, set[int]] = next((by_key[key] for key in asked.keys if key in by_key), {})
    whole = next((whole_names[key] for key in asked.keys if key in whole_names), None)
    if asked.memory_gib is None and whole is not None:
        entries = {whole: set()}
    return tuple(
        card
        for card, sizes in entries.items()
        if (asked.memory_gib is None or asked.memory_gib in sizes) and asked.vendors <= {card.vendor}
    )


@lru_cache(maxsize=1)
def _by_key() -> Mapping[str, Mapping[Card, set[int]]]:
    """Cards by each key of their names, words in order or not, and the GiB of memory that those names state."""
    found: dict[str, dict[Card, set[int]]] = {}
    for card, name in _names():
        label_gib = card.label_bytes // GIB
        sizes = {label_gib, label_gib * card.num_gpus} | ({name.memory_gib} if name.memory_gib else set())
        for key in name.keys:
            found.setdefault(key, {}).setdefault(card, set()).update(sizes)
    return found


@lru_cache(maxsize=1)
def _by_whole_name() -> Mapping[str, Card]:
    """Cards whose own names state no memory, by the keys of those."""
    names = ((card, next(readings(card.name))) for card in cards())
    return {key: card for card, name in names if name.memory_gib is None for key in name.keys}


@lru_cache(maxsize=1)
def _names() -> tuple[tuple[Card, CardName], ...]:
    """The names and aliases of all cards, as they are read."""
    return tuple((card, next(readings(name))) for card in cards() for name in (card.name, *card.aliases))


def parse_gpus(text: str, option: str = "--gpus") -> dict[Device, Card]:
    """Read `2xT4,1xA10`: items COUNTxCARD or CARD, each device numbered in the order given.

    Args:
        option: what to call it in errors.

    Raises:
        RequestError: naming the very item that is wrong, with cards that could be meant.
    """
    items = [item.strip() for item in text.split(",")]
    found: list[Card] = []
    for position, item in enumerate(items):

        def corrected(replacement: str, position: int = position) -> str:
            return f"{option} '{','.join([*items[:position], replacement, *items[position + 1 :]])}'"

        if not item:
            example = ",".join(filter(None, items)) or "2xT4,1xA10"
            raise RequestError(f"{option}: an item is empty in {text!r}", f"{option} '{example}'")
        count, name = _count_and_name(item)
        card = _the_card(name, f"{count}x" if count > 1 else "", option, corrected)
        if not 0 < count * card.num_gpus <= MAX_GPUS - len(found):
            raise RequestError(
                f"{option}: {item!r} asks for {count} cards; from 1 to {MAX_GPUS} devices can be planned for",
                f"for example {corrected(f'2x{card.name}')}",
            )
        found += [card] * (count * card.num_gpus)
    _check_together(found, option)
    is_single = found[0].kind == "mps"
    return {Device(card.kind, None if is_single else index): card for index, card in enumerate(found)}


def gpus_option(cards: Iterable[Card]) -> str:
    """What `--gpus` takes for these devices, in this order."""
    runs = [(card, sum(1 for _ in run)) for card, run in groupby(cards)]
    counts = [(card.name, num_devices // card.num_gpus) for card, num_devices in runs]
    return ",".join(f"{count}x{name}" if count > 1 else name for name, count in counts)


def _count_and_name(item: str) -> tuple[int, str]:
    """Split `2xT4`, `2 × T4`, `2 T4` or `T4x2`; a name with an x of its own, such as `7900xtx`, stays whole."""
    text = unicodedata.normalize("NFKC", item).replace("×", "x")
    if cards_named(text):
        return 1, item
    first, last = _COUNT_FIRST.fullmatch(text), _COUNT_LAST.fullmatch(text)
    if last and cards_named(last[1]):
        return int(last[2]), last[1]
    if first and (len(first[1]) < 4 or cards_named(first[2])):
        return int(first[1]), first[2]
    return 1, item


def _the_card(name: str, count: str, option: str, corrected: Callable[[str], str]) -> Card:
    """The one card that `name` means; `count` precedes it in what `corrected` suggests instead."""
    found = cards_named(name)
    if len(found) == 1:
        return found[0]
    if found:
        names = [card.name for card in found]
        raise RequestError(
            f"{option}: {name!r} can be {', '.join(names[:-1])} or {names[-1]}",
            f"for example {corrected(count + names[0])}",
        )
    close = [card.name for card in _close(name)]
    own_budget = "for a card that is not in the table give its memory: --max-memory '0:24GB'"
    if not close:
        raise RequestError(f"{option}: no card is called {name!r}", own_budget)
    more = f"; also close: {', '.join(close[1:])}" if close[1:] else ""
    raise RequestError(
        f"{option}: no card is called {name!r}", f"did you mean {corrected(count + close[0])}{more}; {own_budget}"
    )


def _close(name: str) -> tuple[Card, ...]:
    """Cards of similar names, the likeliest first: those of the makers that it states, and rather with its memory."""
    labels = {card.label_bytes // GIB for card in cards()}
    asked = next((reading for reading in readings(name) if reading.memory_gib in labels), next(readings(name)))
    scores: dict[Card, float] = {}
    for card, known in _names():
        if asked.vendors <= {card.vendor}:
            score = likeness(asked, known) + _MEMORY_BONUS * (asked.memory_gib == card.label_bytes // GIB)
            scores[card] = max(score, scores.get(card, 0.0))
    least = max(_LEAST_LIKENESS, _LEAST_OF_BEST * max(scores.values(), default=0.0))
    likely = sorted((card for card, score in scores.items() if score >= least), key=lambda card: -scores[card])
    return tuple(likely[:_MOST_CLOSE])


def _check_together(found: Iterable[Card], option: str) -> None:
    """Refuse what no one process can use together."""
    by_vendor = {card.vendor: card for card in found}
    if len(by_vendor) > 1:
        one, other, *_ = by_vendor.values()
        raise RequestError(
            f"{option}: {one.name} and {other.name} cannot be used together: torch is built for {one.vendor}'s or "
            f"{other.vendor}'s devices",
            f"plan for one of them, for example {option} '2x{one.name}'",
        )
    apple = [card for card in found if card.kind == "mps"]
    if len(apple) > 1:
        raise RequestError(
            f"{option}: a Mac has one GPU, {len(apple)} are given", f"for example {option} '{apple[0].name}'"
        )
