"""How long a sequence a model was made for."""

from __future__ import annotations

from typing import Any

_LIMITS = ("max_position_embeddings", "max_target_positions", "max_seq_len")


def position_limit(config: Any) -> int | None:
    """The number of positions that the model of `config` was made for; None where it states none."""
    text = config.get_text_config(decoder=True)
    limits = (getattr(text, name, None) for name in _LIMITS)
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
