"""Code that comes with a model runs only with the flag, and nothing is ever asked."""

from __future__ import annotations

import io
import os
import pty
import select
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from devmap_cli.cli import invoke
from devmap_cli.errors import RequestError
from devmap_cli.model.load import load_spec
from tests.support.toys import write_config

CODE = """
from pathlib import Path
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

Path({marker!r}).write_text("ran")


class OwnConfig(PreTrainedConfig):
    model_type = "own"


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(10, 4)
        self.post_init()

    def forward(self, input_ids=None, **kwargs):
        return self.embed_tokens(input_ids)
"""


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


@pytest.fixture
def own_model(tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose config.json names classes in a file beside it; importing that file leaves a mark."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel", "AutoModelForCausalLM": "own.OwnModel"}
    folder = write_config(
        tmp_path / "own-model", {"model_type": "own", "architectures": ["OwnModel"], "auto_map": auto_map}
    )
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    return folder


def test_it_is_refused_and_not_run(own_model: Path, marker: Path) -> None:
    with pytest.raises(RequestError, match="needs code from its own repository") as caught:
        load_spec(str(own_model))
    assert caught.value.hint == "read that code, then add --trust-remote-code"
    assert not marker.exists()


def test_a_known_type_does_not_need_it(toy: Callable[..., Path], marker: Path) -> None:
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    folder = toy("qwen2", auto_map=auto_map)
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    assert load_spec(str(folder)).class_name == "Qwen2ForCausalLM"
    assert not marker.exists()


def test_with_the_flag_it_runs(own_model: Path, marker: Path) -> None:
    spec = load_spec(str(own_model), trust_remote_code=True)
    assert marker.read_text() == "ran"
    assert spec.class_name == "OwnModel"
    # 10 x 4 in float32
    assert [(name, tensor.num_bytes) for name, tensor in spec.tensors()] == [("embed_tokens.weight", 160)]


def test_stdin_is_not_read(own_model: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = io.StringIO("y\ny\n")
    monkeypatch.setattr(sys, "stdin", answers)
    with pytest.raises(RequestError):
        load_spec(str(own_model))
    assert answers.tell() == 0
    assert not marker.exists()


def test_nothing_is_asked_on_a_terminal(
    own_model: Path, marker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, b"yes\ny\n")  # what a hasty user would type at a prompt
    try:
        with (
            open(theirs, encoding="utf-8", closefd=False) as stdin,
            open(theirs, "w", encoding="utf-8", closefd=False) as stdout,
        ):
            monkeypatch.setattr(sys, "stdin", stdin)
            monkeypatch.setattr(sys, "stdout", stdout)
            assert sys.stdin.isatty()
            assert invoke(["inspect", str(own_model)]) == 2
            assert select.select([theirs], [], [], 0)[0]  # the answers wait to this day
        assert os.read(theirs, 9) == b"yes\n"
    finally:
        os.close(theirs)
        os.close(ours)
    assert capsys.readouterr().err.startswith("error: ")
    assert not marker.exists()
