"""Which module runs."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from devmap_cli.simulation.module_tracker import ModuleTracker


class Recorder(nn.Module):
    def __init__(self, tracker: ModuleTracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.seen: list[str] = []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.tracker.current)
        if value.sum() < 0:
            raise RuntimeError("negative")
        return value


def test_modules_are_named_from_the_one_that_was_called_first() -> None:
    tracker = ModuleTracker()
    inner = Recorder(tracker)
    outer = nn.Sequential(nn.Identity(), nn.Sequential(inner))
    with tracker:
        outer(torch.ones(1))
        assert tracker.current == ""
    assert inner.seen == ["1.0"]
    assert list(tracker.order) == ["", "0", "1", "1.0"]


def test_watched_models_lend_their_names_to_parts_called_alone() -> None:
    tracker = ModuleTracker()
    inner = Recorder(tracker)
    outer = nn.Sequential(nn.Sequential(inner))
    tracker.watch(outer)
    with tracker:
        outer[0](torch.ones(1))
    assert list(tracker.order) == ["0", "0.0"]


def test_an_error_is_told_by_the_innermost_module() -> None:
    tracker = ModuleTracker()
    outer = nn.Sequential(nn.Sequential(Recorder(tracker)))
    with tracker:
        with pytest.raises(RuntimeError, match="negative") as caught:
            outer(-torch.ones(1))
        assert tracker.raised_in(caught.value) == "0.0"
        assert tracker.raised_in(RuntimeError()) == ""
        assert tracker.current == ""  # the stack is empty again


def test_threads_have_stacks_of_their_own() -> None:
    tracker = ModuleTracker()
    seen: list[str] = []

    class Starter(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=lambda: seen.append(tracker.current))
            thread.start()
            thread.join()
            return value

    with tracker:
        nn.Sequential(Starter())(torch.ones(1))
    assert seen == [""]


def test_nothing_is_followed_afterwards() -> None:
    tracker = ModuleTracker()
    with tracker:
        pass
    nn.Identity()(torch.ones(1))
    assert not tracker.order
