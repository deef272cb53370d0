"""The command line: the only place that knows Typer."""

from __future__ import annotations

import _thread
import errno
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from devmap_cli.cli.streams import is_lost, prepare_streams
from devmap_cli.errors import (
    EXIT_BUG,
    EXIT_REQUEST,
    EXIT_SIGNAL,
    EXIT_SURROUNDINGS,
    EXIT_YES,
    DevmapError,
)

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

STOPPED_HINT = "files are written whole or not at all: run the command again"
_AGAIN_SECONDS = 0.01
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Stopped(BaseException):
    """A signal that ends the process has come."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


def main() -> NoReturn:
    """Run `devmap` on the process's arguments and exit; all exit codes are decided here."""
    prepare_streams()
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # nohup has it ignored
            signal.signal(number, _stop)
    sys.unraisablehook = _insist
    code = invoke(sys.argv[1:])
    is_lost(sys.stderr)
    sys.exit(code)


def _stop(number: int, _: FrameType | None) -> NoReturn:
    raise Stopped(number)


def _insist(unraisable: UnraisableHookArgs) -> None:
    """Send a signal again that came while an object was deleted, which Python takes for an error to be ignored."""
    error = unraisable.exc_value
    if not isinstance(error, (KeyboardInterrupt, Stopped)):
        sys.__unraisablehook__(unraisable)
        return
    number = error.signal if isinstance(error, Stopped) else signal.SIGINT
    again = threading.Timer(_AGAIN_SECONDS, _thread.interrupt_main, [number])
    again.daemon = True
    again.start()


def invoke(arguments: list[str]) -> int:
    """Run `devmap` on `arguments` and give the exit code; failures become one error line and one hint line."""
    try:
        return _dispatch(arguments)
    except DevmapError as error:
        return fail(error.exit_code, error.message, error.hint, error)
    except KeyboardInterrupt as error:
        return fail(EXIT_SIGNAL + signal.SIGINT, "interrupted", STOPPED_HINT, error)
    except Stopped as error:
        return fail(EXIT_SIGNAL + error.signal, f"stopped by {error.signal.name}", STOPPED_HINT, error)
    except BrokenPipeError:
        is_lost(sys.stdout)  # the reader has gone, as `head` does
        return EXIT_YES
    except OSError as error:
        return _fail_outside(error)
    except Exception as error:  # noqa: BLE001 - the last resort: no traceback reaches a user
        message = f"devmap failed unexpectedly: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return fail(EXIT_BUG, message, "please report it with the output of: DEVMAP_DEBUG=1 devmap …", error)


def _dispatch(arguments: list[str]) -> int:
    from typer import Abort, Exit
    from typer.exceptions import TyperException
    from typer.main import get_command

    from devmap_cli.cli.app import COMMANDS, make_app

    app = make_app(arguments[:1]) if arguments and arguments[0] in COMMANDS else make_app()
    # not by calling app, which answers interrupts and broken pipes itself, without a word
    root = get_command(app)
    try:
        with root.make_context("devmap", arguments or ["--help"]) as context:
            code = root.invoke(context)
    except Exit as end:
        code = end.exit_code
    except TyperException as error:
        command = next((word for word in arguments if not word.startswith("-")), "")
        hint = f"devmap {command} --help" if command in COMMANDS else "devmap --help"
        return fail(EXIT_REQUEST, error.format_message().replace("Value error, ", "").rstrip("."), hint, error)
    except Abort as error:
        return fail(EXIT_SIGNAL + signal.SIGINT, "interrupted", STOPPED_HINT, error)
    sys.stdout.flush()
    return code if isinstance(code, int) else EXIT_YES


def _fail_outside(error: OSError) -> int:
    """Something that the operating system refuses, and that nobody has told in better words."""
    nameless = error.filename is None and error.errno in _FULL  # stdout is the one file that has no name here
    place = "standard output" if is_lost(sys.stdout) or nameless else error.filename
    reason = f"{error.strerror or error}"
    hint = "free some space, or write elsewhere" if error.errno in _FULL else "DEVMAP_DEBUG=1 shows where it fails"
    return fail(EXIT_SURROUNDINGS, f"{place}: {reason}" if place else reason, hint, error)


def fail(exit_code: int, message: str, hint: str, cause: BaseException | None = None) -> int:
    """Print the error and hint lines to stderr (and the traceback with DEVMAP_DEBUG) and give back `exit_code`."""
    with suppress(OSError):  # where stderr takes nothing, the exit code alone must tell
        if cause is not None and os.environ.get("DEVMAP_DEBUG"):
            import traceback

            traceback.print_exception(cause, file=sys.stderr)
        sys.stderr.write(f"error: {_one_line(message)}\nhint: {_one_line(hint)}\n")
        sys.stderr.flush()
    return exit_code


def _one_line(text: str) -> str:
    return " ".join(text.split())
