"""The wheel and the sdist: built, installed without dev extras in a new virtual environment, and used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

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
    _run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)])
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
    _run([sys.executable, "-m", "venv", str(environment)])
    # --no-compile: compiling torch and transformers would take most of a minute, and is not what is tested
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
    _run([*pip, "--constraint", str(ROOT / "tests" / "constraints.txt"), str(wheel)])
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))

    devmap = str(environment / "bin" / "devmap")
    assert _run([devmap, "--version"]).startswith("devmap ")
    _run([devmap, "plan", str(model), "--max-memory", "0:60MB,1:60MB", "-o", "map.json"], cwd=tmp_path)
    device_map = json.loads((tmp_path / "map.json").read_text())["device_map"]
    assert set(device_map.values()) <= {0, 1}
    assert "lm_head" in device_map


def _run(command: list[str], cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout
