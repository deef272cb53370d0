"""Whether a workload is longer than the positions that a model has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from devmap_cli.checking.findings import Finding
from devmap_cli.model.positions import position_limit
from devmap_cli.simulation.positions import positions_needed, table_of_positions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from devmap_cli.mapfile import MapWorkload


def check_length(model: Any, workload: MapWorkload, *, takes_text: bool) -> Iterator[Finding]:
    """More tokens than positions: an error where they are rows of a table, a warning where they are computed.

    Args:
        model: the empty model.
        takes_text: whether the prompt is text, and not sound.
    """
    limit = position_limit(model.config)
    num_tokens = positions_needed(model, workload, takes_text=takes_text)
    if limit is None or num_tokens <= limit:
        return
    table = table_of_positions(model, limit)
    together = model.can_generate() and not model.config.is_encoder_decoder
    yield Finding(
        "too-long",
        "warning" if table is None else "error",
        table or "",
        f"{num_tokens:,} tokens are more than the {limit:,} positions that the model was made for",
        f"fewer of them: {f'--prompt-tokens and --max-new-tokens of {limit} together' if together else f'{limit}'}",
        "what it says beyond them is not to be relied on" if table is None else f"{table} has no row for the rest",
    )
