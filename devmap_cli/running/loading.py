"""From a map to a loaded model: the class, its weights on their devices, and progress on the way."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from devmap_cli.errors import RequestError, SurroundingsError
from devmap_cli.model.empty import load_config
from devmap_cli.running.request import Progress
from devmap_cli.running.weightfiles import check_weight_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel

    from devmap_cli.model.reference import ModelReference

    ModelClass: TypeAlias = type[PreTrainedModel]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to load a model; `device_map` as transformers takes it."""

    class_name: str
    dtype: str
    device_map: Mapping[str, int | str]
    attention: str | None
    quantization: Mapping[str, Any] | None
    offload_folder: Path | None
    trust_remote_code: bool


@dataclass(frozen=True, slots=True)
class Loadable:
    """A model that is known to be loadable as far as one can see without its weights."""

    reference: ModelReference
    model_class: ModelClass
    config: PreTrainedConfig
    recipe: Recipe


def prepare(reference: ModelReference, recipe: Recipe) -> Loadable:
    """Look at everything that can be wrong before any weight is read.

    Raises:
        RequestError: no such class, one of another model, one that doesn't generate; weights missing or damaged.
        SurroundingsError: the quantization's package is missing.
    """
    config = load_config(reference, trust_remote_code=recipe.trust_remote_code)
    model_class = _model_class(reference, recipe, config)
    if not model_class.can_generate():
        raise RequestError(
            f"{recipe.class_name} does not generate text",
            "devmap run is for models that do; devmap plan is for all",
        )
    if reference.is_local:
        check_weight_files(reference.folder)
    if recipe.quantization is not None and "scheme" in recipe.quantization:
        _check_bitsandbytes(recipe.quantization["scheme"])
    return Loadable(reference, model_class, config, recipe)


def load(loadable: Loadable, on_progress: Callable[[Progress], None]) -> PreTrainedModel:
    """Load the weights to where the map says.

    Raises:
        RequestError: the weights are not all of this class's.
        Exception: whatever transformers raises; see `failures`.
    """
    reference, recipe = loadable.reference, loadable.recipe
    options: dict[str, Any] = {"attn_implementation": recipe.attention} if recipe.attention else {}
    if recipe.quantization is not None and "scheme" in recipe.quantization:
        options["quantization_config"] = _bitsandbytes_config(recipe.quantization["scheme"], recipe.dtype)
    if isinstance(loadable.config, loadable.model_class.config_class or ()):
        options["config"] = loadable.config
    with _bars_to(on_progress), contextlib.redirect_stdout(sys.stderr):
        from_pretrained: Any = loadable.model_class.from_pretrained  # with the info, a pair: not in its type
        model, info = from_pretrained(
            reference.location,
            revision=reference.revision or "main",
            dtype=recipe.dtype,
            device_map=dict(recipe.device_map),
            offload_folder=recipe.offload_folder,
            use_safetensors=True,
            trust_remote_code=recipe.trust_remote_code,
            output_loading_info=True,
            **options,
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise RequestError(
            f"the weights of {reference.location} lack {len(missing)} parameters of {recipe.class_name}, "
            f"the first is {missing[0]}",
            "give the model that the map was planned for",
        )
    loaded: PreTrainedModel = model
    return loaded


def _model_class(reference: ModelReference, recipe: Recipe, config: PreTrainedConfig) -> ModelClass:
    import transformers

    found = getattr(transformers, recipe.class_name, None)
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        if found.config_class is not None and not _is_config_for(config, found.config_class):
            raise RequestError(
                f"the map is for {recipe.class_name}, and {reference.location} is of type {config.model_type}",
                f"plan again: devmap plan {reference.location} -o map.json",
            )
        return found
    return _remote_class(reference, recipe)


def _remote_class(reference: ModelReference, recipe: Recipe) -> ModelClass:
    auto_map = reference.config.get("auto_map") or {}
    names = [name for name in auto_map.values() if str(name).rpartition(".")[2] == recipe.class_name]
    if not names or not recipe.trust_remote_code:
        import transformers

        raise RequestError(
            f"transformers {transformers.__version__} has no model class {recipe.class_name}",
            "read its repository's code, then add --trust-remote-code"
            if names
            else "try a newer one: pip install --upgrade transformers",
        )
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    remote: ModelClass = get_class_from_dynamic_module(names[0], reference.location, revision=reference.revision)
    return remote


def _is_config_for(config: PreTrainedConfig, wanted: type[PreTrainedConfig]) -> bool:
    """Whether a class of config `wanted` loads from `config` or, as text-only classes do, a part of it."""
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
    return any(isinstance(part, wanted) for part in (config, *parts))


def _check_bitsandbytes(scheme: object) -> None:
    import importlib.util

    if scheme not in ("int8", "nf4", "fp4"):
        raise RequestError(f"the map's quantization {scheme!r} is unknown", "plan again with int8, nf4 or fp4")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise SurroundingsError(
            f"{scheme} weights need bitsandbytes, which is not installed", "pip install bitsandbytes"
        )


def _bitsandbytes_config(scheme: str, dtype: str) -> Any:
    import torch
    from transformers import BitsAndBytesConfig

    config: Any = BitsAndBytesConfig  # untyped

    if scheme == "int8":
        return config(load_in_8bit=True, llm_int8_enable_fp32_cpu_offload=True)
    return config(load_in_4bit=True, bnb_4bit_quant_type=scheme, bnb_4bit_compute_dtype=getattr(torch, dtype))


@contextmanager
def _bars_to(on_progress: Callable[[Progress], None]) -> Iterator[None]:
    """Send the progress bars that transformers would draw to `on_progress`."""
    from transformers.utils import logging

    def bar(_: object, arguments: tuple[Any, ...], options: dict[str, Any]) -> _Bar:
        iterable = arguments[0] if arguments else options.get("iterable", ())
        return _Bar(iterable, str(options.get("desc") or "Loading"), options.get("total"), on_progress)

    before = logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


class _Bar:
    """As much of a tqdm bar as transformers uses."""

    def __init__(
        self, iterable: Iterable[Any], step: str, total: int | None, on_progress: Callable[[Progress], None]
    ) -> None:
        self._iterable = iterable
        self._step = step
        self._total = total if total is not None else len(iterable) if isinstance(iterable, Sized) else 0
        self._done = 0
        self._on_progress = on_progress

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            yield item
            self.update()

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, steps: int = 1) -> None:
        """Report `steps` more done."""
        self._done += steps
        self._on_progress(Progress(self._step, self._done, self._total))

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_arguments, **_options: None
