"""Replaces the modules of an empty model that transformers' quantizer of a method would replace."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.integrations import finegrained_fp8

from devmap_cli.model.quantization.bitsandbytes import Linear4bit, Linear8bitLt, Settings4bit
from devmap_cli.model.quantization.compressed import CompressedLinear, Groups, unpack_before_forward
from devmap_cli.model.quantization.conversion import Conversion, note_conversion
from devmap_cli.model.quantization.float4 import (
    FP8PerTensorExperts,
    Mxfp4GptOssExperts,
    NVFP4Experts,
    NVFP4Linear,
    PackedExperts,
)
from devmap_cli.model.quantization.float8 import (
    FbgemmFp8Linear,
    FP8Experts,
    FP8GroupedLinear,
    FP8Linear,
    ModelOptFP8Linear,
    fine_grained_settings,
)
from devmap_cli.model.quantization.linear import LinearShape, QuantizedLinear
from devmap_cli.model.quantization.packed_int import AWQLinear, GPTQLinear, GroupSettings, UnpackingBuffer
from devmap_cli.model.quantization.targets import (
    Globs,
    Skips,
    default_skips,
    fused_experts,
    linear_modules,
    renamed,
    tied_modules,
)
from devmap_cli.units import format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from devmap_cli.model.quantization.scheme import Quantization

_Notes = list[str]


def quantize_(model: PreTrainedModel, quantization: Quantization) -> tuple[str, ...]:
    """Pack the weights of `model`, which lies on the meta device; the answer is what to tell people about it."""
    method = quantization.method
    packer = _PACKERS.get(method)
    if packer is None:
        return (f"the checkpoint is quantized ({method}), which is not counted: sizes are those of unpacked weights",)
    dense_bytes = _num_bytes(model)
    notes = packer(model, quantization)
    if quantization.scheme is None:
        what = "counted as stored" if _num_bytes(model) != dense_bytes else "counted unpacked"
        notes.insert(0, f"the checkpoint is quantized ({method}), {what}")
    return tuple(notes)


def _num_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters()) + sum(buffer.nbytes for buffer in model.buffers())


# ------------------------------------------------------------------ bitsandbytes


def _bitsandbytes(model: PreTrainedModel, quantization: Quantization) -> _Notes:
    settings = quantization.settings
    if quantization.scheme is None:
        _split_experts(model)
    skips = default_skips(model, settings.get("llm_int8_skip_modules"))
    make: Callable[[LinearShape], QuantizedLinear]
    if settings.get("load_in_8bit"):
        threshold = float(settings.get("llm_int8_threshold", 6.0))
        make = lambda shape: Linear8bitLt(shape, threshold)  # noqa: E731 - one of two
        copies_bytes = torch.float16.itemsize  # Int8Params quantizes a copy in float16
    else:
        settings_4bit = Settings4bit.of(settings, on_the_fly=quantization.scheme is not None)
        make = lambda shape: Linear4bit(shape, settings_4bit)  # noqa: E731 - one of two
        copies_bytes = 0
    for name, module in linear_modules(model, with_conv1d=True):
        if name not in skips:
            shape = LinearShape.of(module)
            replacement = make(shape)
            if quantization.scheme is not None:
                beside = shape.num_weights * (shape.dtype.itemsize + copies_bytes)
                read = shape.num_weights * shape.dtype.itemsize
                note_conversion(replacement, Conversion(beside, read / replacement.weight.nbytes))
            model.set_submodule(name, replacement)
    return _unpacked_experts(model, "bitsandbytes does not quantize")


def _split_experts(model: PreTrainedModel) -> None:
    """Make linear layers of fused experts where transformers does so to load packed ones."""
    from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION

    for name, module in list(model.named_modules()):
        patch: Any = MODULES_TO_PATCH_FOR_QUANTIZATION.get(type(module).__name__)
        if patch is not None:
            with torch.device("meta"):
                model.set_submodule(name, patch["module_name"](model.config.get_text_config()).to(model.dtype))


def _unpacked_experts(model: PreTrainedModel, reason: str) -> _Notes:
    num_bytes = sum(
        parameter.nbytes for _, experts in fused_experts(model) for parameter in experts.parameters(recurse=False)
    )
    if not num_bytes:
        return []
    return [f"{reason} experts that are one parameter: {format_bytes(num_bytes)} of them stay as they are"]


# ------------------------------------------------------------------ integers


def _gptq(model: PreTrainedModel, quantization: Quantization) -> _Notes:
    settings = quantization.settings
    groups, buffer = GroupSettings.of(settings), UnpackingBuffer()
    block = _gptq_block(model, settings)
    chosen = {name for names in settings.get("modules_in_block_to_quantize") or () for name in names}
    tied = tied_modules(model)
    for name, module in linear_modules(model, with_subclasses=True, with_conv1d=True):
        match = block.match(name)
        if match is not None and name not in tied and (not chosen or name[match.end() :] in chosen):
            model.set_submodule(name, GPTQLinear(LinearShape.of(module), groups, buffer))
    return _unpacked_experts(model, "GPTQ does not quantize")


def _gptq_block(model: PreTrainedModel, settings: dict[str, Any]) -> re.Pattern[str]:
    """The names of layers with a number, up to the dot behind it: those named, else the decoder's longest list."""
    listed = settings.get("block_name_to_quantize")
    if not listed:
        decoder: nn.Module = model.get_decoder()
        inside = {id(module) for module in decoder.modules()}
        lists = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and id(module) in inside
        ]
        listed = max(lists, key=lambda item: sum(1 for _ in item[1].modules()))[0] if lists else "layers"
    return re.compile(rf"{re.escape(str(listed))}\.\d+\.")


def _awq(model: PreTrainedModel, quantization: Quantization) -> _Notes:
    settings = quantization.settings
    groups = GroupSettings.of(settings)
    skips = default_skips(model, settings.get("modules_to_not_convert"), add_defaults=True)
    for name, module in linear_modules(model, with_subclasses=True):
        if name not in skips:
            model.set_submodule(name, AWQLinear(LinearShape.of(module), groups))
    return ["AWQ runs on accelerators only", *_unpacked_experts(model, "AWQ does not quantize")]


# ------------------------------------------------------------------ floats


def _fine_grained(model: PreTrainedModel, quantization: Quantization) -> _Notes:
    settings = _settings_of(model, quantization)
    listed = settings.get("modules_to_not_convert") or settings.get("ignored_layers")
    skips = default_skips(model, renamed(model, listed) if listed else listed)
    dtype, dense_bytes = str(model.dtype).removeprefix("torch."), format_bytes(_num_bytes(model))
    if quantization.is_unpacked:
        _note_unpacking(model, skips)
        return [f"without kernels for FP8 (compute capability 8.9 and more) transformers unpacks it to {dtype}"]
    _embed_in_float8(model, settings.get("modules_to_convert") or (), skips)
    _fp8_modules(model, settings, skips)
    return [
        f"on cards below compute capability 8.9, and on cpu, transformers unpacks FP8 to {dtype}: {dense_bytes}; "
        "--gpus says which cards these are"
    ]


def _note_unpacking(model: PreTrainedModel, skips: Skips) -> None:
    """What Fp8Dequantize has on the device beside a weight: the packed one, a copy in float32, and their product.

    Of merged experts, which it unpacks one by one, it has all packed ones.
    """
    packed, wide = torch.float8_e4m3fn.itemsize, torch.float32.itemsize
    share = packed / model.dtype.itemsize
    for name, module in model.named_modules():
        if name in skips:
            continue
        if name.endswith(".experts"):
            largest = max((weight.numel() for weight in module.parameters(recurse=False)), default=0)
            note_conversion(module, Conversion(packed * largest, share))
        elif isinstance(module, nn.Linear):
            note_conversion(module, Conversion((packed + 2 * wide) * module.weight.numel(), share))


def _settings_of(model: PreTrainedModel, quantization: Quantization) -> dict[str, Any]:
    """As the model's config has them, which may say more than config.json."""
    completed = getattr(model.config, "quantization_config", None)
    return completed if isinstance(completed, dict) else quantization.settings


def _fp8_modules(model: PreTrainedModel, settings: dict[str, Any], skips: Skips) -> None:
    """transformers' replace_with_fp8_linear."""
    arguments = fine_grained_settings(settings)
    for name, module in list(model.named_modules()):
        replacement: nn.Module | None = None
        if isinstance(module, PackedExperts):
            continue
        with torch.device("meta"):
            if name.endswith(".experts") and name not in skips:
                replacement = FP8Experts(
                    getattr(module, "config", model.config.get_text_config()),
                    **arguments,
                    has_bias=getattr(module, "has_bias", False),
                    has_gate=getattr(module, "has_gate", True),
                    expert_dtype=settings.get("expert_dtype", "fp8"),
                )
            elif isinstance(module, nn.Linear) and name not in skips:
                replacement = _fp8_linear(module, arguments)
        if replacement is not None:
            model.set_submodule(name, replacement.requires_grad_(requires_grad=False))


def _fp8_linear(module: nn.Linear, arguments: dict[str, Any]) -> nn.Module | None:
    has_bias = module.bias is not None
    if type(module) is nn.Linear:
        return FP8Linear(module.in_features, module.out_features, **arguments, has_bias=has_bias)
    if "GroupedLinear" in type(module).__name__:
        groups = int(getattr(module, "n_groups", 1))
        return FP8GroupedLinear(module.in_features, module.out_features, groups, **arguments, has_bias=has_bias)
    return None


def _embed_in_float8(model: PreTrainedModel, endings: Any, skips: Skips) -> None:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Embedding and name.endswith(tuple(endings)) and name not in skips:
            with torch.device("meta"):
                table = finegrained_fp8.FP8Embedding(module.num_embeddings, module.embedding_dim, module.padding_idx)
            model.set_submodule(name, table)


def _fbgemm(model: PreTrainedModel, quantization: Quantization) -> _Notes:
    skips = default_skips(model, quantization.settings.get("modules_to_not_convert"))
    for name, module in linear_modules(model, with_subclasses=True):
        if name not in skips:
            model.set_submodule(name, FbgemmFp8Linear(LinearShape.of(module)))
    return ["FBGEMM's FP8 runs on cards from compute capability 9.0 on only"]


def _mxfp4(model: PreTrainedModel, quantization: Quantization) -> _Notes:
    skips = default_skips(model, quantization.settings.get("modules_to_not_convert"))
    layers = [(name, module) for name, module in fused_experts(model) if name not in skips]
    packed = {name: Mxfp4GptOssExperts(module) for name, module in layers if hasattr(module, "gate_up_proj_bias")}
    if quantization.is_unpacked:
        saved = sum(_num_bytes(module) - _num_bytes(packed[name]) for name, module in layers if name in packed)
        with_kernels = format_bytes(_num_bytes(model) - saved)
        for name, module in layers:
            if name in packed:  # where there is no room to unpack it on the device, this is done on the CPU
                note_conversion(module, Conversion(read_share=_num_bytes(packed[name]) / _num_bytes(module)))
        return [
            f"without the kernels for MXFP4 transformers unpacks it; with them (compute capability 7.5 and more, "
            f"triton, pip install kernels) it takes {with_kernels}"
        ]
    for name, module in packed.items():
        model.set_submodule(name, module)
    return (
        ["MXFP4 stays packed: it is taken that its kernels are there (triton, pip install kernels)"] if packed else []
    )


# ------------------------------------------------------------------ compressed-tensors


def _compressed(model: PreTrainedModel, quantization: Quantization) -> _Notes:
    dense_bytes = _num_bytes(model)
    _split_experts(model)
    groups = Groups(quantization.settings)
    tied = tied_modules(model)
    for name, module in linear_modules(model, with_subclasses=True):
        scheme = groups.scheme_of(name, module)
        if scheme is not None and name not in tied:
            model.set_submodule(name, CompressedLinear(LinearShape.of(module), scheme))
    unpack_before_forward(model)
    notes = [f"compressed-tensors unpacks all weights before the first forward: {format_bytes(dense_bytes)} then"]
    return notes + _unpacked_experts(model, "transformers unpacks while loading")


# ------------------------------------------------------------------ ModelOpt


def _modelopt(model: PreTrainedModel, quantization: Quantization) -> _Notes:
    settings = quantization.settings
    kinds = _ModelOptKinds(model, settings)
    for name, module in fused_experts(model):
        algorithm = kinds.of(name)
        if "NVFP4" in algorithm:
            model.set_submodule(name, NVFP4Experts(module, quantizes_inputs="A16" not in algorithm))
        elif "FP8" in algorithm:
            model.set_submodule(name, FP8PerTensorExperts(module))
    for name, module in linear_modules(model):
        algorithm = kinds.of(name)
        if "NVFP4" in algorithm:
            shape = LinearShape.of(module)
            model.set_submodule(name, NVFP4Linear(shape, quantizes_inputs="A16" not in algorithm))
        elif "FP8" in algorithm:
            model.set_submodule(name, ModelOptFP8Linear(LinearShape.of(module)))
    if settings.get("quant_method") == "fp8":
        _fp8_modules(model, _without_experts(settings), default_skips(model, None))
    algorithm = settings.get("quant_algo") or "quantized"
    return [f"transformers cannot load ModelOpt's {algorithm} weights; vLLM, SGLang and TensorRT-LLM can"]


def _without_experts(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != "expert_dtype"}


class _ModelOptKinds:
    """The algorithm of each module: one for all but what is excluded, or one for each that is listed."""

    def __init__(self, model: PreTrainedModel, settings: dict[str, Any]) -> None:
        excluded = settings.get("exclude_modules") or settings.get("ignore") or ()
        listed: dict[str, Any] = settings.get("quantized_layers") or {}
        self._excluded = Globs([*excluded, *renamed(model, excluded)])
        self._listed = {
            name: str(layer.get("quant_algo"))
            for name, layer in zip([*listed, *renamed(model, listed)], [*listed.values()] * 2, strict=True)
        }
        self._kept = default_skips(model, None)
        self._prefix = f"{model.base_model_prefix}."
        self._algorithm = "" if listed else str(settings.get("quant_algo") or "")

    def of(self, name: str) -> str:
        """ "" for a module that stays as it is."""
        if name in self._kept:
            return ""
        for known in (name, name.removeprefix(self._prefix)):
            if known in self._excluded:
                return ""
            if known in self._listed:
                return self._listed[known]
        return self._algorithm


_PACKERS: dict[str, Callable[[PreTrainedModel, Quantization], _Notes]] = {
    "bitsandbytes": _bitsandbytes,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fine_grained,
    "mxfp8": _fine_grained,
    "fbgemm_fp8": _fbgemm,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
}
