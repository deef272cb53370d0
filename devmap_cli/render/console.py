"""The two streams: stdout carries the result, stderr the rest."""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH_WHEN_PIPED = 200  # no line of ours is that long: nothing is cut in a file or a CI log


_TRAILING = re.compile(r"[ ]+(?=\n)")


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

        def print(self, *objects: Any, **settings: Any) -> None:
            """Print; in a file or pipe no line ends in blanks, which tables are padded with."""
            if self.is_terminal:
                super().print(*objects, **settings)
                return
            with self.capture() as captured:
                super().print(*objects, **settings)
            self.file.write(_TRAILING.sub("", captured.get()))
            self.file.flush()

    width = None if stream.isatty() or "COLUMNS" in os.environ else _WIDTH_WHEN_PIPED
    return Unguarded(
        file=stream,
        width=width,
        color_system=None if os.environ.get("NO_COLOR") else "auto",  # Rich alone would keep bold and dim
        highlight=False,
        emoji=False,
        markup=False,
    )
