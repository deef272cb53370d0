"""Which packages are installed, told without importing them."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

_SUFFIX = ".dist-info"


@cache
def installed_version(package: str) -> str | None:
    """The version of a package whose name has no dashes; None where it is not installed.

    It is read from the name of the folder that wheels leave (`NAME-VERSION.dist-info`); `importlib.metadata`, which
    knows older forms too, takes longer to import than a plan takes to make.
    """
    for entry in sys.path:
        for folder in Path(entry or ".").glob(f"{package}-*{_SUFFIX}"):
            return folder.name.removeprefix(f"{package}-").removesuffix(_SUFFIX)
    return _from_metadata(package)


def _from_metadata(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
