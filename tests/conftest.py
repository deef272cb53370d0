"""What every test needs: no hub, caches of its own, and consoles that write to the streams of the test at hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.processes import Outcome
from tests.support.toys import write_toy

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers on two cores: more threads than that slow both
os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that lasts for the whole run, so that a toy model is built once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _surroundings(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVMAP_CACHE", str(shared_cache / "devmap"))
    monkeypatch.setenv("HF_HOME", str(shared_cache / "hub"))
    for name in ("DEVMAP_DEBUG", "COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _fresh_consoles() -> Iterator[None]:
    from devmap_cli.render import console

    yield
    console.out.cache_clear()
    console.err.cache_clear()


@pytest.fixture
def devmap(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run `devmap` with the given arguments in this process: exit code, stdout and stderr."""
    from devmap_cli.cli import invoke
    from devmap_cli.render import console

    def call(*arguments: object) -> Outcome:
        console.out.cache_clear()
        console.err.cache_clear()
        capsys.readouterr()
        exit_code = invoke([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(exit_code, captured.out, captured.err)

    return call


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., Path]:
    """Write the config.json of a toy model, some fields changed or left out (None), and give its folder."""

    def write(name: str, **changes: object) -> Path:
        return write_toy(tmp_path / name, name, **changes)

    return write
