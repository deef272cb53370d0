"""Pins: grammar, rules files, and what they fix."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest

from devmap_cli.devices.device import CPU, Device
from devmap_cli.errors import RequestError
from devmap_cli.model.spec import ModelSpec, ModuleSpec, TensorSpec
from devmap_cli.planning.blocks import blocks_of
from devmap_cli.planning.pins import Pin, apply_pins, load_rules, parse_pin, parse_weights, todays_pins

if TYPE_CHECKING:
    from pathlib import Path

GPU0, GPU1 = Device("cuda", 0), Device("cuda", 1)
LAYERS = [f"model.layers.{index}" for index in range(12)]


def leaf(name: str) -> ModuleSpec:
    return ModuleSpec(name, "Linear", (TensorSpec("weight", (2,), "bfloat16", 4),))


def model(ties: tuple[tuple[str, ...], ...] = ()) -> ModelSpec:
    layers = tuple(ModuleSpec(str(index), "Layer", (), (leaf("mlp"),), True) for index in range(12))
    stack = ModuleSpec("layers", "ModuleList", (), layers)
    inner = ModuleSpec("model", "Model", (), (leaf("embed"), stack, ModuleSpec("dropout", "Dropout")))
    root = ModuleSpec("", "Root", (), (inner, leaf("lm_head")))
    return ModelSpec("m", None, "Root", "m", "bfloat16", root, ties=ties)


def fixed(spec: ModelSpec, *pins: Pin) -> dict[str, Device]:
    blocks = apply_pins(blocks_of(spec, 0, 1), pins, spec)
    return {block.fqns[0]: block.fixed for block in blocks if block.fixed is not None}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("lm_head", ["lm_head"]),
        ("model.layers", LAYERS),
        ("model.layers.*", LAYERS),
        ("model.layers.1", ["model.layers.1"]),
        ("model.layers.{0..2}", LAYERS[:3]),
        ("model.layers.{1,3..4}", [LAYERS[1], LAYERS[3], LAYERS[4]]),
        ("model.layers.1?", LAYERS[10:]),
        ("**.layers.11", LAYERS[11:]),
        ("model", ["model.embed", *LAYERS]),
        ("model.*", ["model.embed", *LAYERS]),
    ],
)
def test_a_pattern_pins_all_blocks_at_or_below_it(pattern: str, expected: list[str]) -> None:
    assert fixed(model(), parse_pin(f"{pattern}=1")) == dict.fromkeys(expected, GPU1)


def test_names_of_an_older_transformers_are_understood() -> None:
    spec = replace(model(), renamings=(("^transformer", "model"), ("^head", "lm_head")))
    pins = (parse_pin("transformer.layers.{0..2}=1"), parse_pin("head=0"), parse_pin("model.embed=1"))
    assert [pin.pattern for pin in todays_pins(pins, spec)] == ["model.layers.{0..2}", "lm_head", "model.embed"]
    assert fixed(spec, *pins) == {**dict.fromkeys(["model.embed", *LAYERS[:3]], GPU1), "lm_head": GPU0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model.visual", "is not MODULE=DEVICE"),
        ("=0", "is not MODULE=DEVICE"),
        ("model=tpu", "'tpu' is no device"),
        ("model.{0..2=0", "braces"),
        ("model.{9..2}=0", "no rising range"),
    ],
)
def test_text_that_is_no_pin(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        parse_pin(text)
    assert caught.value.hint


def test_a_pattern_inside_a_block_names_the_block() -> None:
    with pytest.raises(RequestError, match=r"inside model\.layers\.3, which is never split") as caught:
        fixed(model(), parse_pin("model.layers.3.mlp=0"))
    assert caught.value.hint == "pin the whole of it: --pin 'model.layers.3=0'"


def test_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(RequestError, match="matches no module") as caught:
        fixed(model(), parse_pin("model.layer.3=0"))
    assert "model.layers.3" in str(caught.value.hint)


def test_a_module_without_tensors_cannot_be_pinned() -> None:
    with pytest.raises(RequestError, match="holds no weights"):
        fixed(model(), parse_pin("model.dropout=0"))


def test_pins_that_disagree_are_refused() -> None:
    with pytest.raises(RequestError, match=r"model\.layers\.3=0 and model\.layers\.\*=1 disagree"):
        fixed(model(), parse_pin("model.layers.3=0"), parse_pin("model.layers.*=1"))


def test_pins_on_tied_modules_must_agree() -> None:
    spec = model(ties=(("model.embed.weight", "lm_head.weight"),))
    assert fixed(spec, parse_pin("lm_head=1")) == {"model.embed": GPU1}
    with pytest.raises(RequestError, match="shares weights"):
        fixed(spec, parse_pin("model.embed=0"), parse_pin("lm_head=1"))


def test_rules_are_read_and_the_command_line_wins(tmp_path: Path) -> None:
    rules = tmp_path / "rules.txt"
    rules.write_text("# where things go\nmodel.layers.{0..1} = 0\n\nlm_head=cpu  # slow\n")
    pins = load_rules(rules)
    assert [str(pin) for pin in pins] == ["model.layers.{0..1}=0", "lm_head=cpu"]
    assert fixed(model(), *pins, parse_pin("model.layers.1=1")) == {
        "model.layers.0": GPU0,
        "model.layers.1": GPU1,
        "lm_head": CPU,
    }


def test_bad_rules_name_the_line(tmp_path: Path) -> None:
    rules = tmp_path / "rules.txt"
    rules.write_text("lm_head=0\nmodel.layers\n")
    with pytest.raises(RequestError, match=r"rules\.txt:2"):
        load_rules(rules)
    with pytest.raises(RequestError, match="cannot read rules"):
        load_rules(tmp_path / "none.txt")


def test_weights() -> None:
    assert parse_weights(["0=0.5,1=2", "npu:3=.25"]) == {
        GPU0: Fraction(1, 2),
        GPU1: Fraction(2),
        Device("npu", 3): Fraction(1, 4),
    }


@pytest.mark.parametrize("text", ["0", "0=x", "0=0", "0=-1", "0=nan", "tpu=1", "0=1,0=2"])
def test_text_that_is_no_weight(text: str) -> None:
    with pytest.raises(RequestError):
        parse_weights([text])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model.layers.{0..99}=0", "model.layers.99 matches no module"),
        ("model.layers.[0-3]=0", "is not understood"),
    ],
)
def test_ranges_beyond_the_model_and_shell_ranges_are_refused(text: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        apply_pins(blocks_of(model(), 0, 1), [parse_pin(text)], model())
