"""The lines of the layer tree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from devmap_cli.model.load import load_spec
from devmap_cli.render.tree import name_ranges, rows
from devmap_cli.render.tree import summary as summary_of

MakeToy = Callable[..., Path]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("visual",), "visual"),
        (("0",), "0"),
        (("0", "1", "2"), "0-2"),
        (("0", "2", "3"), "0,2-3"),
        (("0", "2", "4", "6"), "0,2,4,6"),
        (("0", "2", "4", "6", "8"), "0,2,…,8"),
    ],
)
def test_numbers_become_ranges(names: tuple[str, ...], text: str) -> None:
    assert name_ranges(names) == text


def titles(folder: Path, **options: object) -> list[str]:
    depth, expand = options.get("depth"), bool(options.get("expand"))
    assert depth is None or isinstance(depth, int)
    return [row.title for row in rows(load_spec(str(folder)), depth=depth, expand=expand)]


def test_equal_layers_are_folded(toy: MakeToy) -> None:
    assert titles(toy("qwen2")) == [
        "Qwen2ForCausalLM",
        "├── model",
        "│   ├── embed_tokens",
        "│   ├── layers.0-3",
        "│   ├── norm",
        "│   └── rotary_emb",
        "└── lm_head",
    ]


def test_or_each_is_shown(toy: MakeToy) -> None:
    found = titles(toy("qwen2"), expand=True)
    assert [title for title in found if "layers" in title] == [f"│   ├── layers.{index}" for index in range(4)]


def test_layers_that_differ_are_not_folded_together(toy: MakeToy) -> None:
    found = titles(toy("qwen3_next"))
    assert [title for title in found if "layers" in title] == ["│   ├── layers.0-2", "│   ├── layers.3"]


@pytest.mark.parametrize(("depth", "shown"), [(0, 1), (1, 3), (2, 7)])
def test_depth_limits_the_levels(toy: MakeToy, depth: int, shown: int) -> None:
    assert len(titles(toy("qwen2"), depth=depth)) == shown


def test_depth_also_opens_what_may_not_be_split(toy: MakeToy) -> None:
    found = titles(toy("qwen2"), depth=4)
    assert "│   │   ├── self_attn" in found
    assert "│   │   │   ├── q_proj" in found


def test_parameters_outside_a_layer_list_stay(toy: MakeToy) -> None:
    rendered = [row.fqn for row in rows(load_spec(str(toy("qwen2_5_vl"))))]
    assert "model.visual.blocks.0" in rendered
    assert "model.visual.merger" in rendered


def test_the_summary_names_what_matters(toy: MakeToy) -> None:
    from rich.console import Console

    console = Console(width=200, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115 - as long as the test
    console.print(summary_of(load_spec(str(toy("gemma3")))))
    text = console.export_text()
    console.file.close()
    # 264,576 bytes of parameters and 130 of buffers are 258.5 KiB; 3·7·128 + 4,096·128 bytes are 514.6 KiB
    assert "132,288 parameters, 258.5 KiB" in text
    assert "model.embed_tokens.weight = lm_head.weight" in text
    assert "Gemma3DecoderLayer" in text
    assert "512 B per token and sequence (3 of 4 layers keep at most 7 tokens); 514.6 KiB at 4,096 tokens" in text
    assert "5, 130 B" in text
