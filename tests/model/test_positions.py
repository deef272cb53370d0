"""How long a sequence a model was made for, by the names that configs have for it."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from devmap_cli.model.positions import position_limit


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("qwen2", {"max_position_embeddings": 300}, 300),
        ("gpt2", {"n_positions": 64}, 64),
        ("whisper", {"max_target_positions": 20}, 20),
        ("mpt", {"max_seq_len": 77}, 77),
    ],
)
def test_the_limit_of_a_config(model_type: str, settings: dict[str, Any], expected: int) -> None:
    assert position_limit(AutoConfig.for_model(model_type, **settings)) == expected
