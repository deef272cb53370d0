"""Pins: what the user has decided, as `pattern=device`, and the blocks that it fixes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path

from devmap_cli.devices.device import DEVICES_HINT, Device, DeviceError
from devmap_cli.errors import RequestError
from devmap_cli.model.names import is_ancestor
from devmap_cli.model.old_names import candidates
from devmap_cli.model.spec import ModelSpec
from devmap_cli.planning.nouns import Block

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_RANGE_IN_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MAX_RANGE = 100_000
_PIN_HINT = "--pin 'model.visual=0'"


@dataclass(frozen=True, slots=True)
class Pin:
    """All blocks at or below the modules that match `pattern` go to `device`.

    In a pattern, `*` and `?` match inside one name, `**` also across dots, `{0..9}` and `{a,b}` are
    alternatives. `origin` is the option or file that it comes from: a later origin wins over an earlier one.
    """

    pattern: str
    device: Device
    origin: str = "--pin"

    def __str__(self) -> str:
        return f"{self.pattern}={self.device.map_value}"


def parse_pin(text: str, origin: str = "--pin") -> Pin:
    """Read `model.visual=0`.

    Raises:
        RequestError: not PATTERN=DEVICE, no such device, or braces that can't be read.
    """
    pattern, equals, name = (part.strip() for part in text.rpartition("="))
    if not equals or not pattern or not name:
        raise RequestError(f"{origin}: {text!r} is not MODULE=DEVICE", _PIN_HINT)
    pin = Pin(pattern, _device(name, f"{origin}: in {text!r}"), origin)
    _regex(pin)
    return pin


def load_rules(path: Path) -> tuple[Pin, ...]:
    """Read pins from a text file: one `pattern=device` per line, `#` begins a comment.

    Raises:
        RequestError: the file can't be read, or a line is no pin.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise RequestError(f"cannot read rules {path}: {reason}", "one MODULE=DEVICE per line") from None
    pins = []
    for number, line in enumerate(lines, start=1):
        if text := line.partition("#")[0].strip():
            pins.append(replace(parse_pin(text, f"{path}:{number}"), origin=str(path)))
    return tuple(pins)


def parse_weights(texts: Iterable[str], option: str = "--weight") -> dict[Device, Fraction]:
    """Read `0=0.5` or `0=0.5,1=2`: what an accelerator counts for where uses are compared.

    Raises:
        RequestError: not DEVICE=NUMBER, a number not above 0, or a device named twice.
    """
    weights: dict[Device, Fraction] = {}
    for item in (item.strip() for text in texts for item in text.split(",")):
        name, _, number = item.partition("=")
        try:
            weight = Decimal(number.strip())
        except InvalidOperation:
            raise RequestError(f"{option}: {item!r} is not DEVICE=NUMBER", f"{option} 0=0.5") from None
        device = _device(name, f"{option}: in {item!r}")
        if not weight.is_finite() or weight <= 0:
            raise RequestError(f"{option}: in {item!r}: a weight is a finite number above 0", f"{option} {name}=0.5")
        if device in weights:
            raise RequestError(f"{option}: {item!r} names {device} a second time", "give each device once")
        weights[device] = Fraction(weight)
    return weights


def _device(name: str, where: str) -> Device:
    try:
        return Device.parse(name)
    except DeviceError as error:
        raise RequestError(f"{where}: {error}", DEVICES_HINT) from None


def apply_pins(blocks: Sequence[Block], pins: Sequence[Pin], spec: ModelSpec) -> tuple[Block, ...]:
    """Fix the blocks that pins name; of pins from different origins the later wins.

    Raises:
        RequestError: a pattern matches nothing, only what is inside a block, or two of one origin disagree.
    """
    names = _names(spec)
    block_of = {fqn: index for index, block in enumerate(blocks) for fqn in block.fqns}
    pinned_by: dict[int, Pin] = {}
    for pin in todays_pins(pins, spec):
        for index in _pinned_blocks(pin, names, block_of):
            earlier = pinned_by.get(index)
            if earlier is not None and earlier.origin == pin.origin and earlier.device != pin.device:
                raise _conflict(earlier, pin, blocks[index])
            pinned_by[index] = pin
    return tuple(
        replace(block, fixed=pinned_by[index].device) if index in pinned_by else block
        for index, block in enumerate(blocks)
    )


def todays_pins(pins: Sequence[Pin], spec: ModelSpec) -> tuple[Pin, ...]:
    """The same pins, those with names of an older transformers in the names of the installed one."""
    names = _names(spec) if pins else []

    def matches(pin: Pin) -> bool:
        regex = _regex(pin)
        return any(regex.fullmatch(name) for name in names)

    def todays(pin: Pin) -> Pin:
        if matches(pin):
            return pin
        renamed = (replace(pin, pattern=pattern) for pattern in candidates(pin.pattern, spec.renamings))
        return next(filter(matches, renamed), pin)

    return tuple(map(todays, pins))


def _names(spec: ModelSpec) -> list[str]:
    return [name for name, _ in spec.modules() if name] + [name for name, _ in spec.tensors()]


def _pinned_blocks(pin: Pin, names: Sequence[str], block_of: Mapping[str, int]) -> list[int]:
    """Indices of the blocks at or below what a pin matches."""
    _check_range(pin, names)
    regex = _regex(pin)
    matched = {name for name in names if regex.fullmatch(name)}
    pinned = {index for fqn, index in block_of.items() if any(name in matched for name in _ancestry(fqn))}
    if pinned:
        return sorted(pinned)
    inside = next((name for name in names if name in matched), None)
    block = inside and next((fqn for fqn in block_of if is_ancestor(fqn, inside)), None)
    if block:
        raise RequestError(
            f"{pin.origin}: {pin.pattern} is inside {block}, which is never split",
            f"pin the whole of it: --pin '{block}={pin.device.map_value}'",
        )
    if inside:
        raise RequestError(f"{pin.origin}: {pin.pattern} holds no weights", f"modules: {_some(block_of)}")
    places = sorted({place for fqn in block_of for place in _ancestry(fqn)})
    near = difflib.get_close_matches(pin.pattern, places, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"modules: {_some(places)}"
    raise RequestError(f"{pin.origin}: {pin.pattern} matches no module", hint)


def _check_range(pin: Pin, names: Sequence[str]) -> None:
    """See that a range such as `{0..9}` does not reach beyond the modules that there are."""
    braces = _RANGE_IN_BRACES.search(pin.pattern)
    if braces is None or not any(_regex(pin).fullmatch(name) for name in names):
        return
    before, after = pin.pattern[: braces.start()], pin.pattern[braces.end() :]
    for number in braces.groups():
        end = replace(pin, pattern=before + number + after)
        if not any(_regex(end).fullmatch(name) for name in names):
            raise RequestError(f"{pin.origin}: in {pin.pattern}, {end.pattern} matches no module", "narrow the range")


def _ancestry(fqn: str) -> list[str]:
    """`fqn` and what contains it, without the root."""
    parts = fqn.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:6]) + (", …" if len(listed) > 6 else "")


def _conflict(earlier: Pin, later: Pin, block: Block) -> RequestError:
    shared = f", with which {block.fqns[1]} shares weights" if len(block.fqns) > 1 else ""
    return RequestError(
        f"{later.origin}: {earlier} and {later} disagree about {block.fqns[0]}{shared}",
        f"leave out one of them: --pin '{earlier}' or --pin '{later}'",
    )


def _regex(pin: Pin) -> re.Pattern[str]:
    """A pattern as a regular expression over fully qualified names."""
    pieces = []
    for index, piece in enumerate(_BRACES.split(pin.pattern)):
        pieces.append(_alternatives(pin, piece) if index % 2 else _glob(pin, piece))
    return re.compile("".join(pieces))


def _alternatives(pin: Pin, text: str) -> str:
    """The inside of braces: `0..9` or `a,b`, also mixed."""
    choices: list[str] = []
    for choice in text.split(","):
        match = _RANGE.fullmatch(choice.strip())
        if match is None:
            choices.append(_glob(pin, choice.strip()))
            continue
        first, last = int(match[1]), int(match[2])
        if not first <= last < first + _MAX_RANGE:
            raise RequestError(f"{pin.origin}: {{{text}}} in {pin.pattern} is no rising range", "{0..9}")
        choices.extend(str(number) for number in range(first, last + 1))
    return f"(?:{'|'.join(choices)})"


def _glob(pin: Pin, text: str) -> str:
    if "{" in text or "}" in text:
        raise RequestError(f"{pin.origin}: braces in {pin.pattern} don't match", "{0..9} or {a,b}")
    if "[" in text or "]" in text:
        raise RequestError(f"{pin.origin}: […] in {pin.pattern} is not understood", "ranges are written {0..3}")
    parts = re.split(r"(\*\*|\*|\?)", text)
    wildcards = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    return "".join(wildcards.get(part, re.escape(part)) for part in parts)
