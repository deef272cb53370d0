"""Cutting toy models into blocks, and folding placements into device maps."""

from __future__ import annotations

import pytest

from devmap_cli.devices.budgets import Budgets
from devmap_cli.devices.device import CPU, Device
from devmap_cli.model.spec import KvCacheSpec, ModelSpec, ModuleSpec, TensorSpec
from devmap_cli.planning.blocks import blocks_of, device_map_of
from devmap_cli.planning.nouns import Block, Placement

GPU0, GPU1 = Device("cuda", 0), Device("cuda", 1)


def tensor(name: str, num_bytes: int, is_buffer: bool = False) -> TensorSpec:
    return TensorSpec(name, (num_bytes // 2,), "bfloat16", num_bytes, is_buffer)


def leaf(name: str, num_bytes: int) -> ModuleSpec:
    return ModuleSpec(name, "Linear", (tensor("weight", num_bytes),))


def layer(name: str, no_split: bool = True) -> ModuleSpec:
    # 40 + 60 = 100 bytes
    return ModuleSpec(name, "Layer", (), (leaf("attn", 40), leaf("mlp", 60)), no_split)


def stack(name: str, count: int, no_split: bool = True) -> ModuleSpec:
    return ModuleSpec(name, "ModuleList", (), tuple(layer(str(index), no_split) for index in range(count)))


def spec_of(root: ModuleSpec, **fields: object) -> ModelSpec:
    return ModelSpec("toy", None, "Toy", "toy", "bfloat16", root, **fields)  # type: ignore[arg-type]


def decoder(no_split: bool = True) -> ModuleSpec:
    rotary = ModuleSpec("rotary_emb", "Rotary", (tensor("inv_freq", 8, is_buffer=True),))
    children = (leaf("embed", 200), stack("layers", 4, no_split), leaf("norm", 10), rotary)
    model = ModuleSpec("model", "Decoder", (), (*children, ModuleSpec("dropout", "Dropout")))
    return ModuleSpec("", "ForCausalLM", (), (model, leaf("lm_head", 200)))


_LAYERS = tuple(name for index in range(4) for name in (f"model.layers.{index}", f"model.layers.{index}.attn"))
EXECUTED = ("", "model", "model.embed", "model.rotary_emb", *_LAYERS)
DECODER_ORDER = (*EXECUTED, "model.norm", "lm_head")


def names(blocks: tuple[Block, ...]) -> list[str]:
    return [block.fqns[0] for block in blocks]


def placed(blocks: tuple[Block, ...], *devices: Device) -> Placement:
    return Placement("manual", blocks, devices, Budgets.of({GPU0: 9999, GPU1: 9999, CPU: 9999}))


def test_blocks_are_in_execution_order_and_buffers_count() -> None:
    blocks = blocks_of(spec_of(decoder(), execution_order=DECODER_ORDER), 0, 1)
    layers = [f"model.layers.{index}" for index in range(4)]
    assert names(blocks) == ["model.embed", "model.rotary_emb", *layers, "model.norm", "lm_head"]
    assert [block.weights_bytes for block in blocks] == [200, 8, 100, 100, 100, 100, 10, 200]


def test_without_execution_order_the_definition_decides() -> None:
    blocks = blocks_of(spec_of(decoder()), 0, 1)
    assert names(blocks)[-3:] == ["model.norm", "model.rotary_emb", "lm_head"]


def test_without_no_split_modules_the_elements_of_stacks_are_blocks() -> None:
    blocks = blocks_of(spec_of(decoder(no_split=False), execution_order=DECODER_ORDER), 0, 1)
    assert "model.layers.0" in names(blocks)
    assert "model.layers.0.attn" not in names(blocks)


def test_tied_tensors_make_one_block_and_count_once() -> None:
    spec = spec_of(decoder(), execution_order=DECODER_ORDER, ties=(("model.embed.weight", "lm_head.weight"),))
    first = blocks_of(spec, 0, 1)[0]
    assert first.fqns == ("model.embed", "lm_head")
    assert first.weights_bytes == 200


def test_kv_cache_counts_at_its_layer() -> None:
    caches = (KvCacheSpec("model.layers.1.attn", 3), KvCacheSpec("model.layers.2", 3, max_tokens=10))
    blocks = blocks_of(spec_of(decoder(), execution_order=DECODER_ORDER, kv_cache=caches), 100, 2)
    # layer 1: 2 sequences x 100 tokens x 3 bytes; layer 2 keeps 10 tokens
    assert [block.kv_cache_bytes for block in blocks] == [0, 0, 0, 600, 60, 0, 0, 0]


def test_a_branch_that_is_not_executed_stays_before_what_it_feeds() -> None:
    tower = ModuleSpec("visual", "Tower", (), (leaf("patch", 20), stack("blocks", 2)))
    model = ModuleSpec("model", "Model", (), (tower, *decoder().children[0].children))
    spec = spec_of(ModuleSpec("", "VL", (), (model, leaf("lm_head", 200))), execution_order=DECODER_ORDER)
    towers = ["model.visual.patch", "model.visual.blocks.0", "model.visual.blocks.1"]
    assert names(blocks_of(spec, 0, 1))[:4] == [*towers, "model.embed"]


def test_an_unexecuted_leaf_stays_after_its_preceding_sibling() -> None:
    order = tuple(name for name in DECODER_ORDER if name != "model.norm")
    assert names(blocks_of(spec_of(decoder(), execution_order=order), 0, 1))[-3:] == [
        "model.layers.3",
        "model.norm",
        "lm_head",
    ]


def test_a_module_with_tensors_and_children_is_whole() -> None:
    mixed = ModuleSpec("mixer", "Mixer", (tensor("scale", 4),), (leaf("a", 10), leaf("b", 10)))
    blocks = blocks_of(spec_of(ModuleSpec("", "Root", (), (mixed, leaf("head", 6)))), 0, 1)
    assert [(block.fqns, block.weights_bytes) for block in blocks] == [(("mixer",), 24), (("head",), 6)]


def test_a_module_around_most_of_the_model_is_cut_and_its_tensors_are_a_block() -> None:
    encoder = ModuleSpec("encoder", "Encoder", (tensor("cls", 4), tensor("pos", 6)), (stack("layers", 3),))
    spec = spec_of(ModuleSpec("", "Root", (), (encoder, leaf("head", 6))))
    blocks = blocks_of(spec, 0, 1)
    assert [(block.fqns, block.weights_bytes) for block in blocks[:2]] == [
        (("encoder.cls", "encoder.pos"), 10),
        (("encoder.layers.0",), 100),
    ]
    device_map = device_map_of(spec, placed(blocks, GPU0, GPU0, GPU1, GPU1, GPU1))
    assert device_map == {
        "encoder.cls": 0,
        "encoder.pos": 0,
        "encoder.layers.0": 0,
        "encoder.layers.1": 1,
        "encoder.layers.2": 1,
        "head": 1,
    }


def test_a_map_folds_all_but_the_main_stack() -> None:
    tower = ModuleSpec("visual", "Tower", (), (leaf("patch", 20), stack("blocks", 1)))
    model = ModuleSpec("model", "Model", (), (tower, *decoder().children[0].children))
    spec = spec_of(ModuleSpec("", "VL", (), (model, leaf("lm_head", 200))), execution_order=DECODER_ORDER)
    blocks = blocks_of(spec, 0, 1)
    # visual.patch, visual.blocks.0, embed, rotary, 4 layers, norm, lm_head
    devices = (GPU0, GPU0, GPU0, GPU1, GPU0, GPU1, GPU1, CPU, GPU1, GPU1)
    assert list(device_map_of(spec, placed(blocks, *devices)).items()) == [
        ("model.visual", 0),
        ("model.embed", 0),
        ("model.layers.0", 0),
        ("model.layers.1", 1),
        ("model.layers.2", 1),
        ("model.layers.3", "cpu"),
        ("model.norm", 1),
        ("model.rotary_emb", 1),
        ("lm_head", 1),
    ]


def test_on_one_device_the_layers_stay_named() -> None:
    spec = spec_of(decoder(), execution_order=DECODER_ORDER)
    blocks = blocks_of(spec, 0, 1)
    device_map = device_map_of(spec, placed(blocks, *[GPU1] * len(blocks)))
    assert [key for key in device_map if "layers" in key] == [f"model.layers.{index}" for index in range(4)]
    assert set(device_map.values()) == {1}


@pytest.mark.parametrize("embedding", ["", "model.embed"])
def test_a_large_tower_on_one_device_is_one_key_for_its_inputs_to_come_there(embedding: str) -> None:
    tower = ModuleSpec("visual", "Tower", (), (leaf("patch", 20), stack("blocks", 4)))
    model = ModuleSpec("model", "Model", (), (tower, *decoder().children[0].children))
    root = ModuleSpec("", "VL", (), (model, leaf("lm_head", 200)))
    spec = spec_of(root, execution_order=DECODER_ORDER, token_embedding=embedding)
    blocks = blocks_of(spec, 0, 1)
    devices = [GPU0 if block.fqns[0].startswith("model.visual") else GPU1 for block in blocks]
    keys = list(device_map_of(spec, placed(blocks, *devices)))
    assert ("model.visual" in keys) == bool(embedding)
    assert "model.layers.0" in keys
    cut = device_map_of(spec, placed(blocks, GPU1, *devices[1:]))
    assert (cut["model.visual.patch"], cut["model.visual.blocks"] if embedding else cut["model.visual.blocks.3"]) == (
        1,
        0,
    )


def test_a_model_that_is_one_block_has_the_root_as_its_key() -> None:
    spec = spec_of(ModuleSpec("", "Linear", (tensor("weight", 4),)))
    blocks = blocks_of(spec, 0, 1)
    assert blocks == (Block(("",), 4, streamed_bytes=4),)
    assert device_map_of(spec, placed(blocks, GPU0)) == {"": 0}


def test_a_model_without_tensors_has_no_blocks() -> None:
    spec = spec_of(ModuleSpec("", "Empty"))
    assert blocks_of(spec, 0, 1) == ()
    assert device_map_of(spec, placed(())) == {}
