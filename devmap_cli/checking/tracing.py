"""From an error that a rehearsal ended with to the line of the model's code that it came from."""

from __future__ import annotations

import linecache
import sys
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def model_line(error: BaseException, model: Any) -> str | None:
    """`file:line: source` of the innermost frame in a file that defines one of the model's classes, or None.

    The file is named from its package on.
    """
    files = frozenset(_files(model))
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename in files:
            found = frame, line
    if found is None:
        return None
    frame, line = found
    file = str(frame.f_globals.get("__name__", frame.f_code.co_filename)).replace(".", "/")
    source = linecache.getline(frame.f_code.co_filename, line).strip()
    return f"{file}.py:{line}: {source}"


def is_of_the_model(error: BaseException, model: Any) -> bool:
    """Whether the package that the model's class comes from raised `error`, and not what it was run in."""
    package = type(model).__module__.partition(".")[0]
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__", "")).partition(".")[0] == package


def _files(model: Any) -> Iterator[str]:
    """Files of the classes of the model's modules, without those of torch."""
    for name in {type(module).__module__ for module in model.modules()}:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and not name.startswith("torch."):
            yield file
