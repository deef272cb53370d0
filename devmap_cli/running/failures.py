"""What torch, transformers and the operating system raise in a run, told in our words."""

from __future__ import annotations

import errno
import re
import shlex
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from devmap_cli.devices.device import Device
from devmap_cli.errors import DevmapError, OutOfMemoryError, RequestError, SurroundingsError, first_line

if TYPE_CHECKING:
    from collections.abc import Iterator

Phase = Literal["load", "prefill", "decode"]
_WHILE: dict[Phase, str] = {
    "load": "while loading the weights",
    "prefill": "while reading the prompt (prefill)",
    "decode": "while generating (decode)",
}
_DEVICE = re.compile(
    r"\b(?:GPU |cuda:|sim:)(?P<gpu>\d+)|\b(?P<name>(?:xpu|npu):\d+)|\b(?P<mps>MPS) |(?P<host>CPUAllocator)"
)
_FULL_DISK = re.compile(r"no space left on device|disk quota exceeded|os error 28\b", re.IGNORECASE)
_GROUPS = re.compile(r"group.size", re.IGNORECASE)
"""What quanto and hqq say of states that their groups don't divide."""


@dataclass(slots=True)
class Stage:
    """Where a run is: the one thing in it that changes."""

    phase: Phase = "load"


@contextmanager
def told_in_our_words(stage: Stage, model: str) -> Iterator[None]:
    """Turn what a run of `model` raises into DevmapError where its meaning is known; the rest passes."""
    try:
        yield
    except DevmapError:
        raise
    except Exception as error:
        told = explain(error, stage.phase, model)
        if told is None:
            raise
        raise told from error


def explain(error: Exception, phase: Phase, model: str) -> DevmapError | None:
    """The failure in our words, or None where only a bug can have raised it. First match wins."""
    text = str(error)
    if is_out_of_memory(error):
        return _out_of_memory(text, phase, model)
    if _is_full_disk(error):
        return SurroundingsError(
            f"the disk is full {_WHILE[phase]}",
            "free some space, or offload elsewhere: --offload-folder FOLDER",
        )
    if isinstance(error, BrokenPipeError):
        return None
    if isinstance(error, ImportError):
        return SurroundingsError(f"{model} needs a package that is missing: {first_line(error)}", _pip_hint(error))
    if phase == "load":
        return _explain_load(error, model)
    if isinstance(error, IndexError):
        return RequestError(
            f"{model} has no position for a sequence that long",
            "give a shorter prompt or a smaller --max-new-tokens",
        )
    if isinstance(error, ValueError | AssertionError) and _GROUPS.search(text):
        return RequestError(
            f"{model} cannot keep its KV cache quantized in groups, for a prompt of that length: {first_line(error)}",
            "--kv-dtype fp8 or --kv-dtype auto",
        )
    return None


def _explain_load(error: Exception, model: str) -> DevmapError | None:
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    from safetensors import SafetensorError

    from devmap_cli.model.reference import hub_error

    if isinstance(error, SafetensorError):
        return RequestError(f"a weight file of {model} is damaged ({first_line(error)})", "download the weights again")
    for cause in _causes(error):
        if isinstance(cause, HfHubHTTPError | LocalEntryNotFoundError | OfflineModeIsEnabled):
            return hub_error(cause, model)
    if isinstance(error, OSError | ValueError | RuntimeError | KeyError):
        return RequestError(f"{model} cannot be loaded: {first_line(error)}", "DEVMAP_DEBUG=1 shows where it fails")
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host ran out of memory, by type or, where a backend has none, by its words."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def _out_of_memory(text: str, phase: Phase, model: str) -> OutOfMemoryError:
    match = _DEVICE.search(text)
    if match is None:
        return OutOfMemoryError(f"a device ran out of memory {_WHILE[phase]}", "plan again with smaller budgets")
    name = match["name"] or (match["gpu"] and f"cuda:{match['gpu']}") or ("mps" if match["mps"] else "cpu")
    device = Device.parse(name)
    return OutOfMemoryError(
        f"{device.label} ran out of memory {_WHILE[phase]}",
        f"plan again with more room kept free: devmap plan {shlex.quote(model)} -o map.json "
        f"--reserve {device.map_value}=2GiB",
    )


def _is_full_disk(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return _FULL_DISK.search(str(error)) is not None


def _pip_hint(error: ImportError) -> str:
    known = (
        "bitsandbytes",
        "sentencepiece",
        "tiktoken",
        "protobuf",
        "jinja2",
        "flash_attn",
        "pillow",
        "torchvision",
    )
    named = next((name for name in known if name in str(error).lower()), error.name)
    return f"pip install {named.replace('_', '-')}" if named else "install it, then run again"


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__
