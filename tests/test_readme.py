"""The README's examples say what the commands print, given the hub model that they name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.support.hub import keep_config
from tests.support.processes import Outcome

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
CONFIGS = Path(__file__).parents[2] / "shared" / "corpus" / "configs"
_MANY = ("--solve", "--how-many")
_EXAMPLE = re.compile(r"```console\n\$ devmap (?P<command>(?:inspect|plan) [\w-]+/.*)\n(?P<output>(?:.*\n)*?)```")


def examples() -> list[tuple[str, str]]:
    """Each README command on a hub model, with the output that the README shows."""
    return [(match["command"], match["output"]) for match in _EXAMPLE.finditer(README)]


def marked() -> list[Any]:
    """The examples, those that rehearse many workloads marked as slow: solving does, and finding a way out."""
    return [
        pytest.param(
            command,
            output,
            marks=[pytest.mark.slow] if any(word in command for word in _MANY) or output.startswith("error:") else [],
        )
        for command, output in examples()
    ]


@pytest.mark.parametrize(("command", "output"), marked())
def test_example_is_real(
    devmap: Callable[..., Outcome], command: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = shlex.split(command)
    config = CONFIGS / arguments[1].replace("/", "__") / "config.json"
    if not config.is_file():
        pytest.skip(f"{config} is not here")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    keep_config(tmp_path / "hub", arguments[1], config.read_bytes())
    done = devmap(*arguments)
    assert "".join(f"{line.rstrip()}\n" for line in (done.stdout + done.stderr).splitlines()) == output


def test_there_are_examples() -> None:
    assert len(examples()) >= 3
