"""Caches grown at once are what they are after as many steps."""

from __future__ import annotations

import torch
from transformers import DynamicCache, EncoderDecoderCache, Gemma3TextConfig

from devmap_cli.simulation.backend import simulated_devices
from devmap_cli.simulation.cache_growth import grow, tensors_of

MIB = 1 << 20


def filled(cache: DynamicCache, num_layers: int, num_tokens: int, steps: int = 0) -> DynamicCache:
    """A cache of `num_tokens` at once and one more for each step."""
    for length in [num_tokens, *[1] * steps]:
        for layer in range(num_layers):
            states = torch.zeros(2, 3, length, 8, device="sim:0")
            cache.update(states, states, layer)
    return cache


def shapes(cache: DynamicCache | EncoderDecoderCache) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors_of(cache) if tensor.dim() >= 3]


def test_a_plain_cache_gets_longer() -> None:
    with simulated_devices([64 * MIB]) as machine:
        stepped = filled(DynamicCache(), 2, 10, steps=5)
        expected = machine.devices[0].use.allocated_bytes
        grown = filled(DynamicCache(), 2, 10)
        before = machine.devices[0].use.allocated_bytes - expected
        assert before < expected
        grow(grown, 5)
        assert shapes(grown) == shapes(stepped)
        assert grown.get_seq_length() == 15
        assert machine.devices[0].use.allocated_bytes == 2 * expected


def test_a_sliding_window_gets_no_longer_than_its_window() -> None:
    config = Gemma3TextConfig(
        num_hidden_layers=2, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    )
    with simulated_devices([64 * MIB]):
        for prompt, steps in ((4, 20), (4, 2), (20, 5)):
            stepped = filled(DynamicCache(config=config), 2, prompt, steps)
            grown = filled(DynamicCache(config=config), 2, prompt)
            grow(grown, steps)
            assert shapes(grown) == shapes(stepped)
            assert grown.get_seq_length() == stepped.get_seq_length() == prompt + steps


def test_the_cross_attention_does_not_grow() -> None:
    with simulated_devices([64 * MIB]):
        cache = EncoderDecoderCache(filled(DynamicCache(), 1, 3), filled(DynamicCache(), 1, 9))
        grow(cache, 4)
        assert [shape[2] for shape in shapes(cache)] == [7, 7, 9, 9]


def test_layers_among_others_that_keep_images_do_not_grow() -> None:
    with simulated_devices([64 * MIB]):
        cache = filled(DynamicCache(), 3, 9)
        grow(cache, 4, cross_attention_layers=[1])
        assert [shape[2] for shape in shapes(cache)] == [13, 13, 9, 9, 13, 13]


def test_layers_grow_one_after_the_other() -> None:
    with simulated_devices([64 * MIB]) as machine:
        cache = filled(DynamicCache(), 4, 100)
        machine.devices[0].reset_peak()
        grow(cache, 1)
        tensor = 38 * 512  # 2 x 3 x 101 x 8 float32 are 19392 B
        assert machine.devices[0].use.allocated_bytes == 8 * tensor
        assert machine.devices[0].peak.allocated_bytes <= 9 * tensor
