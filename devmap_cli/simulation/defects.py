"""Mistakes in transformers that stop every run of a model, mended so that a rehearsal can foretell its memory."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


@contextmanager
def mended(model: Any, assume: Callable[[str], object]) -> Iterator[None]:
    """Let a rehearsal of `model` get past a known mistake of its class, and `assume` that it is mended.

    Llama 4 with images asks its text model's output for `image_outputs`, which that has not (transformers 5.24,
    Llama4ForConditionalGeneration.forward).
    """
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast as Output

    if type(model).__name__ != "Llama4ForConditionalGeneration" or hasattr(Output, "image_outputs"):
        yield
        return
    missing: Any = Output
    missing.image_outputs = None
    assume("the mistake of the installed transformers that stops Llama 4 after its forward (image_outputs) is mended")
    try:
        yield
    finally:
        del missing.image_outputs
