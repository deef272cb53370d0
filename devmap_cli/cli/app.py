"""The Typer app: one function per command, each in a file of its own, imported where it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from devmap_cli import __version__

COMMANDS = ("inspect", "plan", "check", "run")


def make_app(commands: Sequence[str] = COMMANDS) -> typer.Typer:
    """The app with some of its commands; the time to make all of them is felt where only one is run."""
    app = typer.Typer(
        name="devmap",
        help="Plan, check and run Hugging Face device maps.",
        epilog="Exit codes: 0 yes, 1 no, 2 wrong request, 3 surroundings, 4 out of memory, 70 bug, 128+n signal n.",
        rich_markup_mode=None,
        add_completion=False,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    for name in commands:
        app.command(name=name)(getattr(import_module(f"devmap_cli.cli.{name}"), name))
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"devmap {__version__}")
        raise typer.Exit


def root(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Plan, check and run Hugging Face device maps."""
