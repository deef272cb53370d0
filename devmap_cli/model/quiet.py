"""Libraries that talk on import and on load, kept off the terminal."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = ("transformers", "accelerate", "huggingface_hub", "torch")


@contextmanager
def quiet_loggers() -> Iterator[None]:
    """Silence the logs of the libraries, importing none of them. With DEVMAP_DEBUG set nothing is silenced."""
    before = {name: logging.getLogger(name).level for name in _LOGGERS}
    try:
        for name in _LOGGERS if not os.environ.get("DEVMAP_DEBUG") else ():
            logging.getLogger(name).setLevel(logging.CRITICAL)
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence warnings, logs and progress bars of torch, transformers, accelerate and the hub client.

    Imports transformers. With DEVMAP_DEBUG set nothing is silenced.
    """
    if os.environ.get("DEVMAP_DEBUG"):
        yield
        return
    import transformers  # its root logger sets its own level on import, which would undo ours

    transformers.logging.set_verbosity(logging.CRITICAL)
    with warnings.catch_warnings(), quiet_loggers():
        warnings.simplefilter("ignore")
        yield
