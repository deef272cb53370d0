"""What a model is to be quantized with: as asked for, or as its checkpoint says. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from devmap_cli.devices.capability import Capability
from devmap_cli.errors import RequestError

SCHEMES = ("int8", "nf4", "fp4")
"""What bitsandbytes makes of 16-bit weights while it loads them."""
_UNPACKED = "dequantize"
_KERNELS_FROM: dict[str, Capability] = {"mxfp4": (7, 5), "fp8": (8, 9)}
"""From which compute capability on there are kernels for packed floats; below, transformers unpacks them.

Source: `validate_environment` of transformers' quantizers.
"""
_PACKED_BY_DEFAULT = ("fp8",)
"""Methods whose weights are taken to stay packed on devices that are not known: MXFP4 needs further packages."""
_RUNS_FROM: dict[str, Capability] = {"fbgemm_fp8": (9, 0), "int8": (7, 5)}
"""The lowest compute capability that a method or scheme runs on at all.

Source: transformers' FbgemmFp8HfQuantizer; the table of hardware in bitsandbytes' installation guide for LLM.int8().
"""
MODELOPT_NAME = "hf_quant_config.json"
NO_KERNELS = "its kernels run on GPUs only"
_REFUSED = "transformers refuses such a map"
OFF_GPU = {
    "awq": NO_KERNELS,
    "gptq": NO_KERNELS,
    "bitsandbytes": f"{_REFUSED} unless llm_int8_enable_fp32_cpu_offload is set, which keeps the module in 32 bits",
    "bitnet": _REFUSED,
    "eetq": _REFUSED,
    "higgs": _REFUSED,
    "hqq": _REFUSED,
    "quanto": _REFUSED,
}
"""What becomes of a map with cpu or disk, by `quant_method`.

Source: `validate_environment` of transformers' quantizers; for AWQ and GPTQ, the kernels that gptqmodel has for a model
that is spread over devices.
"""
_ACCELERATORS_ONLY = ("awq",)
_FLOAT16_ONLY = ("awq",)
_BFLOAT16_ONLY = ("fbgemm_fp8",)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a model is quantized: `method` as transformers names it, `settings` as in config.json.

    `scheme` is what was asked for, None for a checkpoint that is quantized already.
    """

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    scheme: str | None = None

    @property
    def is_unpacked(self) -> bool:
        """Whether transformers unpacks the weights while it loads them."""
        return bool(self.settings.get(_UNPACKED))

    @property
    def as_in_map(self) -> dict[str, Any]:
        """The form that a map keeps."""
        if self.scheme is not None:
            return {"scheme": self.scheme}
        return {"quant_method": self.method, **self.settings}

    def loaded_dtype(self, dtype: str) -> str:
        """What transformers loads the rest of the model in, asked for `dtype` (HfQuantizer.update_dtype)."""
        if self.method in _BFLOAT16_ONLY:
            return "bfloat16"
        return "float16" if self.method in _FLOAT16_ONLY and dtype == "bfloat16" else dtype


def quantization_of(
    config: dict[str, Any], modelopt_text: str | None, scheme: str | None, kernels: Capability | None = None
) -> Quantization | None:
    """The quantization of a model with this config.json and hf_quant_config.json, `scheme` asked for.

    Args:
        kernels: the lowest compute capability of the devices, which decides whether packed floats stay packed; None
            where it is not known.

    Raises:
        RequestError: a scheme is asked for, and the checkpoint is quantized already.
    """
    stored = _stored(config, modelopt_text)
    if scheme is None:
        return None if stored is None else _loaded_on(Quantization(*stored), kernels)
    return _on_the_fly(scheme, stored)


def quantization_in_map(document: dict[str, Any] | None) -> Quantization | None:
    """The quantization that a map or a description keeps (`Quantization.as_in_map`)."""
    if document is None:
        return None
    if "scheme" in document:
        return _on_the_fly(str(document["scheme"]), None)
    return Quantization(str(document.get("quant_method")), document)


def _loaded_on(quantization: Quantization, kernels: Capability | None) -> Quantization:
    """As transformers loads it: told to unpack what the devices have no kernels for."""
    method = quantization.method
    needed = _KERNELS_FROM.get(method)
    if needed is None or (method in _PACKED_BY_DEFAULT if kernels is None else kernels >= needed):
        return quantization
    return replace(quantization, settings={**quantization.settings, _UNPACKED: True})


def least_capability(document: dict[str, Any] | None) -> tuple[str, Capability]:
    """What a model with the quantization `document` is quantized with, and the lowest capability that this runs on."""
    quantization = quantization_in_map(document)
    name = "" if quantization is None else quantization.scheme or _named(quantization)
    return name, _RUNS_FROM.get(name, (0, 0))


def _named(quantization: Quantization) -> str:
    is_int8 = quantization.method == "bitsandbytes" and quantization.settings.get("load_in_8bit")
    return "int8" if is_int8 else quantization.method


def off_gpu(document: dict[str, Any] | None) -> str | None:
    """Why nothing of a model with the quantization `document` may lie on cpu or disk; None where it may."""
    quantization = quantization_in_map(document)
    if quantization is None or quantization.method not in OFF_GPU:
        return None
    return f"{quantization.scheme or quantization.method} weights run on accelerators only"


def needs_accelerator(document: dict[str, Any] | None) -> bool:
    """Whether a model with the quantization `document` doesn't run on the cpu alone either."""
    quantization = quantization_in_map(document)
    return quantization is not None and quantization.method in _ACCELERATORS_ONLY


def _on_the_fly(scheme: str, stored: tuple[str, dict[str, Any]] | None) -> Quantization:
    if stored is not None:
        raise RequestError(
            f"the checkpoint is quantized already ({stored[0]}), which --quantize {scheme} would do again",
            "leave --quantize out, or give the model that it was made from",
        )
    settings = {"load_in_8bit": True} if scheme == "int8" else {"load_in_4bit": True, "bnb_4bit_quant_type": scheme}
    return Quantization("bitsandbytes", settings, scheme)


def modelopt_text(folder: Path) -> str | None:
    """The text of ModelOpt's own file beside config.json; None without one."""
    path = folder / MODELOPT_NAME
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError):
        return None


def _stored(config: dict[str, Any], modelopt_text: str | None) -> tuple[str, dict[str, Any]] | None:
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        part = config.get("text_config")
        settings = part.get("quantization_config") if isinstance(part, dict) else None
    own = _own_file(modelopt_text)
    if isinstance(settings, dict) and settings.get("quant_method") not in (None, "modelopt") and own is None:
        return str(settings["quant_method"]), settings
    if own is not None:
        return "modelopt", {**(settings if isinstance(settings, dict) else {}), **own}
    if not isinstance(settings, dict):
        return None
    if settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return "bitsandbytes", settings
    return ("modelopt" if "quant_algo" in settings else "unknown"), settings


def _own_file(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        document = json.loads(text)
    except ValueError:
        return None
    part = document.get("quantization") if isinstance(document, dict) else None
    return part if isinstance(part, dict) and "quant_algo" in part else None
