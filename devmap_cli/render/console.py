"""The two streams: stdout carries the result, stderr the rest."""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH_WHEN_PIPED = 200  # no line of ours is that long: nothing is cut in a file or a CI log


@cache
def out() -> Console:
    """The console of stdout."""
    return _console(sys.stdout)


@cache
def err() -> Console:
    """The console of stderr."""
    return _console(sys.stderr)


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    class Unguarded(Console):
        def on_broken_pipe(self) -> None:
            """Leave it to the command line, where all exit codes are decided."""
            raise

    width = None if stream.isatty() or "COLUMNS" in os.environ else _WIDTH_WHEN_PIPED
    return Unguarded(file=stream, width=width, highlight=False, soft_wrap=False, emoji=False, markup=False)
