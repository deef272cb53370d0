"""The folder that offloaded weights are kept in: temporary unless given, and gone however the run ends."""

from __future__ import annotations

import signal
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from devmap_cli.errors import RequestError, SurroundingsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


@contextmanager
def offload_folder(given: Path | None) -> Iterator[Path]:
    """A folder to offload to: `given`, made if need be and kept, or a temporary one that is removed.

    Raises:
        RequestError: `given` is a file.
        SurroundingsError: `given` cannot be made or written to.
    """
    if given is not None:
        _make_writable(given)
        yield given
        return
    with _termination_unwinds(), tempfile.TemporaryDirectory(prefix="devmap-offload-") as folder:
        yield Path(folder)


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        raise RequestError(f"--offload-folder {folder} is a file", "name a folder") from None
    except OSError as error:
        raise SurroundingsError(
            f"cannot write to --offload-folder {folder}: {error.strerror}", "name a folder that is writable"
        ) from error


@contextmanager
def _termination_unwinds() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the process by an exception, so that clean-up runs; Ctrl-C does already."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    untouched = [
        number for number in map(signal.Signals.__getitem__, names) if signal.getsignal(number) == signal.SIG_DFL
    ]
    for number in untouched:
        signal.signal(number, _exit_by_signal)
    try:
        yield
    finally:
        for number in untouched:
            signal.signal(number, signal.SIG_DFL)


def _exit_by_signal(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
