"""Predicted speeds beside those that were published; `make bench` has all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.speeds import RUNS, Run, of_script, predicted

SEVERAL_DEVICES = [
    run for run in RUNS if run.model == "OPT-30B" or (run.model, run.dtype) == ("GPT-NeoX-20B", "float16")
]


@pytest.mark.parametrize("run", SEVERAL_DEVICES, ids=lambda run: f"{run.model}-{run.dtype}")
def test_a_fifth_off_at_most(tmp_path: Path, run: Run) -> None:
    assert of_script(predicted(run, tmp_path)) == pytest.approx(run.seconds_per_token, rel=0.2)
