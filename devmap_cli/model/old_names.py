"""Module names of older transformers releases, told in those of the installed one.

Transformers renames weights as it loads them (`visual.blocks.0` became `model.visual.blocks.0`), but not the keys of a
device map: a map with old names is taken without a word and puts everything on the cpu. The same rules that rename
weights are applied here to module names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from devmap_cli.model.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def renamings_of(model: PreTrainedModel) -> tuple[tuple[str, str], ...]:
    """The (pattern, replacement) pairs by which transformers renames the weights of `model` on load, in order."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    pairs: list[tuple[str, str]] = []
    for step in get_model_conversion_mapping(model):
        if isinstance(step, WeightRenaming) and getattr(step, "scope_prefix", None) is None:
            pairs += [(pattern, step.target_patterns[0]) for pattern in step.source_patterns]
    return tuple(pairs)


def translate(name: str, spec: ModelSpec, fqns: frozenset[str]) -> str | None:
    """The installed name of the module that `name` names in an older release; None where there is none.

    Args:
        fqns: all module names of `spec`.
    """
    if name in fqns:
        return None
    for candidate in candidates(name, spec.renamings):
        if candidate in fqns:
            return candidate
    return None


def candidates(name: str, renamings: Iterable[tuple[str, str]]) -> list[str]:
    """What `name`, or a pattern of names, may be called today: after all renamings, and after each of them alone."""
    pairs = list(renamings)
    renamed = name
    for pattern, replacement in pairs:
        renamed = re.sub(pattern, replacement, renamed)
    alone = [re.sub(pattern, replacement, name) for pattern, replacement in pairs]
    return [candidate for candidate in dict.fromkeys((renamed, *alone)) if candidate != name]
