"""Options that say what a run is to do, and the workload they make."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from devmap_cli.errors import RequestError
from devmap_cli.model.kv_dtypes import QUANTIZED

if TYPE_CHECKING:
    from devmap_cli.mapfile import MapWorkload
    from devmap_cli.model.spec import ModelSpec

DEFAULT_PROMPT_TOKENS = 2048
DEFAULT_MAX_NEW_TOKENS = 256
_QUESTION_TOKENS = 256
_GROUP_SIZE = 64
"""Numbers with one scale in a quantized KV cache (`q_group_size` of transformers' `QuantizedCache`)."""
_IMAGE = re.compile(r"(?P<width>[1-9]\d{0,5})[xX×](?P<height>[1-9]\d{0,5})")


class Attention(str, Enum):
    """The attention implementations that a rehearsal knows."""

    sdpa = "sdpa"
    eager = "eager"
    flash_attention_2 = "flash_attention_2"


class KvDtype(str, Enum):
    """What a KV cache is kept in: the names of `model.kv_dtypes.KV_DTYPES`."""

    auto = "auto"
    fp8 = "fp8"
    int8 = "int8"
    int4 = "int4"
    int2 = "int2"


PromptTokens = Annotated[
    int | None,
    typer.Option("--prompt-tokens", min=1, help="Length of the prompt [default: 2048, or less where the model ends]."),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", min=1, help="Length of the answer [default: 256]."),
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Sequences at once.")]
Images = Annotated[
    list[str] | None,
    typer.Option("--image", metavar="WxH", help="An image in the prompt, in pixels; repeatable."),
]
Videos = Annotated[
    list[str] | None,
    typer.Option(
        "--video",
        metavar="WxHxFRAMES",
        help="A video in the prompt: pixels, and the frames that the model sees; repeatable.",
    ),
]


_KV_DTYPE_HELP = (
    "What the KV cache is kept in: auto is the model's dtype. To run, int8 needs the package hqq, int4 and int2 need "
    "optimum-quanto (with nvcc on NVIDIA GPUs), fp8 needs none"
)
KvDtypeOption = Annotated[KvDtype, typer.Option("--kv-dtype", help=f"{_KV_DTYPE_HELP}.")]
MapsKvDtypeOption = Annotated[
    KvDtype | None, typer.Option("--kv-dtype", help=f"{_KV_DTYPE_HELP} [default: the map's, or auto].")
]


def parse_image(text: str) -> tuple[int, int]:
    """Height and width of `WxH`.

    Raises:
        RequestError: it is none.
    """
    match = _IMAGE.fullmatch(text.strip())
    if match is None:
        raise RequestError(f"--image: {text!r} is not WIDTHxHEIGHT in pixels", "--image 1024x768")
    return int(match["height"]), int(match["width"])


def parse_video(text: str) -> tuple[int, int, int]:
    """Height, width and number of frames of `WxHxFRAMES`.

    Raises:
        RequestError: it is none.
    """
    size, _, frames = text.strip().lower().replace("×", "x").rpartition("x")
    match = _IMAGE.fullmatch(size)
    if match is None or not frames.isdecimal() or not 0 < int(frames) < 10**6:
        raise RequestError(f"--video: {text!r} is not WIDTHxHEIGHTxFRAMES", "--video 1280x720x16")
    return int(match["height"]), int(match["width"]), int(frames)


def with_room_for_media(workload: MapWorkload, media_tokens: int) -> MapWorkload:
    """`workload` with a prompt that has room for the tokens of its images and videos, and for a question about them."""
    step = prompt_step(workload.kv_dtype)
    tokens = -(-(media_tokens + _QUESTION_TOKENS) // step) * step
    return replace(workload, prompt_tokens=max(workload.prompt_tokens, tokens))


def prompt_step(kv_dtype: str) -> int:
    """Prompts whose tokens are a multiple of this can be kept in `kv_dtype` whatever a model's heads are."""
    is_grouped = kv_dtype in QUANTIZED and QUANTIZED[kv_dtype].nbits is not None
    return _GROUP_SIZE if is_grouped else 1


def workload_for(
    spec: ModelSpec,
    *,
    prompt_tokens: int | None,
    max_new_tokens: int | None,
    batch_size: int,
    images: Sequence[str],
    videos: Sequence[str],
    attention: Attention,
    kv_dtype: KvDtype = KvDtype.auto,
) -> MapWorkload:
    """What was asked for, the rest by default: a chat, as far as the model's positions go.

    Raises:
        RequestError: an image or a video that cannot be read.
    """
    from devmap_cli.mapfile import MapWorkload

    room = spec.max_positions or DEFAULT_PROMPT_TOKENS + DEFAULT_MAX_NEW_TOKENS
    new = max_new_tokens or min(DEFAULT_MAX_NEW_TOKENS, max(1, (room - (prompt_tokens or 0)) // 2))
    return MapWorkload(
        batch_size=batch_size,
        prompt_tokens=prompt_tokens or max(1, min(DEFAULT_PROMPT_TOKENS, room - new)),
        max_new_tokens=new,
        images=tuple(map(parse_image, images)),
        videos=tuple(map(parse_video, videos)),
        attention=attention.value,
        kv_dtype=kv_dtype.value,
    )
