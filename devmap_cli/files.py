"""Files written whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from devmap_cli.errors import RequestError, SurroundingsError

_DESCRIPTOR = re.compile(r"/dev/(?:(?P<name>stdin|stdout|stderr)|fd/(?P<number>\d+))")


def atomic_write(path: str | Path, content: bytes) -> None:
    """Write all of `content` to `path`, or leave whatever is there as it is.

    A link's target is replaced and the link stays; the file's permissions stay; devices, pipes and
    descriptors such as /dev/stdout are written to directly.

    Raises:
        RequestError: the folder does not exist, or the path is a folder.
        SurroundingsError: the folder or file is read-only, or the disk is full.
    """
    if not str(path):
        raise RequestError("the name of the file to write is empty", "-o map.json")
    try:
        descriptor = _descriptor(path)
        if descriptor is not None:
            with os.fdopen(os.dup(descriptor), "wb") as stream:
                stream.write(content)
            return
        target = Path(os.path.realpath(path))
        mode = target.stat().st_mode if target.exists() else None
        if mode is not None and stat.S_ISDIR(mode):
            raise RequestError(f"{path} is a folder, not a file", f"name a file in it: {Path(path) / 'map.json'}")
        if mode is not None and not stat.S_ISREG(mode):
            target.write_bytes(content)
        elif mode is not None and not os.access(target, os.W_OK):
            raise SurroundingsError(f"{path} is read-only", "write to another file")
        else:
            _replace(target, content, mode)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _write_error(Path(path), error) from error


def check_folder(path: Path) -> None:
    """Refuse a file in a folder that is not there, before anything is worked out for it.

    Raises:
        RequestError: naming the folder.
    """
    try:
        path.parent.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise _write_error(path, error) from error


def _replace(target: Path, content: bytes, mode: int | None) -> None:
    temporary = target.with_name(f".devmap-{os.urandom(8).hex()}.tmp")
    try:
        # Opened by hand because tempfile makes files of mode 0600, whatever the umask.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(descriptor, "wb") as stream:
            if mode is not None:
                temporary.chmod(stat.S_IMODE(mode))
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _descriptor(path: str | Path) -> int | None:
    """The open descriptor that `path` names: opening /dev/stdout anew would lose its position."""
    match = _DESCRIPTOR.fullmatch(str(path))
    if match is None:
        return None
    return int(match["number"]) if match["number"] else ("stdin", "stdout", "stderr").index(match["name"])


def _write_error(path: Path, error: OSError) -> RequestError | SurroundingsError:
    folder = path.parent
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return RequestError(f"cannot write {path}: the folder {folder} does not exist", f"mkdir -p '{folder}'")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SurroundingsError(f"cannot write {path}: the disk is full", "free some space, or write elsewhere")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return SurroundingsError(f"cannot write {path}: the folder {folder} is read-only", "write to another folder")
    return SurroundingsError(f"cannot write {path}: {error.strerror}", "write to another file")
