"""Bytes in and out: sizes as people write them, and bytes as people read them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

_BASES = ((1000, "B"), (1024, "iB"))
_DECIMAL = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[a-z%]*)", re.IGNORECASE)
_UNIT = re.compile(r"(?P<prefix>[KMGTP]?)(?P<binary>I?)B?", re.IGNORECASE)
MAX_BYTES = 10**18
UNITS_HELP = "units are B, KB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB, TiB (powers of 1024)"


class SizeError(ValueError):
    """A size that cannot be read; `suggestion` is a size that can, or None."""

    def __init__(self, message: str, suggestion: str | None = None) -> None:
        super().__init__(message)
        self.suggestion = suggestion


@dataclass(frozen=True, slots=True)
class Amount:
    """A size that may depend on what the device has.

    Exactly one meaning: `num_bytes` alone is that many bytes; with `all_but` it is the total less `num_bytes`;
    `percent` is a share of the total.
    """

    num_bytes: int = 0
    all_but: bool = False
    percent: Decimal | None = None

    def __str__(self) -> str:
        if self.percent is not None:
            return f"{self.percent}%"
        return f"all but {format_bytes(self.num_bytes)}" if self.all_but else format_bytes(self.num_bytes)

    @property
    def is_relative(self) -> bool:
        """Whether the device's total must be known."""
        return self.all_but or self.percent is not None

    def of(self, total_bytes: int) -> int:
        """The amount in bytes on a device that has `total_bytes`; never below zero."""
        if self.percent is not None:
            return int(self.percent * total_bytes / 100)
        return max(0, total_bytes - self.num_bytes) if self.all_but else self.num_bytes


def parse_size(text: str) -> int:
    """Read an absolute size such as `10GB`, `1.5GiB`, `10Gi` or `512MiB`, in bytes; any case, never bits.

    Raises:
        SizeError: no number, no unit or an unknown unit.
    """
    amount = parse_amount(text)
    if amount.is_relative:
        raise SizeError(f"{text!r} is not a plain size")
    return amount.num_bytes


def parse_amount(text: str) -> Amount:
    """Read a size, a share (`80%`) or a remainder (`-2GiB`: all but 2 GiB).

    Raises:
        SizeError: no number, no unit or an unknown unit.
    """
    text = text.strip()
    all_but = text.startswith("-")
    match = _SIZE.fullmatch(text.removeprefix("-").strip())
    if match is None:
        raise SizeError(f"{text!r} is not a size" if text else "the size is missing", "10GB")
    number, unit = Decimal(match["number"]), match["unit"]
    if unit == "%":
        if all_but or number > 100:
            raise SizeError(f"{text!r} is not a share between 0% and 100%", "80%")
        return Amount(percent=number)
    if not unit and number:
        raise SizeError(f"{text!r} has no unit", f"{text}GB")
    scale = _unit_bytes(text, unit)
    if number > MAX_BYTES // scale:
        raise SizeError(f"{text[:40]!r} is more than any device has", "10GB")
    return Amount(int(number * scale), all_but)


def _unit_bytes(text: str, unit: str) -> int:
    match = _UNIT.fullmatch(unit)
    if match is None or (match["binary"] and not match["prefix"]):
        raise SizeError(f"unknown unit {unit!r} in {text!r}", text.removesuffix(unit).strip() + "GB")
    return int((1024 if match["binary"] else 1000) ** _DECIMAL[match["prefix"].upper()])


def format_bytes(num_bytes: int) -> str:
    """Bytes for people, in binary units: `444.6 MiB`, `15.2 GiB`, `512 B`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    if unit == "B":
        return f"{num_bytes} B"
    return f"{size:.2f} {unit}" if unit in ("GiB", "TiB") and abs(size) < 10 else f"{size:.1f} {unit}"


def exact_bytes(num_bytes: int) -> str:
    """Bytes as options take them, to the byte, in the largest unit that divides them: `10GB`, `24GiB`, `1000001B`."""
    prefixes = {prefix: power for prefix, power in _DECIMAL.items() if power}
    units = {base**power: prefix + end for base, end in _BASES for prefix, power in prefixes.items()}
    size = max((size for size in units if num_bytes and num_bytes % size == 0), default=1)
    return f"{num_bytes // size}{units.get(size, 'B')}"


def format_count(count: int) -> str:
    """A count for people: `7.62 B`, `494.0 M`, `1,536`."""
    for power, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if abs(count) >= power:
            return f"{count / power:.2f} {letter}"
    return f"{count:,}"


def format_seconds(seconds: float) -> str:
    """Seconds for people: `85 ms`, `2.31 s`, `3 min 20 s`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.2f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"
