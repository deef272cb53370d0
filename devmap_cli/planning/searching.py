"""The inverse questions: the largest that fits, and the fewest that suffice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from devmap_cli.planning.nouns import Infeasible, Placement

_STEPS = 256
"""Large answers are found to one part in so many, rounded to a power of two."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The answer to "how much fits": `placement` holds `value`; `refusal` is why not `next_value`, None at the end."""

    value: int
    placement: Placement
    next_value: int | None = None
    refusal: Infeasible | None = None


def largest(attempt: Callable[[int], Placement | Infeasible], first: int, limit: int) -> Largest | Infeasible:
    """The largest value up to `limit` that fits, going up from 1 by way of `first`; exact below 512.

    Args:
        attempt: plans for a value; what doesn't fit must not fit with a larger one either.
    """
    low, found = 1, attempt(1)
    if isinstance(found, Infeasible):
        return found
    placement, high = found, min(max(2, first), limit)
    refusal: Infeasible | None = None
    while low < limit:
        answer = attempt(high)
        if isinstance(answer, Infeasible):
            refusal = answer
            break
        low, placement, high = high, answer, min(2 * high, limit)
    while refusal is not None and high - low > _fineness(high):
        middle = (low + high) // 2 // _fineness(high) * _fineness(high)
        middle = middle if low < middle < high else (low + high) // 2
        answer = attempt(middle)
        if isinstance(answer, Infeasible):
            high, refusal = middle, answer
        else:
            low, placement = middle, answer
    return Largest(low, placement, None if refusal is None else high, refusal)


def _fineness(value: int) -> int:
    return 1 << max(0, (value // _STEPS).bit_length() - 1)


def fewest(attempt: Callable[[int], Placement | Infeasible], limit: int) -> tuple[int, Placement] | Infeasible:
    """The smallest number up to `limit` that suffices, with its placement, else the answer for `limit`.

    Args:
        attempt: plans with so many; what suffices must suffice with more too.
    """
    enough, answer = 1, attempt(1)
    while isinstance(answer, Infeasible):
        if enough == limit:
            return answer
        enough = min(2 * enough, limit)
        answer = attempt(enough)
    placement, low = answer, enough // 2
    while low + 1 < enough:
        middle = (low + enough) // 2
        tried = attempt(middle)
        if isinstance(tried, Infeasible):
            low = middle
        else:
            enough, placement = middle, tried
    return enough, placement
