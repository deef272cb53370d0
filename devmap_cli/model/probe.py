"""One forward of the empty model on shapes alone: the order in which modules run, and what their cache keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from devmap_cli.model.spec import KvCacheSpec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Unusual lengths, so that a cache dimension that equals one of them is the length and nothing else.
_PROMPT_TOKENS = 13
_DECODER_TOKENS = 11
_LENGTHS = (_PROMPT_TOKENS, _DECODER_TOKENS)


@dataclass(frozen=True, slots=True)
class Probe:
    """What a forward showed. `kv_cache` is None, with the reason in `note`, where no decoder got through."""

    execution_order: tuple[str, ...]
    output_bytes_per_token: dict[str, int]
    kv_cache: tuple[KvCacheSpec, ...] | None
    note: str | None = None


def probe(model: PreTrainedModel) -> Probe:
    """Run one text-only forward of `model`, which lies on the meta device, and watch it."""
    import torch

    order: dict[str, None] = {}
    outputs: dict[str, int] = {}
    caches: list[Any] = []
    note = None

    def leave(name: str, output: Any) -> None:
        if (cache := getattr(output, "past_key_values", None)) is not None:
            caches.append(cache)
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, torch.Tensor) and first.dim() == 3 and first.shape[1] in _LENGTHS:
            outputs.setdefault(name, first.nbytes // first.shape[1])

    hooks = []
    for name, module in model.named_modules():
        if name:
            hooks.append(module.register_forward_pre_hook(lambda _m, _args, name=name: order.setdefault(name)))
            hooks.append(module.register_forward_hook(lambda _m, _args, out, name=name: leave(name, out)))
    try:
        with torch.no_grad(), _shapes_only():
            leave("", model(**_inputs(model), **({"use_cache": True} if model.can_generate() else {})))
    except Exception as error:  # noqa: BLE001 - any model code may fail without real inputs; its tree still stands
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if not caches:
            return Probe((), {}, None, f"module order is by definition and the KV cache unknown: {reason}")
        note = f"a forward of text alone fails after the decoder: {reason}"
    finally:
        for hook in hooks:
            hook.remove()
    return Probe(tuple(order), outputs, _kv_cache(model, caches[-1] if caches else None), note)


def _inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    import torch

    config = model.config
    inputs: dict[str, Any] = {}
    if model.main_input_name == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 1500)
        inputs["input_features"] = torch.empty(1, config.num_mel_bins, frames, device="meta", dtype=model.dtype)
    else:
        inputs["input_ids"] = torch.ones(1, _PROMPT_TOKENS, dtype=torch.long, device="meta")
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.ones(1, _DECODER_TOKENS, dtype=torch.long, device="meta")
    return inputs


def _shapes_only() -> Any:
    """A mode in which code that asks an empty tensor for its value is told 1, or True.

    Experts are multiplied in bfloat16, the only dtype for which PyTorch knows the shape of that without a device.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Answering(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
                return torch.ones((), dtype=args[0].dtype).item()
            if func is torch.ops.aten._grouped_mm.default:
                product = func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **(kwargs or {}))
                return product.to(args[0].dtype)
            return func(*args, **(kwargs or {}))

    mode: Any = Answering
    return mode()


def _kv_cache(model: PreTrainedModel, cache: Any) -> tuple[KvCacheSpec, ...] | None:
    """What each layer's cache keeps, charged to the module that fills it."""
    if cache is None:
        return None if model.can_generate() else ()
    caches = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    by_layer: dict[int, list[Any]] = {}
    for part in [cache] if caches[0] is None else caches:
        for index, layer in enumerate(getattr(part, "layers", ())):
            by_layer.setdefault(index, []).append(layer)
    owners = _layer_owners(model)
    found = [_layer_cache(owners[index], layers) for index, layers in sorted(by_layer.items()) if index in owners]
    if len(found) != len(by_layer):
        return None
    return tuple(entry for entry in found if entry.bytes_per_token or entry.fixed_bytes)


def _layer_owners(model: PreTrainedModel) -> dict[int, str]:
    """The fqn of the layer with each cache index.

    A layer is the element of a module list; the one meant holds the attention (or mixer) with that `layer_idx`, and
    lies in the decoder where there is an encoder too.
    """
    decoder = model.get_decoder()
    owners: dict[int, str] = {}
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in owners:
            continue
        parts = name.split(".")
        if str(index) in parts and (decoder is model or _contains(decoder, module)):
            owners[index] = ".".join(parts[: parts.index(str(index)) + 1])
    return owners


def _contains(outer: torch.nn.Module, inner: torch.nn.Module) -> bool:
    return any(module is inner for module in outer.modules())


def _layer_cache(fqn: str, layers: list[Any]) -> KvCacheSpec:
    per_token = fixed = 0
    windows = [window for layer in layers if isinstance(window := getattr(layer, "sliding_window", None), int)]
    lengths = {*_LENGTHS, *(window - 1 for window in windows if window <= max(_LENGTHS))}
    for layer in layers:
        for tensor in _tensors(vars(layer).values()):
            tokens = next((n for n in tensor.shape[1:] if n in lengths), None)
            if tokens is None:
                fixed += tensor.nbytes
            else:
                per_token += tensor.nbytes // tokens
    return KvCacheSpec(fqn, per_token, fixed, min(windows) - 1 if windows else None)


def _tensors(values: Any) -> list[torch.Tensor]:
    """All tensors of rank 2 and more in nested lists, dicts and values."""
    import torch

    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found += [value] if value.dim() > 1 else []
        elif isinstance(value, dict):
            found += _tensors(value.values())
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
