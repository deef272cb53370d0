"""What a KV cache can be kept in, as transformers' `generate` takes it, and which models it can be for.

Source: `QuantizedCache` of transformers/cache_utils.py, and `_prepare_cache_for_generation` of generation/utils.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from devmap_cli.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

AUTO = "auto"
"""The dtype of what the model computes: the cache as it is."""


@dataclass(frozen=True, slots=True)
class KvDtype:
    """One of transformers' quantized caches.

    Args:
        backend: transformers' name of what quantizes.
        nbits: bits for each number, None where the backend leaves no choice.
        package: what pip calls the backend, None where torch does it.
    """

    backend: str
    nbits: int | None = None
    package: str | None = None


QUANTIZED = {
    "fp8": KvDtype("fp8"),
    "int8": KvDtype("hqq", 8, "hqq"),
    "int4": KvDtype("quanto", 4, "optimum-quanto"),
    "int2": KvDtype("quanto", 2, "optimum-quanto"),
}
"""hqq takes fewer bits as well, at many times the memory and time that quanto needs to quantize; quanto takes no 8."""
KV_DTYPES = (AUTO, *QUANTIZED)


def generation_options(kv_dtype: str) -> dict[str, Any]:
    """The options of `generate` for a cache in `kv_dtype`; none for auto."""
    if kv_dtype == AUTO:
        return {}
    found = QUANTIZED[kv_dtype]
    bits = {} if found.nbits is None else {"nbits": found.nbits}
    return {"cache_implementation": "quantized", "cache_config": {"backend": found.backend, **bits}}


def check_kv_dtype_for(
    model_id: str, model_class: type[PreTrainedModel], config: PreTrainedConfig, kv_dtype: str
) -> None:
    """Refuse a quantized cache where transformers does.

    Raises:
        RequestError: saying why.
    """
    reason = None if kv_dtype == AUTO else _reason_against(model_class, config)
    if reason is not None:
        raise refusal(model_id, kv_dtype, reason)


def refusal(model_id: str, kv_dtype: str, reason: str) -> RequestError:
    """The error that says why a model cannot have a cache in `kv_dtype`."""
    return RequestError(f"{model_id} cannot keep its KV cache in {kv_dtype}: {reason}", f"--kv-dtype {AUTO}")


def _reason_against(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> str | None:
    from transformers.cache_utils import get_layer_types_and_kwargs

    if not model_class.can_generate():
        return "it generates no text, so it has none"
    if config.is_encoder_decoder:
        return "transformers has no quantized cache for an encoder with a decoder"
    supports_cache: Any = getattr(model_class, "_supports_default_dynamic_cache", None)
    if supports_cache is None or not supports_cache():
        return "its state is no cache of transformers"
    layer_types, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    others = sorted(set(layer_types) - {"full_attention"})
    if others:
        return f"transformers quantizes the cache of full attention alone, and it has {' and '.join(others)} layers"
    return None
