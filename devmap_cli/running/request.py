"""What a run is asked to do, and whom it tells how it goes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from devmap_cli.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One prompt to generate from.

    Args:
        prompt: the text, given to the model `batch_size` times over.
        raw: without the tokenizer's chat template.
        max_new_tokens: where to stop at the latest; None takes the map's, else 256.
        temperature: 0 always takes the likeliest token; above, tokens are drawn.
        seed: makes drawn tokens repeatable; None leaves torch's random state as it is.
        batch_size: how many sequences to generate at once.
        attention: transformers' name of an attention implementation; None takes the map's.
        kv_dtype: what the KV cache is kept in, one of `KV_DTYPES`; None takes the map's.
        offload_folder: where offloaded weights are kept, and stay; None uses a temporary folder.
        trust_remote_code: run the model code of the model's own repository.

    Raises:
        RequestError: a value that no run can have.
    """

    prompt: str
    raw: bool = False
    max_new_tokens: int | None = None
    temperature: float = 0.0
    seed: int | None = None
    batch_size: int = 1
    attention: str | None = None
    kv_dtype: str | None = None
    offload_folder: Path | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise RequestError("the prompt is empty", "--prompt 'What is the capital of France?'")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise RequestError("--max-new-tokens is below 1", "--max-new-tokens 256")
        if self.batch_size < 1:
            raise RequestError("--batch-size is below 1", "--batch-size 1")
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise RequestError("--temperature is not a number from 0 up", "--temperature 0.7")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a long step is: `done` of `total` (0 where unknown) of what `step` says."""

    step: str
    done: int
    total: int


def _ignore(_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Listener:
    """Whom a run tells how it goes, as it goes; silent by default."""

    on_text: Callable[[str], None] = _ignore
    on_progress: Callable[[Progress], None] = _ignore
    on_warning: Callable[[str], None] = _ignore
