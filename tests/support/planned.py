"""What `devmap plan` answered, for tests that ask it about whole models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from devmap_cli.cli.budgeting import budgets_from_options
from devmap_cli.cli.planning import Planning
from devmap_cli.mapfile import MapWorkload
from devmap_cli.model.load import load_spec
from devmap_cli.planning.means import PlanRequest
from devmap_cli.planning.nouns import Infeasible, Placement
from tests.support.processes import Outcome
from tests.support.reported import REPORTED
from tests.support.toys import write_config

CORPUS = Path(__file__).parents[3] / "shared" / "corpus" / "configs"
GIB = 1 << 30
SHORT = ("--prompt-tokens", 128, "--max-new-tokens", 32)

needs_corpus = pytest.mark.skipif(not CORPUS.is_dir(), reason="needs the corpus of config.json files")


@dataclass(frozen=True)
class Planned:
    """A plan: `document` is the map, `text` the table and the notes, each with single blanks between words."""

    document: dict[str, Any]
    text: str

    @cached_property
    def device_map(self) -> dict[str, int | str]:
        found: dict[str, int | str] = self.document["device_map"]
        return found

    def num_layers(self, stack: str) -> list[int]:
        """How many elements of the list `stack` each device holds, in the order of the devices."""
        places = [place for key, place in self.device_map.items() if key.rpartition(".")[0] == stack]
        return [places.count(item["device"]) for item in self.document["devices"]]

    def gib(self, part: str) -> list[float]:
        """`weights`, `peak` … of each device, in GiB."""
        return [item[f"{part}_bytes"] / GIB for item in self.document["devices"]]

    @property
    def uses(self) -> list[float]:
        """Peak by budget of each device."""
        return [item["peak_bytes"] / item["budget_bytes"] for item in self.document["devices"]]


@dataclass(frozen=True)
class Planner:
    """Runs `devmap plan` for models of the corpus, and for those of `REPORTED`, which it writes to `folder`."""

    devmap: Callable[..., Outcome]
    folder: Path

    def run(self, model: str, *arguments: object) -> Outcome:
        return self.devmap("plan", self.path(model), *arguments)

    def plan(self, model: str, *arguments: object) -> Planned:
        done = self.run(model, *arguments, "-o", "-")
        assert done.exit_code == 0, done.stderr
        return Planned(json.loads(done.stdout), " ".join(done.stderr.split()))

    def answer(
        self, model: str, max_memory: str, *, quantize: str | None = None, dtype: str | None = None, tokens: int = 128
    ) -> Placement | Infeasible:
        """The answer for a prompt of `tokens` and 32 more, without a rehearsal of the map or commands to try."""
        spec = load_spec(str(self.path(model)), quantize=quantize, dtype=dtype)
        budgets = budgets_from_options(max_memory, [], no_offload=False)
        request = PlanRequest("auto", budgets, MapWorkload(1, tokens, 32))
        return Planning(spec, trust_remote_code=False).plan(request, rehearse=False)

    def refusal(self, model: str, max_memory: str, **options: Any) -> Infeasible:
        answer = self.answer(model, max_memory, **options)
        assert isinstance(answer, Infeasible)
        return answer

    def path(self, model: str) -> Path:
        return write_config(self.folder / model, REPORTED[model]) if model in REPORTED else CORPUS / model
