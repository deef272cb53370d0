"""Static completions for bash, zsh and fish, made from the commands themselves.

shtab makes completions from an argparse parser, so the Typer commands are told again as one; the scripts it writes
never start Python.
"""

from __future__ import annotations

import argparse
from enum import Enum
from typing import Any

FILES = {"bash": "devmap.bash", "zsh": "_devmap", "fish": "devmap.fish"}
_PATHS = {"FILE": "FILE", "FOLDER": "DIRECTORY", "MODEL": "DIRECTORY"}


def completions() -> dict[str, str]:
    """The text of each completion script, by the shell's name."""
    import shtab

    parser = _parser()
    return {shell: shtab.complete(parser, shell).rstrip() + "\n" for shell in FILES}


def _parser() -> argparse.ArgumentParser:
    from typer.main import get_command

    from devmap_cli.cli.app import make_app

    root: Any = get_command(make_app())
    parser = argparse.ArgumentParser("devmap", add_help=False)
    _add_parameters(parser, root)
    commands = parser.add_subparsers()
    for name, command in root.commands.items():
        one = commands.add_parser(name, help=command.get_short_help_str(limit=100), add_help=False)
        _add_parameters(one, command)
    return parser


def _add_parameters(parser: argparse.ArgumentParser, command: Any) -> None:
    import shtab
    from typer import Context

    for parameter in command.get_params(Context(command, help_option_names=["-h", "--help"])):
        metavar = parameter.metavar or ""
        text = getattr(parameter, "help", None)
        settings: dict[str, Any] = {"help": text and text.replace("%", "%%")}  # argparse expands %
        is_flag = getattr(parameter, "is_flag", False)
        if is_flag:
            settings["action"] = "store_true"
        elif choices := _choices(parameter):
            settings["choices"] = choices
        names = parameter.opts if parameter.param_type_name == "option" else [parameter.name]
        action = parser.add_argument(*sorted(names, key=len), **settings)
        if metavar in _PATHS and not is_flag:
            action.complete = getattr(shtab, _PATHS[metavar])  # type: ignore[attr-defined]  # how shtab is told


def _choices(parameter: Any) -> list[str] | None:
    choices = getattr(parameter.type, "choices", None)
    return [choice.value if isinstance(choice, Enum) else str(choice) for choice in choices] if choices else None
