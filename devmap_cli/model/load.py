"""From MODEL on the command line to its description, through the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from devmap_cli.model.cache import key_of, read_spec, write_spec
from devmap_cli.model.positions import position_limit
from devmap_cli.model.quantization.scheme import Quantization, modelopt_text, quantization_in_map, quantization_of
from devmap_cli.model.reference import ModelReference, resolve
from devmap_cli.model.spec import ModelSpec
from devmap_cli.model.stored import index_bytes, stored_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from devmap_cli.devices.capability import Capability


def load_spec(
    model: str,
    *,
    revision: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    trust_remote_code: bool = False,
    kernels: Capability | None = None,
) -> ModelSpec:
    """Describe MODEL (a hub id or a folder with config.json) as it would be loaded in `dtype` (None: its own).

    `quantize` is one of `quantization.scheme.SCHEMES`: what bitsandbytes is to make of its weights.
    `kernels` is the lowest compute capability of the devices, None where it is not known: whether packed floats have
    kernels there and stay packed depends on it.

    Raises:
        RequestError: no such model, one that transformers cannot build, or one that is quantized already.
        SurroundingsError: the hub or a package is missing.
    """
    reference = resolve(model, revision)
    modelopt = modelopt_text(reference.folder)
    quantization = quantization_of(reference.config, modelopt, quantize, kernels)
    if reference.has_remote_code and trust_remote_code:
        return describe(reference, dtype, quantization, trust_remote_code=True)  # its code may change: not cached
    is_told = dtype is not None or reference.states_dtype
    stored = () if is_told else (stored_dtype(reference), index_bytes(reference.folder))
    is_unpacked = quantization is not None and quantization.is_unpacked
    key = key_of(reference.config_text, dtype, *stored, quantize, modelopt, is_unpacked)
    cached = read_spec(key)
    if cached is not None:
        return replace(cached, model_id=reference.location, revision=_commit(reference))
    spec = replace(describe(reference, dtype, quantization, trust_remote_code=trust_remote_code), key=key)
    write_spec(key, spec)
    return spec


def empty_model(spec: ModelSpec, *, trust_remote_code: bool) -> PreTrainedModel:
    """The model that `spec` describes, without weights.

    Raises:
        RequestError: transformers cannot build it.
        SurroundingsError: the hub or a package is missing.
    """
    from devmap_cli.model.empty import build_quantized
    from devmap_cli.model.quiet import quiet_libraries

    reference = resolve(spec.model_id, spec.revision)
    with quiet_libraries():
        quantization = quantization_in_map(spec.quantization)
        return build_quantized(reference, spec.dtype, quantization, trust_remote_code=trust_remote_code).model


def describe(
    reference: ModelReference, dtype: str | None, quantization: Quantization | None, *, trust_remote_code: bool
) -> ModelSpec:
    """Build the empty model of `reference`, quantized as said, and describe it."""
    from devmap_cli.model.census import module_spec, tie_groups
    from devmap_cli.model.empty import build_quantized
    from devmap_cli.model.old_names import renamings_of
    from devmap_cli.model.probe import probe
    from devmap_cli.model.quiet import quiet_libraries

    with quiet_libraries():
        built = build_quantized(reference, dtype, quantization, trust_remote_code=trust_remote_code)
        model = built.model
        seen = probe(model)
    return ModelSpec(
        model_id=reference.location,
        revision=_commit(reference),
        class_name=type(model).__name__,
        model_type=str(model.config.model_type),
        dtype=built.dtype,
        root=module_spec(model, _no_split_classes(model)),
        ties=tie_groups(model),
        execution_order=seen.execution_order,
        output_bytes_per_token=seen.output_bytes_per_token,
        kv_cache=seen.kv_cache,
        renamings=renamings_of(model),
        max_positions=position_limit(model.config),
        token_embedding=_token_embedding(model),
        quantization=None if quantization is None else quantization.as_in_map,
        notes=tuple(note for note in (_class_note(reference, type(model).__name__), *built.notes, seen.note) if note),
    )


def _token_embedding(model: PreTrainedModel) -> str:
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        return ""
    return next((fqn for fqn, module in model.named_modules() if module is embedding), "")


def _no_split_classes(model: PreTrainedModel) -> frozenset[str]:
    return frozenset(getattr(model, "_no_split_modules", None) or ())


def _class_note(reference: ModelReference, class_name: str) -> str | None:
    named = reference.config.get("architectures") or [class_name]
    return None if class_name in named else f"config.json names {named[0]}, and transformers loads it as {class_name}"


def _commit(reference: ModelReference) -> str | None:
    return None if reference.is_local else reference.revision
