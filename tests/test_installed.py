"""Versions of installed packages, as `importlib.metadata` tells them."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from devmap_cli.installed import installed_version
from devmap_cli.model.cache import PACKAGES


@pytest.fixture(autouse=True)
def _asked_anew() -> None:
    installed_version.cache_clear()


@pytest.mark.parametrize("package", [*PACKAGES, "huggingface_hub", "rich"])
def test_the_version_that_is_installed(package: str) -> None:
    assert installed_version(package) == version(package)


def test_none_where_there_is_none() -> None:
    assert installed_version("no_such_package") is None


def test_what_comes_first_on_the_path_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in ("1", "2"):
        folder = tmp_path / number
        (folder / f"some_package-{number}.0+cpu.dist-info").mkdir(parents=True)
        monkeypatch.syspath_prepend(str(folder))
    assert installed_version("some_package") == "2.0+cpu"


def test_older_forms_are_known_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "old_package.egg-info"
    folder.mkdir()
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: old_package\nVersion: 3.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_version("old_package") == "3.1"
