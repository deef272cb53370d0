"""Help, completions and README tell the same commands and options."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer import Context
from typer.main import get_command

from devmap_cli.cli.app import make_app
from devmap_cli.cli.options import Strategy
from devmap_cli.planning.strategies import STRATEGIES
from tests.surface import README, ROOT, files

ROOT_COMMAND = get_command(make_app())
COMMANDS: dict[str, object] = dict(ROOT_COMMAND.commands)  # type: ignore[attr-defined]  # the root is a group


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_generated_file_is_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == files()[path], "run: make completions"


def test_readme_shows_the_help_of_every_command() -> None:
    shown = re.findall(r"^\$ devmap ([a-z]+) --help$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(shown) == sorted(COMMANDS)


def _readme_commands() -> list[str]:
    lines = re.findall(r"^\$ (devmap .*)$", README.read_text(encoding="utf-8"), re.MULTILINE)
    return [part.strip() for line in lines for part in re.split(r"\s\|\s", line)]


@pytest.mark.parametrize("line", _readme_commands())
def test_readme_command_is_accepted(line: str) -> None:
    name, *arguments = shlex.split(line.partition(" > ")[0])[1:]
    if not name.startswith("-"):
        COMMANDS[name].make_context(name, arguments, parent=Context(ROOT_COMMAND), resilient_parsing=True)  # type: ignore[attr-defined]
        unknown = {word for word in arguments if word.startswith("--")} - _options(name)
        assert not unknown


def _options(name: str) -> set[str]:
    command = COMMANDS[name]
    parameters = command.get_params(Context(command, help_option_names=["-h", "--help"]))  # type: ignore[attr-defined, arg-type]
    return {option for parameter in parameters for option in parameter.opts}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_name_every_command_and_option(shell: str) -> None:
    (path,) = [
        path
        for path in (ROOT / "completions").iterdir()
        if shell in path.name or (shell == "zsh" and path.name == "_devmap")
    ]
    text = path.read_text(encoding="utf-8")
    for name in COMMANDS:
        assert name in text
        for option in _options(name):
            assert option.lstrip("-") in text


def test_bash_completion_completes() -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not here")
    script = """
source completions/devmap.bash
function=$(complete -p devmap | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=(devmap plan --strategy ba); COMP_CWORD=3; $function devmap ba --strategy; echo "${COMPREPLY[@]}"
COMP_WORDS=(devmap in); COMP_CWORD=1; COMPREPLY=(); $function devmap in devmap; echo "${COMPREPLY[@]}"
"""
    done = subprocess.run([bash, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["balanced", "balanced_low_0", "inspect"]


def test_strategy_choices_are_the_planners() -> None:
    assert [choice.value for choice in Strategy] == [*STRATEGIES, "all"]
