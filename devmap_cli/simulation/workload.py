"""What a rehearsed model is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from devmap_cli.model.kv_dtypes import AUTO

if TYPE_CHECKING:
    from devmap_cli.mapfile import MapWorkload


@dataclass(frozen=True)
class Workload:
    """One call of `generate`: equal prompts of `prompt_tokens`, image tokens among them, `max_new_tokens` each.

    `images` are (width, height) in pixels, those of one prompt; `videos` are (width, height, frames), with the frames
    that the model sees. `attention` is "sdpa", "eager" or
    "flash_attention_2". `dtype` casts the weights ("bfloat16"), None leaves them as the model has them. `kv_dtype` is
    what the KV cache is kept in, one of `KV_DTYPES`.
    """

    batch_size: int = 1
    prompt_tokens: int = 4096
    max_new_tokens: int = 256
    images: tuple[tuple[int, int], ...] = ()
    attention: str = "sdpa"
    dtype: str | None = None
    videos: tuple[tuple[int, int, int], ...] = ()
    kv_dtype: str = AUTO

    def __post_init__(self) -> None:
        for name in ("batch_size", "prompt_tokens", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


def simulated(asked: MapWorkload) -> Workload:
    """The workload of a map, which has heights before widths, as a rehearsal takes it."""
    return Workload(
        batch_size=asked.batch_size,
        prompt_tokens=asked.prompt_tokens,
        max_new_tokens=asked.max_new_tokens,
        images=tuple((width, height) for height, width in asked.images),
        videos=tuple((width, height, num_frames) for height, width, num_frames in asked.videos),
        attention=asked.attention,
        kv_dtype=asked.kv_dtype,
    )
