"""What is known of a model whose forward fails without real inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from devmap_cli.model.empty import build_empty, load_config
from devmap_cli.model.probe import Probe, probe
from devmap_cli.model.reference import resolve


def probe_failing_at(folder: Path, module: str) -> Probe:
    reference = resolve(str(folder))
    config = load_config(reference, trust_remote_code=False)
    model = build_empty(reference, config, "bfloat16", trust_remote_code=False)

    def fail(*_: Any) -> None:
        raise ValueError("needs an image\nand more")

    model.get_submodule(module).register_forward_pre_hook(fail)
    return probe(model)


def test_a_failure_in_a_layer_leaves_order_and_cache_unknown(toy: Callable[..., Path]) -> None:
    found = probe_failing_at(toy("qwen2"), "model.layers.1.mlp")
    assert (found.execution_order, found.output_bytes_per_token, found.kv_cache) == ((), {}, None)
    assert found.note == "module order is by definition and the KV cache unknown: needs an image"


def test_a_failure_after_the_decoder_leaves_them_known(toy: Callable[..., Path]) -> None:
    found = probe_failing_at(toy("qwen2"), "lm_head")
    assert found.execution_order.index("model.layers.3") < found.execution_order.index("model.norm")
    assert [layer.bytes_per_token for layer in found.kv_cache or ()] == [128] * 4
    assert found.note == "a forward of text alone fails after the decoder: needs an image"


def test_no_hook_stays_behind(toy: Callable[..., Path]) -> None:
    reference = resolve(str(toy("qwen2")))
    config = load_config(reference, trust_remote_code=False)
    model = build_empty(reference, config, "bfloat16", trust_remote_code=False)
    assert probe(model) == probe(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
