"""The command line told in three places: help, completions/ and README.md. `make completions` rewrites the last two."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from typer import Context
from typer.main import get_command

from devmap_cli.cli.app import make_app
from devmap_cli.cli.completions import FILES, completions

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
_HELP_BLOCK = re.compile(r"(?<=```console\n\$ devmap )(?P<command>[a-z]*) ?--help\n.*?(?=```\n)", re.DOTALL)
_WIDTH = 100


def help_text(command: str) -> str:
    """What `devmap COMMAND --help` prints in 100 columns; the root's for ""."""
    root: Any = get_command(make_app())
    size: dict[str, Any] = {"terminal_width": _WIDTH, "max_content_width": _WIDTH}
    context = Context(root, info_name="devmap", **root.context_settings, **size)
    if not command:
        return str(root.get_help(context))
    inner = root.commands[command]
    return str(inner.get_help(Context(inner, info_name=command, parent=context, **size)))


def readme_with_help(text: str) -> str:
    """README text with each `$ devmap … --help` block saying what the command prints now."""

    def renewed(match: re.Match[str]) -> str:
        command = match["command"]
        return f"{f'{command} ' if command else ''}--help\n{help_text(command).rstrip()}\n"

    return _HELP_BLOCK.sub(renewed, text)


def files() -> dict[Path, str]:
    """Every generated file with what it should hold."""
    scripts = {ROOT / "completions" / FILES[shell]: text for shell, text in completions().items()}
    return {**scripts, README: readme_with_help(README.read_text(encoding="utf-8"))}


def main() -> int:
    """Write all generated files."""
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
