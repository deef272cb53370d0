"""The inverse questions: the largest that fits, the smallest that suffices, and the fewest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from devmap_cli.devices.device import Device
from devmap_cli.planning.nouns import Infeasible, Placement

_MAX_GUESSES = 20
_STEPS = 256
"""Large answers are found to one part in so many, rounded to a power of two."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The answer to "how much fits": `placement` holds `value`; `refusal` is why not `next_value`, None at the end."""

    value: int
    placement: Placement
    next_value: int | None = None
    refusal: Infeasible | None = None


def largest(
    attempt: Callable[[int], Placement | Infeasible],
    first: int,
    limit: int,
    foresee: Callable[[Sequence[int]], int | None] = lambda _known: None,
) -> Largest | Infeasible:
    """The largest value from 1 to `limit` that fits, found by way of `first` and of what is free or missing.

    It is exact below 512 and where it is foreseen, else to one part in 256: `value` and `next_value` were both
    attempted.

    Args:
        attempt: plans for a value, each once; what doesn't fit must not fit with a larger one either.
        foresee: guesses the largest that fits from a value that does and one that does not, and from a third if there
            is one; None where it cannot.
    """
    fits: dict[int, Placement] = {}
    refused: dict[int, Infeasible] = {}
    value, streak, guesses, misses = min(max(1, first), limit), 0, 0, 0
    while True:
        answer = attempt(value)
        if isinstance(answer, Infeasible):
            refused[value], streak = answer, min(streak, 0) - 1
        else:
            fits[value], streak = answer, max(streak, 0) + 1
        low, high = max(fits, default=0), min(refused, default=limit + 1)
        if not fits and high == 1:
            return refused[1]
        if fits and high - low == 1:
            break
        guess = None
        if fits and refused and refused[high].missing_bytes and guesses < _MAX_GUESSES:
            others = {*fits, *(value for value in refused if refused[value].missing_bytes)} - {low, high}
            guess = foresee([low, high, *_beside(others, low, high)])
        if guess is not None:
            guesses, misses = guesses + 1, 0 if low < guess < high else misses + 1
            value = _near(guess, low, high, misses)
        elif fits and refused and high - low <= _fineness(high):
            break
        else:
            value = _next(fits, refused, limit, streak)
    return Largest(low, fits[low], high if refused else None, refused.get(high))


def _near(guess: int, low: int, high: int, misses: int) -> int:
    """The value to attempt for a guess: where it is `low`, one above, and further off the more often it was no news."""
    if low < guess < high:
        return guess
    far = min(1 << misses - 1, (high - low) // 2)
    return low + far if guess <= low else high - far


def _next(fits: Mapping[int, Placement], refused: Mapping[int, Infeasible], limit: int, streak: int) -> int:
    """The value to attempt next, between the largest that fits and the smallest that does not.

    Args:
        streak: how many of the last attempts in a row fitted, or did not (then below 0): with each of them the next one
            is further off, for where margins mislead.
    """
    if not fits:
        return 1
    low, high = max(fits), min(refused, default=limit + 1)
    if not refused:
        return min(limit, low + _stride(fits))
    step = _fineness(high)
    if high - low <= 2 * step or not refused[high].missing_bytes:
        return (low + high) // 2
    margins = {value: _free(answer) for value, answer in fits.items()}
    margins |= {value: -answer.missing_bytes for value, answer in refused.items() if answer.missing_bytes}
    guess = _root(margins, low, high) // step * step
    far = min(step << max(0, abs(streak) - 1), (high - low) // 2)
    guess = max(guess, low + far) if streak > 0 else min(guess, high - far)
    return min(max(guess, low + step), high - step)


def _stride(fits: Mapping[int, Placement]) -> int:
    """How far up to go where all fits so far: by what a value takes more than a smaller one, further with each try."""
    low = max(fits)
    free = _free_from_afar(fits[low])
    below = max((value for value in fits if value < low), default=0)
    taken = _free_from_afar(fits[below]) - free if below else _growing(fits[low])
    stride = free * (low - below) // taken if taken > 0 else low
    return max(1, stride, low // _STEPS) << max(0, len(fits) - 2)


def _free(placement: Placement) -> int:
    """What allocators leave free on the fullest device that computes, in bytes."""
    device = _fullest(placement)
    return placement.budgets.get(device) - placement.memory(device).peak_bytes


def _free_from_afar(placement: Placement) -> int:
    """The same with half of what they lose to holes: they lose less when memory runs short."""
    device = _fullest(placement)
    added_up = placement.budgets.get(device) - placement.memory(device, held_only=True).peak_bytes
    return (_free(placement) + added_up) // 2


def _growing(placement: Placement) -> int:
    """What the fullest device takes for the workload, in bytes."""
    memory = placement.memory(_fullest(placement), held_only=True)
    return memory.kv_cache_bytes + memory.activation_bytes


def _fullest(placement: Placement) -> Device:
    devices = [device for device in placement.used_devices if device.is_accelerator] or [placement.main_device]
    return max(
        devices, key=lambda item: placement.memory(item, held_only=True).peak_bytes - placement.budgets.get(item)
    )


def _root(margins: Mapping[int, int], low: int, high: int) -> int:
    """Where the curve through `low`, `high` and a value that is next to them, but not close, changes its sign."""
    apart = [value for value in margins if 4 * min(abs(value - low), abs(value - high)) >= high - low]
    known = [low, high, *_beside(apart, low, high)]

    def is_negative(value: int) -> bool:
        return sum(share * margins[at] for share, at in zip(shares(known, value), known, strict=True)) < 0

    return smallest(is_negative, low, high) - 1


def _beside(values: Iterable[int], low: int, high: int) -> list[int]:
    """The one of `values` that is next to `low` and `high`; none if there is none."""
    return sorted(values, key=lambda value: min(abs(value - low), abs(value - high)))[:1]


def shares(known: Sequence[int], value: int) -> list[float]:
    """How much what is at each of `known` counts in the polynomial through them at `value`, as Lagrange writes it."""
    return [math.prod((value - other) / (at - other) for other in known if other != at) for at in known]


def _fineness(value: int) -> int:
    return 1 << max(0, (value // _STEPS).bit_length() - 1)


def smallest(suffices: Callable[[int], bool], low: int, high: int, step: int = 1) -> int:
    """The smallest value above `low` that suffices, to within `step`, where `high` does and `low` does not."""
    while high - low > step:
        middle = (low + high) // 2
        if suffices(middle):
            high = middle
        else:
            low = middle
    return high


def fewest(attempt: Callable[[int], Placement | Infeasible], limit: int) -> tuple[int, Placement] | Infeasible:
    """The smallest number up to `limit` that suffices, with its placement, else the answer for `limit`.

    Args:
        attempt: plans with so many; what suffices must suffice with more too.
    """
    answers: dict[int, Placement | Infeasible] = {}

    def suffices(number: int) -> bool:
        answers[number] = attempt(number)
        return isinstance(answers[number], Placement)

    enough = 1
    while not suffices(enough) and enough < limit:
        enough = min(2 * enough, limit)
    if not isinstance(answers[enough], Infeasible):
        enough = smallest(suffices, enough // 2, enough)
    answer = answers[enough]
    return answer if isinstance(answer, Infeasible) else (enough, answer)
