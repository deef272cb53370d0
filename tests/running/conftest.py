"""Tiny random models with a tiny tokenizer, made once: real classes, real weight files, no hub."""

from __future__ import annotations

import shutil
import string
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from devmap_cli.devices.device import Device
from devmap_cli.mapfile import MapFile
from devmap_cli.model.load import load_spec
from devmap_cli.model.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHAT_TEMPLATE = (
    "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
LETTERS = string.ascii_letters + "".join(map(chr, range(0x100, 0x100 + 204)))
SPECIAL = ("<pad>", "</s>", "<user>", "<bot>")
VOCABULARY = len(SPECIAL) + len(LETTERS)
"""260, one token a letter: whatever a random model says is text that streams at once."""


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text: number for number, text in enumerate((*SPECIAL, *LETTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast
    fast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<user>", "<bot>"],
    ).save_pretrained(folder)


def build(name: str) -> PreTrainedModel:
    import torch
    import transformers

    torch.manual_seed(0)
    tokens = {"vocab_size": VOCABULARY, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2}
    any_of: Any = transformers
    if name == "llama":
        config = any_of.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            **tokens,
        )
        return any_of.LlamaForCausalLM(config)  # type: ignore[no-any-return]
    if name == "gpt2":
        return any_of.GPT2LMHeadModel(  # type: ignore[no-any-return]
            any_of.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **tokens)
        )
    if name == "t5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        return any_of.T5ForConditionalGeneration(  # type: ignore[no-any-return]
            any_of.T5Config(decoder_start_token_id=0, **sizes, **tokens)
        )
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    return any_of.BertForMaskedLM(any_of.BertConfig(**sizes, **tokens))  # type: ignore[no-any-return]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads, and lose a lot to them on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with models that are only read."""
    folders = {}
    for name in ("llama", "gpt2", "t5", "bert"):
        folders[name] = tmp_path_factory.mktemp(name)
        build(name).save_pretrained(folders[name])
        save_tokenizer(folders[name])
    return folders


@pytest.fixture
def broken(models: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the Llama model for a test to break."""
    return Path(shutil.copytree(models["llama"], tmp_path / "model"))


def spec_of(folder: Path) -> ModelSpec:
    return load_spec(str(folder))


def spread(spec: ModelSpec, *names: str) -> MapFile:
    """A bare map: the parts between root and no-split blocks, dealt out over devices `names` in module order.

    Tied weights stay with the first: everything that shares them goes to the first device.
    """
    devices = [Device.parse(name) for name in names]
    shared = {tensor.rpartition(".")[0] for group in spec.ties for tensor in group}
    parts: list[str] = []
    for fqn, module in spec.modules():
        if any(fqn == part or fqn.startswith(part + ".") for part in parts):
            continue
        if module.no_split or not module.children:
            parts.append(fqn)
    parts = [part for part in parts if part]
    return MapFile(
        {part: devices[0] if part in shared else devices[index % len(devices)] for index, part in enumerate(parts)}
    )
