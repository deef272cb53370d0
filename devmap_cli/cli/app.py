"""The Typer app: one function per command, each in a file of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from devmap_cli import __version__
from devmap_cli.cli.check import check
from devmap_cli.cli.inspect import inspect
from devmap_cli.cli.plan import plan
from devmap_cli.cli.run import run

app = typer.Typer(
    name="devmap",
    help="Plan, check and run Hugging Face device maps.",
    epilog="Exit codes: 0 yes, 1 no, 2 wrong request, 3 surroundings, 4 out of memory, 70 bug, 128+n signal n.",
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"devmap {__version__}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Plan, check and run Hugging Face device maps."""


for command in (inspect, plan, check, run):
    app.command(name=command.__name__)(command)
