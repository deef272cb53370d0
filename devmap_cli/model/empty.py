"""The real model class with empty weights: every module, no storage."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from devmap_cli.errors import RequestError, SurroundingsError, first_line
from devmap_cli.model.stored import index_bytes, stored_dtype

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from devmap_cli.model.quantization.scheme import Quantization
    from devmap_cli.model.reference import ModelReference

_PART = re.compile(r"num_|n_|size|heads|dim|groups|channels")
_HALF_BYTES = 2.0
DTYPES = ("float32", "float16", "bfloat16")
# Which head a config without a usable `architectures` is loaded with: the first auto class that knows it; those of
# encoder-decoders first where it is one.
_AUTO_CLASSES = (
    "AutoModelForImageTextToText",
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForMaskedLM",
    "AutoModel",
)


def load_config(reference: ModelReference, *, trust_remote_code: bool) -> PreTrainedConfig:
    """The transformers config of `reference`; its own code runs only with `trust_remote_code`.

    Raises:
        RequestError: an unknown architecture, remote code without the flag, or fields that its class refuses.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    model_type = reference.config.get("model_type")
    native = model_type in CONFIG_MAPPING
    if reference.has_remote_code and not native and not trust_remote_code:
        raise RequestError(
            f"{reference.location} needs code from its own repository, which devmap does not run unasked",
            "read that code, then add --trust-remote-code",
        )
    if not native and not reference.has_remote_code:
        raise _unknown_architecture(reference)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(reference.folder) if native else reference.location,
            revision=None if native else reference.revision,
            trust_remote_code=trust_remote_code and not native,
        )
    except Exception as error:  # a config class may raise anything on fields it does not expect
        raise RequestError(
            f"config.json of {reference.location} is not valid for {model_type}: {first_line(error)}",
            "compare it with the model's page on the hub",
        ) from error
    return config


def _unknown_architecture(reference: ModelReference) -> RequestError:
    import transformers

    named = reference.config.get("model_type") or (reference.config.get("architectures") or [None])[0]
    if not named:
        return RequestError(
            f"config.json of {reference.location} names neither model_type nor architectures",
            "give a Transformers model; adapters and other formats have no layer tree",
        )
    return RequestError(
        f"transformers {transformers.__version__} does not know the architecture of {reference.location}: {named}",
        "try a newer one: pip install --upgrade transformers",
    )


def choose_dtype(
    reference: ModelReference, config: PreTrainedConfig, asked: str | None, *, trust_remote_code: bool
) -> tuple[str, str | None]:
    """The dtype the model loads in, and a note where it was not stated anywhere.

    Asked for, else config.json's, else that of the weights in the folder or on the hub, else what their index lets
    suppose, else float32 as transformers does; of a quantized model, whose weights are not stored in float32, bfloat16.
    """
    if asked is not None:
        return asked, None
    text_config = config.get_text_config()
    stated = getattr(config, "dtype", None) or getattr(text_config, "dtype", None)
    if stated is not None:
        return str(stated).removeprefix("torch."), None
    stored = stored_dtype(reference)
    if stored is not None:
        return stored, None
    if isinstance(reference.config.get("quantization_config"), dict):
        return "bfloat16", "config.json states no dtype: counted as bfloat16, as the model is quantized"
    total = index_bytes(reference.folder)
    if total is not None:
        model = build_empty(reference, config, "float32", trust_remote_code=trust_remote_code)
        each = total / max(1, sum(parameter.numel() for parameter in model.parameters()))
        if round(each, 1) == _HALF_BYTES:
            return (
                "bfloat16",
                "config.json states no dtype: counted and loaded as bfloat16, as the index of the weights has 2 bytes "
                "for each parameter; --dtype float16 or float32 says otherwise",
            )
    return (
        "float32",
        "config.json states no dtype: counted and loaded as float32; where the weights are stored in 16 bit, --dtype "
        "bfloat16 halves it",
    )


@dataclass(frozen=True, slots=True)
class EmptyModel:
    """An empty model, the dtype of what is not quantized, and what to tell people about both."""

    model: PreTrainedModel
    dtype: str
    notes: tuple[str, ...]


def build_quantized(
    reference: ModelReference, dtype: str | None, quantization: Quantization | None, *, trust_remote_code: bool
) -> EmptyModel:
    """The model of `reference` as `build_empty` makes it in `dtype` (None: its own), its weights quantized as said.

    Raises:
        RequestError: its config or class is not usable.
        SurroundingsError: its class needs a package that is missing.
    """
    config = load_config(reference, trust_remote_code=trust_remote_code)
    chosen, dtype_note = choose_dtype(reference, config, dtype, trust_remote_code=trust_remote_code)
    if quantization is not None:
        chosen = quantization.loaded_dtype(chosen)
    model = build_empty(reference, config, chosen, trust_remote_code=trust_remote_code)
    notes: tuple[str, ...] = (dtype_note,) if dtype_note else ()
    if quantization is not None:
        from devmap_cli.model.quantization.quantize import quantize_

        notes += quantize_(model, quantization)
    return EmptyModel(model, chosen, notes)


def build_empty(
    reference: ModelReference, config: PreTrainedConfig, dtype: str, *, trust_remote_code: bool
) -> PreTrainedModel:
    """The model on the meta device, in eval mode, its weights tied and in the dtypes that loading gives them.

    Raises:
        RequestError: its class cannot be built from this config.
        SurroundingsError: its class needs a package that is missing.
    """
    import torch

    build = _builder(reference, config, trust_remote_code=trust_remote_code)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = build(config, getattr(torch, dtype))
            model.tie_weights()
    except ImportError as error:
        raise SurroundingsError(
            f"{reference.location} needs a package that is not installed: {first_line(error)}",
            "install it, or give another model",
        ) from error
    except Exception as error:  # a model class may raise anything on a config it does not expect
        raise RequestError(
            f"the model of {reference.location} cannot be built: {_reason(error, reference.config)}",
            "compare its config.json with the model's page on the hub",
        ) from error
    _apply_dtype_plan(model, getattr(torch, dtype))
    model.eval()
    return model


def _reason(error: Exception, config: dict[str, Any]) -> str:
    """What is wrong with `config`, with the field that it is about where the error does not name it."""
    from devmap_cli.model.reference import fields

    if isinstance(error, KeyError):
        unknown = [name for name, value in fields(config) if isinstance(value, str) and value in error.args]
        if unknown:
            return f"{unknown[0]} is {error.args[0]!r}, which transformers does not know"
    if isinstance(error, ZeroDivisionError) or "negative dimension" in str(error):
        wrong = [name for name, value in fields(config) if type(value) is int and value <= 0 and _PART.search(name)]
        if wrong:
            return f"{' and '.join(wrong)} in config.json must be above 0"
    return first_line(error)


def _builder(reference: ModelReference, config: PreTrainedConfig, *, trust_remote_code: bool) -> Any:
    """A function (config, dtype) -> model, for the class that `architectures` names, else by auto class."""
    import transformers

    for name in config.architectures or ():
        cls: Any = getattr(transformers, name, None)
        if cls is not None and isinstance(config, getattr(cls, "config_class", None) or ()):
            return lambda config, dtype: cls._from_config(config, dtype=dtype)
    remote = trust_remote_code and reference.has_remote_code
    auto_map = getattr(config, "auto_map", None) or {}
    for auto_name in sorted(_AUTO_CLASSES, key=lambda name: config.is_encoder_decoder and "Seq2Seq" not in name):
        auto = getattr(transformers, auto_name)
        if type(config) in auto._model_mapping or (remote and auto_name in auto_map):
            return lambda config, dtype, auto=auto: auto.from_config(
                config,
                dtype=dtype,
                trust_remote_code=remote,
                **({"code_revision": reference.revision} if remote else {}),
            )
    raise RequestError(
        f"transformers has no model class for {reference.location} ({config.model_type})",
        "read its repository's code, then add --trust-remote-code"
        if reference.has_remote_code
        else "give a model of another kind, or try a newer one: pip install --upgrade transformers",
    )


def _apply_dtype_plan(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Put the parameters that the class keeps in float32 there, as from_pretrained does."""
    import torch

    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    patterns = [(re.compile(pattern), kept) for pattern, kept in plan.items()]
    for name, parameter in model.named_parameters():
        for pattern, kept in patterns:
            if pattern.search(name) and parameter.dtype != kept:
                parameter.data = torch.empty_like(parameter, dtype=kept)
