"""What every test of simulations needs: one thread, no gradients, no hub."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# With several threads on few cores each of the many small operators waits for the other core.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
