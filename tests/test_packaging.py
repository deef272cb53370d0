"""The wheel and the sdist: built, installed without dev extras in a new virtual environment, and used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel made from the sdist, and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    # setuptools is here, since torch needs it: nothing is downloaded
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)])
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def test_distributions_hold_the_package_and_nothing_of_the_tests(distributions: tuple[Path, Path]) -> None:
    wheel, sdist = distributions
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "devmap_cli").rglob("*.py")}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert modules | {"devmap_cli/py.typed"} <= names
    assert not [name for name in names if name.startswith("tests")]
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("/pyproject.toml") for name in archive.getnames())


def test_wheel_works_in_a_new_environment(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, _ = distributions
    environment = tmp_path / "venv"
    _run([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    python = str(environment / "bin" / "python")
    site_packages = Path(_run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    linked = _link(_needed(_requirements(wheel)), site_packages)
    assert "torch" in linked
    assert "pytest" not in linked
    # without an index, pip ends here where a requirement is not linked, or linked in another version
    _run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", str(wheel)])
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))

    where = [python, "-c", "import devmap_cli; print(devmap_cli.__file__)"]
    assert Path(_run(where, cwd=tmp_path).strip()).is_relative_to(environment)
    devmap = str(environment / "bin" / "devmap")
    assert _run([devmap, "--version"]).startswith("devmap ")
    _run([devmap, "plan", str(model), "--max-memory", "0:60MB,1:60MB", "-o", "map.json"], cwd=tmp_path)
    device_map = json.loads((tmp_path / "map.json").read_text())["device_map"]
    assert set(device_map.values()) <= {0, 1}
    assert "lm_head" in device_map


def _requirements(wheel: Path) -> list[str]:
    """What the wheel says that it requires."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])


def _needed(requirements: Iterable[str]) -> dict[str, Distribution]:
    """The packages of this environment that `requirements` lead to, over their own requirements, by name."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        package = found.setdefault(requirement.name, distribution(requirement.name))
        for asked in {"", *requirement.extras}:
            if (requirement.name, asked) not in seen:
                seen.add((requirement.name, asked))
                waiting += [(Requirement(text), asked) for text in package.requires or ()]
    return found


def _link(packages: dict[str, Distribution], site_packages: Path) -> set[str]:
    """Put links to the folders and files of `packages` in `site_packages`: no copy, no download, nothing else."""
    for package in packages.values():
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (site_packages / top).exists():
                (site_packages / top).symlink_to(Path(str(package.locate_file(top))))
    return set(packages)


def _run(command: list[str], cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout
