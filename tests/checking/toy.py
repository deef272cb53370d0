"""A model with a known size, written by hand, for the judge."""

from __future__ import annotations

from devmap_cli.devices.device import Device
from devmap_cli.model.spec import ModelSpec, ModuleSpec, TensorSpec

GPU_0, GPU_1, CPU, DISK = (Device.parse(name) for name in ("0", "1", "cpu", "disk"))


def tensor(name: str, num_bytes: int, *, is_buffer: bool = False) -> TensorSpec:
    return TensorSpec(name, (num_bytes // 4,), "float32", num_bytes, is_buffer)


def layer(name: str) -> ModuleSpec:
    """100 bytes: 60 of attention and 40 of MLP."""
    return ModuleSpec(
        name,
        "Layer",
        children=(
            ModuleSpec("attn", "Attention", (tensor("weight", 60),)),
            ModuleSpec("mlp", "Mlp", (tensor("weight", 40),)),
        ),
        no_split=True,
    )


# 200 embedding + 11 layers of 100 + 8 norm + 16 rotary buffer = 1,324 bytes; lm_head shares the embedding's 200
SPEC = ModelSpec(
    model_id="toy",
    revision=None,
    class_name="Toy",
    model_type="toy",
    dtype="float32",
    root=ModuleSpec(
        "",
        "Toy",
        children=(
            ModuleSpec(
                "model",
                "Base",
                children=(
                    ModuleSpec("embed", "Embedding", (tensor("weight", 200),)),
                    ModuleSpec("layers", "ModuleList", children=tuple(layer(str(index)) for index in range(11))),
                    ModuleSpec("norm", "Norm", (tensor("weight", 8),)),
                    ModuleSpec("rotary_emb", "Rotary", (tensor("inv_freq", 16, is_buffer=True),)),
                ),
            ),
            ModuleSpec("lm_head", "Linear", (tensor("weight", 200),)),
        ),
    ),
    ties=(("model.embed.weight", "lm_head.weight"),),
)
WHOLE = {
    "model.embed": GPU_0,
    **{f"model.layers.{index}": GPU_0 if index < 5 else GPU_1 for index in range(11)},
    "model.norm": GPU_1,
    "model.rotary_emb": GPU_0,
    "lm_head": GPU_0,
}
