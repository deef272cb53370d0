"""The three standard streams, made fit for use: there may be none, and their encoding may lack most characters."""

from __future__ import annotations

import codecs
import io
import os
import sys
from pathlib import Path
from typing import Any, TextIO

_PLAIN = str.maketrans(
    {
        "│": "|",
        "├": "|",
        "└": "`",
        "─": "-",
        "█": "#",
        "▓": "=",
        "▒": "-",
        "░": ".",
        "–": "-",
        "→": ">",
        "×": "x",
        "…": "...",
        "≤": "<=",
        "≥": ">=",
    }
)


def prepare_streams() -> None:
    """Open the null device for each stream that the process was started without, and let output hold any text.

    Must come before any file is opened: that would get the number of a missing stream.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - stays open as long as the process
            setattr(sys, name, stream)
    codecs.register_error("devmap.plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="devmap.plain")


def is_lost(stream: TextIO) -> bool:
    """Whether `stream` takes no more output; what it still holds then goes nowhere, or exiting would complain."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return True
    return False


def _plain(error: UnicodeError) -> tuple[str, int]:
    """An ASCII stand-in for characters that an encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_PLAIN)
    return text.encode("ascii", "replace").decode("ascii"), error.end


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document on stdout."""
    import json

    import typer

    typer.echo(json.dumps(document, indent=2))
