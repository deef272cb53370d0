"""How many examples a property that rehearses models is tried with."""

from __future__ import annotations

import pytest

FEW_OR_MANY = pytest.mark.parametrize("num_examples", [2, pytest.param(20, marks=pytest.mark.slow)])
"""Few in the tests, many in `make bench`: each example is a rehearsal."""
