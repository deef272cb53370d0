"""What the hub answered a short while ago, so that plans made one after the other don't ask it each time."""

from __future__ import annotations

import os
import time
from pathlib import Path

from devmap_cli.model.cache import key_of, read_document, write_document

KEPT_SECONDS = 600
_FOLDER = "lookups"
_SETTINGS = ("HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_TOKEN", "XDG_CACHE_HOME", "HOME")
"""What decides which hub is asked, as whom, and where its files are kept."""


def known_file(model: str, revision: str | None) -> Path | None:
    """Where the config.json is that was looked up, if that was a short while ago and it is still there."""
    document = read_document(_FOLDER, _key(model, revision))
    if not isinstance(document, dict):
        return None
    found_at, path = document.get("found_at"), document.get("path")
    if not isinstance(found_at, int | float) or not isinstance(path, str):
        return None
    is_recent = 0 <= time.time() - found_at < KEPT_SECONDS
    return Path(path) if is_recent and Path(path).is_file() else None


def remember(model: str, revision: str | None, path: Path) -> None:
    """Keep where a config.json was found just now."""
    write_document(_FOLDER, _key(model, revision), {"found_at": time.time(), "path": str(path)})


def _key(model: str, revision: str | None) -> str:
    return key_of(model, revision, [os.environ.get(name) for name in _SETTINGS])
