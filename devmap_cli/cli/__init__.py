"""The command line: the only place that knows Typer."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from devmap_cli.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_REQUEST,
    EXIT_SURROUNDINGS,
    EXIT_YES,
    DevmapError,
)


def main() -> NoReturn:
    """Run `devmap` on the process's arguments and exit; all exit codes are decided here."""
    sys.exit(invoke(sys.argv[1:]))


def invoke(arguments: list[str]) -> int:
    """Run `devmap` on `arguments` and give the exit code; failures become one error line and one hint line."""
    try:
        return _dispatch(arguments)
    except DevmapError as error:
        return fail(error.exit_code, error.message, error.hint, error)
    except KeyboardInterrupt as error:
        return fail(EXIT_INTERRUPTED, "interrupted", None, error)
    except BrokenPipeError:
        # the reader has gone, as `head` does; keep the interpreter from complaining when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_YES
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        return fail(EXIT_SURROUNDINGS, f"{error.strerror or error}{place}", None, error)
    except Exception as error:  # noqa: BLE001 - the last resort: no traceback reaches a user
        message = f"devmap failed unexpectedly: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return fail(EXIT_BUG, message, "please report it with the output of: DEVMAP_DEBUG=1 devmap …", error)


def _dispatch(arguments: list[str]) -> int:
    from typer import Abort, Exit
    from typer.exceptions import TyperException
    from typer.main import get_command

    from devmap_cli.cli.app import app

    # not by calling app, which answers interrupts and broken pipes itself, without a word
    root = get_command(app)
    try:
        with root.make_context("devmap", arguments or ["--help"]) as context:
            code = root.invoke(context)
    except Exit as end:
        code = end.exit_code
    except TyperException as error:
        command = next((word for word in arguments if not word.startswith("-")), "")
        known = command in {info.name for info in app.registered_commands}
        hint = f"devmap {command} --help" if known else "devmap --help"
        return fail(EXIT_REQUEST, error.format_message().replace("Value error, ", "").rstrip("."), hint, error)
    except Abort as error:
        return fail(EXIT_INTERRUPTED, "interrupted", None, error)
    sys.stdout.flush()
    return code if isinstance(code, int) else EXIT_YES


def fail(exit_code: int, message: str, hint: str | None, cause: BaseException | None = None) -> int:
    """Print the error and hint lines to stderr (and the traceback with DEVMAP_DEBUG) and give back `exit_code`."""
    if cause is not None and os.environ.get("DEVMAP_DEBUG"):
        import traceback

        traceback.print_exception(cause, file=sys.stderr)
    sys.stderr.write(f"error: {_one_line(message)}\n")
    if hint:
        sys.stderr.write(f"hint: {_one_line(hint)}\n")
    sys.stderr.flush()
    return exit_code


def _one_line(text: str) -> str:
    return " ".join(text.split())
