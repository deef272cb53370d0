"""What a model is given in a rehearsal, or why it cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from devmap_cli.errors import RequestError, first_line
from devmap_cli.model.kv_dtypes import check_kv_dtype_for
from devmap_cli.simulation.workload import simulated

if TYPE_CHECKING:
    from collections.abc import Mapping

    from devmap_cli.mapfile import MapWorkload

_MAX_TOKENS = 1 << 24
"""Of all sequences together: their numbers are real ones, and more than this takes minutes."""
_MAX_PROMPT_TOKENS = 1 << 20
_MAX_PIXELS = 1 << 28
"""Of all images and frames together, for the same reason."""
_PIXELS_OF_A_FRAME = 1 << 17
"""About what models bring smaller ones to."""
_WITHOUT_IMAGES = "leave out --image and --video"


def inputs_for(model: Any, asked: MapWorkload) -> Mapping[str, Any]:
    """What `model`, an empty one, is given, on the cpu: `input_ids` unless its prompt is sound.

    Raises:
        RequestError: it cannot take the workload, or a rehearsal of it would take minutes.
    """
    from devmap_cli.simulation.inputs import make_inputs

    _refuse_what_takes_minutes(asked)
    try:
        inputs = make_inputs(model.config, simulated(asked))
    except ValueError as error:
        raise RequestError(first_line(error).rstrip("."), _hint(model.config, asked)) from error
    if "input_ids" not in inputs and (asked.images or asked.videos):
        raise RequestError(f"a {model.config.model_type} takes sound, no images", _WITHOUT_IMAGES)
    check_kv_dtype_for(f"a {model.config.model_type}", type(model), model.config, asked.kv_dtype)
    return inputs


def tokens_of_media(model: Any, asked: MapWorkload) -> int:
    """How many tokens of a prompt the images and videos of `asked` take.

    Raises:
        RequestError: `model` cannot take them, or a rehearsal of them would take minutes.
    """
    from devmap_cli.simulation.visual_inputs import visual_inputs

    _refuse_what_takes_minutes(asked)
    try:
        return len(visual_inputs(model.config, simulated(asked)).tokens)
    except ValueError as error:
        raise RequestError(first_line(error).rstrip("."), _WITHOUT_IMAGES) from error


def _refuse_what_takes_minutes(asked: MapWorkload) -> None:
    num_tokens = asked.batch_size * (asked.prompt_tokens + asked.max_new_tokens)
    if num_tokens > _MAX_TOKENS:
        raise RequestError(
            f"{num_tokens:,} tokens in all are more than a rehearsal takes, which is {_MAX_TOKENS:,}",
            f"fewer: --batch-size 1 --prompt-tokens {_MAX_PROMPT_TOKENS} --max-new-tokens 256",
        )
    frames = [(*size, 1) for size in asked.images] + list(asked.videos)
    num_pixels = asked.batch_size * sum(
        max(height * width, _PIXELS_OF_A_FRAME) * count for height, width, count in frames
    )
    if num_pixels > _MAX_PIXELS:
        raise RequestError(
            f"{num_pixels:,} pixels in all are more than a rehearsal takes, which is {_MAX_PIXELS:,}",
            "fewer or smaller ones: --image 1024x768, --video 640x480x64",
        )


def _hint(config: Any, asked: MapWorkload) -> str:
    """A prompt that is long enough for the images and videos, if they can be taken at all."""
    from devmap_cli.simulation.inputs import make_inputs

    one = replace(simulated(asked), batch_size=1)
    for exponent in range(asked.prompt_tokens.bit_length(), _MAX_PROMPT_TOKENS.bit_length()):
        try:
            make_inputs(config, replace(one, prompt_tokens=1 << exponent))
        except ValueError:
            continue
        return f"make room for them: --prompt-tokens {1 << exponent}"
    return _WITHOUT_IMAGES
