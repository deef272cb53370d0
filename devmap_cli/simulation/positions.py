"""The positions that a model has, and those that a workload needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from devmap_cli.model.positions import position_limit

if TYPE_CHECKING:
    from devmap_cli.mapfile import MapWorkload

_MOST_OFFSET = 8
"""Rows that a table of positions may have beyond the positions, as OPT's has 2."""


def usual_prompt_tokens(model: Any, usual: int, max_new_tokens: int) -> int:
    """`usual`, or fewer where the model has no positions for them and `max_new_tokens` more."""
    limit = position_limit(model.config)
    if limit is None:
        return usual
    new = max_new_tokens if model.can_generate() and not model.config.is_encoder_decoder else 0
    return max(1, min(usual, limit - new))


def positions_needed(model: Any, workload: MapWorkload, *, takes_text: bool) -> int:
    """The longest sequence that `workload` makes; a prompt that is no text takes none."""
    prompt = workload.prompt_tokens if takes_text else 0
    if not model.can_generate():
        return prompt
    if model.config.is_encoder_decoder:
        return max(prompt, workload.max_new_tokens)
    return prompt + workload.max_new_tokens


def table_of_positions(model: Any, limit: int) -> str | None:
    """The module with one row for each of `limit` positions, or None."""
    from torch import nn

    tokens = model.get_input_embeddings()
    tables = (
        name for name, module in model.named_modules() if isinstance(module, nn.Embedding) and module is not tokens
    )
    sizes = ((name, model.get_submodule(name).num_embeddings) for name in tables)
    return next((name for name, size in sizes if limit <= size <= limit + _MOST_OFFSET), None)
