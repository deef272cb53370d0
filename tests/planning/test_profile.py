"""Profiles: kept between runs, and blocks put together that the model's code needs on one device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from devmap_cli.mapfile import MapWorkload
from devmap_cli.model.cache import cache_folder
from devmap_cli.model.load import load_spec
from devmap_cli.model.spec import ModelSpec
from devmap_cli.planning.blocks import blocks_of
from devmap_cli.planning.nouns import Block
from devmap_cli.planning.profile import Profile
from devmap_cli.planning.profiling import Profiler
from devmap_cli.simulation.recording import record
from devmap_cli.simulation.trace import Event, Trace
from devmap_cli.simulation.work import Work
from devmap_cli.simulation.workload import Workload
from tests.support.processes import Outcome, run_python

MakeToy = Callable[..., Path]
WORKLOAD = MapWorkload(1, 8, 8)


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVMAP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def spec(toy: MakeToy) -> ModelSpec:
    return load_spec(str(toy("qwen2")))


def kept() -> list[Path]:
    return sorted((cache_folder() / "profiles").glob("*.json"))


class Unbuildable(Profiler):
    def empty_model(self) -> Any:
        raise AssertionError("the model was built")


def test_a_profile_is_made_once(spec: ModelSpec) -> None:
    first = Profiler(spec).profile(WORKLOAD)
    assert first is not None
    assert first == Unbuildable(spec).profile(WORKLOAD)
    assert len(kept()) == 1


def test_other_workloads_and_cards_have_profiles_of_their_own(spec: ModelSpec) -> None:
    profiler = Profiler(spec)
    profiler.profile(WORKLOAD)
    profiler.profile(MapWorkload(1, 9, 8))
    profiler.profile(WORKLOAD, (9, 0))
    assert len(kept()) == 3


@pytest.mark.parametrize("damage", ["", "[]", "{}", "null", "7", '{"trace": {}, "groups": 3}', "cut"])
def test_a_damaged_profile_is_made_again(spec: ModelSpec, damage: str) -> None:
    profiler = Profiler(spec)
    first = profiler.profile(WORKLOAD)
    (path,) = kept()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else damage.encode())
    assert profiler.profile(WORKLOAD) == first
    assert path.read_bytes() == whole


def test_a_second_plan_imports_no_torch(devmap: Callable[..., Outcome], toy: MakeToy, tmp_path: Path) -> None:
    folder = toy("qwen2")
    arguments = ["plan", str(folder), "--max-memory", "sim:0:60MB,sim:1:60MB", "-o", str(tmp_path / "map.json")]
    code = (
        "import sys\nfrom devmap_cli.cli import invoke\n"
        f"code = invoke({arguments!r})\n"
        "print(code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    assert kept() == []
    assert devmap(*arguments).exit_code == 0
    assert len(kept()) == 1
    first = (tmp_path / "map.json").read_text()
    done = run_python("-c", code, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "0 False False", done.stderr
    assert (tmp_path / "map.json").read_text() == first


def test_what_cannot_be_rehearsed_has_a_reason_and_is_not_kept(toy: MakeToy) -> None:
    profiler = Profiler(load_spec(str(toy("t5"))))  # it does not say which token answers begin with
    assert profiler.profile(WORKLOAD) is None
    assert "decoder_start_token_id" in (profiler.reason or "")
    assert kept() == []


# ---------------------------------------------------------------- blocks that must be together


class Bound(nn.Module):
    """A model whose code mixes the weights of `one` and `two`; `apart` goes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.one, self.apart, self.two = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        text = SimpleNamespace(vocab_size=8)
        self.config = SimpleNamespace(
            vocab_size=8,
            model_type="bound",
            is_encoder_decoder=False,
            get_text_config=lambda *_, **__: text,
            name_or_path="",
            vision_config=None,
            _attn_implementation="sdpa",
        )
        self.dtype = torch.float32

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def can_generate(self) -> bool:
        return False

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        hidden = self.apart(self.embedding(input_ids))
        weight = self.one.weight + self.two.weight
        return torch.nn.functional.linear(hidden.to(weight.device), weight)


def test_blocks_whose_weights_meet_are_put_together() -> None:
    with torch.device("meta"):
        model = Bound()
    blocks = [("embedding",), ("one",), ("apart",), ("two",)]
    recording = record(model, blocks, Workload(1, 4, 1))
    assert recording.groups == ((0,), (1, 3), (2,))
    assert recording.trace.num_blocks == 3
    # one and two: 2 · (4·4 + 4) · 4 bytes
    assert sum(size for block, size in recording.trace.weights if block == 1) == 160


def test_a_model_that_fails_on_one_device_too_is_not_put_together_for_ever() -> None:
    class Failing(Bound):
        def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
            raise RuntimeError(f"no such thing: {input_ids.shape}")

    with torch.device("meta"):
        model = Failing()
    with pytest.raises(RuntimeError, match="no such thing"):
        record(model, [("embedding",), ("one",), ("apart",), ("two",)], Workload(1, 4, 1))


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_what_is_quantized_while_it_is_loaded_is_read_as_the_checkpoint_has_it(toy: MakeToy, scheme: str) -> None:
    stored, asked = (Profiler(load_spec(str(toy("qwen2")), quantize=name)).profile(WORKLOAD) for name in (None, scheme))
    assert stored is not None
    assert asked is not None
    assert asked.trace.read_bytes == stored.trace.read_bytes
    assert sum(size for _, size in asked.trace.weights) < sum(stored.trace.read_bytes)


def test_unpacked_fp8_is_read_as_the_checkpoint_has_it(toy: MakeToy) -> None:
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    folder = str(toy("qwen2", quantization_config=settings))
    packed, unpacked = (Profiler(load_spec(folder, kernels=kernels)).profile(WORKLOAD) for kernels in ((9, 0), (8, 0)))
    assert packed is not None
    assert unpacked is not None
    loaded = sum(size for _, size in unpacked.trace.weights)
    scales = sum(packed.trace.read_bytes) - sum(unpacked.trace.read_bytes)
    assert sum(unpacked.trace.read_bytes) < loaded
    assert 0 < scales < loaded / 50


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"}, 8),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, 16),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, 1024),
    ],
    ids=["nf4", "gptq", "awq"],
)
def test_unpacking_weights_for_a_prompt_is_work_that_takes_its_turn(
    toy: MakeToy, settings: dict[str, Any], rows: int
) -> None:
    """A layer's weights are written once in 16 bits, beside what the plain model moves; here they are most of it."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "max_position_embeddings": 2048}
    plain = load_spec(str(toy("qwen2", **sizes)))
    layer = next(n for n, block in enumerate(blocks_of(plain, 0, 1)) if block.fqns == ("model.layers.0",))
    weights_bytes = blocks_of(plain, 0, 1)[layer].weights_bytes
    moved = []
    for spec in (plain, load_spec(str(toy("qwen2", **sizes, quantization_config=settings)))):
        profile = Profiler(spec).profile(MapWorkload(1, rows, 2))
        assert profile is not None
        moved.append(profile.work["prefill"][layer].moving_bytes)
    assert 1.2 * weights_bytes < moved[1] - moved[0] < 2 * weights_bytes


PROFILE = Profile(
    trace=Trace(
        num_blocks=2,
        weights=((0, 1000), (1, 2000), (1, 500)),
        buffers=(),
        conversion_bytes=(0, 700),
        read_bytes=(1000, 5000),
        holders=(),
        phases={
            # block 1 holds 1024 of cache and 2048 more; the workspace counts for neither
            "prefill": (
                (Event.WORKSPACE, 1, 4096),
                (Event.ALLOCATE, 1, 1000),
                (Event.ALLOCATE, 1, 2000),
                (Event.FREE, 2, 0),
                (Event.CACHED, 1, 0),
            ),
            # then 1536 of cache in place of 1024, and for a moment both; block 0 takes 512
            "decode": (
                (Event.ALLOCATE, 1, 1500),
                (Event.FREE, 1, 0),
                (Event.ALLOCATE, 0, 100),
                (Event.CACHED, 3, 0),
                (Event.FREE, 4, 0),
                (Event.FREE, 3, 0),
            ),
        },
    ),
    groups=((0,), (1, 2)),
    work={"prefill": (Work(1, 2, 3), Work(4, 5, 6, 2)), "decode": (Work(), Work(7, 8, 9))},
    assumptions=("evenly",),
)


def test_what_each_block_needs() -> None:
    blocks = [
        Block(("a",), 1000, 9, streamed_bytes=400),
        Block(("b",), 2000, 9, streamed_bytes=300),
        Block(("c",), 500, 9, streamed_bytes=500),
    ]
    first, second = PROFILE.blocks(blocks)
    assert first == Block(("a",), 1000, transient_bytes=512, streamed_bytes=400)
    assert second == Block(
        ("b", "c"),
        2500,
        kv_cache_bytes=1536,
        transient_bytes=1024,
        streamed_bytes=500,
        load_transient_bytes=700,
        prompt_kv_cache_bytes=1024,
        prompt_transient_bytes=2048,
    )


def test_what_devices_take_once() -> None:
    # the workspace, and 24, 48 and 12 bytes that weights lose by rounding
    assert PROFILE.shared_bytes == 4096 + 24 + 48 + 12


def test_a_profile_survives_json() -> None:
    assert Profile.from_document(json.loads(json.dumps(PROFILE.to_document()))) == PROFILE


def test_the_blocks_of_a_profile_hold_all_weights(spec: ModelSpec) -> None:
    profile = Profiler(spec).profile(WORKLOAD)
    assert profile is not None
    whole = blocks_of(spec, 16, 1)
    blocks = profile.blocks(whole)
    assert sum(block.weights_bytes for block in blocks) == sum(block.weights_bytes for block in whole)
    assert [fqn for block in blocks for fqn in block.fqns] == [fqn for block in whole for fqn in block.fqns]
