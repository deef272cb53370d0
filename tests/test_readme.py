"""The README's examples say what the commands print, given the hub model that they name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub import Repo, loopback_hub
from tests.support.processes import run_devmap

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
CONFIGS = Path(__file__).parents[2] / "shared" / "corpus" / "configs"
_MANY = ("--solve", "--how-many")
_EXAMPLE = re.compile(r"```console\n\$ devmap (?P<command>(?:inspect|plan) [\w-]+/.*)\n(?P<output>(?:.*\n)*?)```")


def examples() -> list[tuple[str, str]]:
    """Each README command on a hub model, with the output that the README shows."""
    return [(match["command"], match["output"]) for match in _EXAMPLE.finditer(README)]


def marked() -> list[Any]:
    """The examples, those that rehearse many workloads or a large model marked as slow."""
    return [
        pytest.param(*example, marks=[pytest.mark.slow] if any(word in example[0] for word in _MANY) else [])
        for example in examples()
    ]


@pytest.mark.parametrize(("command", "output"), marked())
def test_example_is_real(command: str, output: str, tmp_path: Path) -> None:
    arguments = shlex.split(command)
    config = CONFIGS / arguments[1].replace("/", "__") / "config.json"
    if not config.is_file():
        pytest.skip(f"{config} is not here")
    with loopback_hub({arguments[1]: Repo("c" * 40, {"config.json": config.read_bytes()})}) as hub:
        env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "", "HF_TOKEN": ""}
        done = run_devmap(*arguments, cwd=tmp_path, env=env)
    assert "".join(f"{line.rstrip()}\n" for line in (done.stdout + done.stderr).splitlines()) == output


def test_there_are_examples() -> None:
    assert len(examples()) >= 3
