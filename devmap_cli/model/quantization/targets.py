"""Which modules a method leaves as they are, by the names that configs give them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.pytorch_utils import Conv1D

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


class Skips:
    """Names to leave, matched as transformers' should_convert_module does, but in one pass over all of them.

    A name is left if one of `keys` matches it from its start to a dot or its end, as a pattern, or is how it ends.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        distinct = sorted(set(keys))
        patterns = "|".join(f"(?:{_valid(key)})" for key in distinct)
        self._endings = tuple(distinct)
        self._pattern = re.compile(f"(?:{patterns}){_BOUNDARY}") if distinct else None

    def __contains__(self, name: str) -> bool:
        return self._pattern is not None and (self._pattern.match(name) is not None or name.endswith(self._endings))


def _valid(key: str) -> str:
    try:
        re.compile(key)
    except re.error:
        return re.escape(key)
    return key


class Globs:
    """Names that shell-like patterns match, as ModelOpt's lists have them; what is below a named module is too."""

    def __init__(self, patterns: Iterable[str]) -> None:
        parts = [fnmatch.translate(form) for key in sorted(set(patterns)) for form in (key, f"{key}.*")]
        self._pattern = re.compile("|".join(parts)) if parts else None

    def __contains__(self, name: str) -> bool:
        return self._pattern is not None and self._pattern.match(name) is not None


def default_skips(model: PreTrainedModel, listed: object, *, add_defaults: bool = False) -> Skips:
    """The names that transformers' HfQuantizer leaves: those `listed`, else its own choice, and what stays float32."""
    from transformers.quantizers.base import HfQuantizer

    names = [str(name) for name in listed] if isinstance(listed, list) else None
    kept = model._keep_in_fp32_modules
    return Skips(
        HfQuantizer.get_modules_to_not_convert(
            model, names, list(kept) if kept else None, add_default_skips=add_defaults
        )
    )


def linear_modules(
    model: nn.Module, *, with_subclasses: bool = False, with_conv1d: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers by name, in module order, which may be replaced on the way; none with a forward of its own."""
    for name, module in list(model.named_modules()):
        is_linear = type(module) is nn.Linear
        if with_subclasses and isinstance(module, nn.Linear):
            is_linear = type(module).forward is nn.Linear.forward
        if is_linear or (with_conv1d and isinstance(module, Conv1D)):
            yield name, module


def fused_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that hold all experts of a layer in three-dimensional parameters."""
    for name, module in list(model.named_modules()):
        down = module._parameters.get("down_proj")
        if down is not None and down.dim() == 3:
            yield name, module


def tied_modules(model: PreTrainedModel) -> frozenset[str]:
    """Modules whose weight is another's too, which no method may pack."""
    tied: dict[str, Any] = dict(model.all_tied_weights_keys)
    return frozenset(key.removesuffix(".weight") for key in (*tied, *tied.values()))


def renamed(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Names of the checkpoint as they are in the model."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    renamings = get_model_conversion_mapping(model)
    result = []
    for name in names:
        new = f"{name}."  # renamings are written for names of weights
        for renaming in renamings:
            new, _ = renaming.rename_source_key(new)
        result.append(new.removesuffix("."))
    return result
