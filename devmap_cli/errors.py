"""Everything devmap can refuse or fail with, and the exit code each kind carries.

DevmapError                 one `error:` line, one `hint:` line
├── RequestError        2   the request is wrong: an argument, a model reference, a map
├── SurroundingsError   3   the request is fine, this machine or the hub is not
├── OutOfMemoryError    4   a real run ran out of memory
└── FindingsError       1   a proper no: the map has findings that forbid going on

"Does not fit" is no error but a result (`planning.Infeasible`), which the command line ends with exit code 1.
"""

from __future__ import annotations

EXIT_YES = 0
EXIT_NO = 1
EXIT_REQUEST = 2
EXIT_SURROUNDINGS = 3
EXIT_OUT_OF_MEMORY = 4
EXIT_BUG = 70
EXIT_SIGNAL = 128
"""Plus the signal's number: 130 interrupted, 143 terminated, 129 the terminal has gone."""
_MAX_REASON = 200


class DevmapError(Exception):
    """An expected failure, with what to try next.

    Args:
        message: what is wrong, one line, without a final full stop.
        hint: the command or change to try, one line.
    """

    exit_code = EXIT_BUG

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class RequestError(DevmapError):
    """The request is wrong."""

    exit_code = EXIT_REQUEST


class SurroundingsError(DevmapError):
    """The request is fine, but this machine, the hub or an installed package is not."""

    exit_code = EXIT_SURROUNDINGS


class OutOfMemoryError(DevmapError):
    """A real run ran out of memory."""

    exit_code = EXIT_OUT_OF_MEMORY


class FindingsError(DevmapError):
    """The map has findings that forbid going on."""

    exit_code = EXIT_NO


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something, without a final full stop, and cut where it is long.

    A line that ends with a colon only announces: the next one belongs to it.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    end = next((number for number, line in enumerate(lines, start=1) if not line.endswith(":")), len(lines))
    text = " ".join(lines[:end]).rstrip(".:")
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON].rsplit(" ", 1)[0] + " ..."
