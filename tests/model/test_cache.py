"""Descriptions kept between runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from devmap_cli.model import cache, load
from devmap_cli.model.cache import cache_folder, read_spec, write_spec
from devmap_cli.model.load import load_spec
from devmap_cli.model.quantization.scheme import Quantization
from devmap_cli.model.reference import ModelReference
from devmap_cli.model.spec import ModelSpec, ModuleSpec
from tests.support.processes import run_python
from tests.support.toys import TOYS

MakeToy = Callable[..., Path]
HEAVY = ("torch", "transformers", "accelerate", "huggingface_hub", "numpy")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEVMAP_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has been described anew."""
    described: list[str] = []
    describe = load.describe

    def counting(
        reference: ModelReference, dtype: str | None, quantization: Quantization | None, *, trust_remote_code: bool
    ) -> ModelSpec:
        described.append(reference.location)
        return describe(reference, dtype, quantization, trust_remote_code=trust_remote_code)

    monkeypatch.setattr(load, "describe", counting)
    return described


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "gemma3", "t5", "bert"])
def test_what_is_kept_is_what_was_described(toy: MakeToy, own_cache: Path, builds: list[str], name: str) -> None:
    folder = toy(name)
    first = load_spec(str(folder))
    assert load_spec(str(folder)) == first
    assert builds == [str(folder)]
    assert len(list(own_cache.rglob("*.json"))) == 1


def test_a_second_time_imports_nothing_heavy(toy: MakeToy, own_cache: Path) -> None:
    folder = toy("qwen2")
    load_spec(str(folder))
    assert own_cache.is_dir()
    script = (
        "import sys; from devmap_cli.model.load import load_spec; "
        "print(load_spec(sys.argv[1]).class_name); "
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = run_python("-c", script, folder, cwd=folder)
    assert (done.stdout, done.stderr) == ("Qwen2ForCausalLM\n[]\n", "")


def test_the_key_depends_on_dtype_and_config(toy: MakeToy, own_cache: Path, builds: list[str]) -> None:
    folder = toy("qwen2")
    assert load_spec(str(folder)).dtype == "bfloat16"
    assert load_spec(str(folder), dtype="float32").dtype == "float32"
    smaller = toy("qwen2", num_hidden_layers=2)
    assert smaller == folder
    assert len(load_spec(str(folder)).kv_cache or ()) == 2
    assert len(builds) == 3
    assert len(list(own_cache.rglob("*.json"))) == 3


def test_the_key_depends_on_versions(
    toy: MakeToy, own_cache: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = toy("qwen2")
    load_spec(str(folder))
    newer = {**cache.package_versions(), "transformers": "99.0"}
    monkeypatch.setattr(cache, "package_versions", lambda: newer)
    load_spec(str(folder))
    assert len(builds) == 2
    assert own_cache.is_dir()


def test_the_same_config_elsewhere_keeps_its_own_name(
    toy: MakeToy, tmp_path: Path, own_cache: Path, builds: list[str]
) -> None:
    first, second = toy("qwen2"), tmp_path / "copy"
    first_spec = load_spec(str(first))
    first.rename(second)
    second_spec = load_spec(str(second))
    assert (first_spec.model_id, second_spec.model_id) == (str(first), str(second))
    assert len(builds) == 1
    assert own_cache.is_dir()


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b"{}", b"null", b"\xff\xfe", b'{"kv_cache": 3}'],
    ids=["empty", "cut", "list", "object", "null", "binary", "wrong"],
)
def test_a_damaged_file_is_described_anew(toy: MakeToy, own_cache: Path, builds: list[str], damage: bytes) -> None:
    folder = toy("qwen2")
    first = load_spec(str(folder))
    (kept,) = own_cache.rglob("*.json")
    kept.write_bytes(damage)
    assert load_spec(str(folder)) == first
    assert len(builds) == 2
    assert load_spec(str(folder)) == first  # and repaired
    assert len(builds) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("root", None),
        ("root", []),
        ("ties", 3),
        ("execution_order", 3),
        ("kv_cache", [3]),
        ("surplus", 1),
        ("root", {"name": ""}),
    ],
)
def test_a_file_with_a_wrong_field_is_ignored(toy: MakeToy, own_cache: Path, field: str, value: object) -> None:
    load_spec(str(toy("qwen2")))
    (kept,) = own_cache.rglob("*.json")
    kept.write_text(json.dumps({**json.loads(kept.read_text()), field: value}))
    assert read_spec(kept.stem) is None


def test_a_cache_that_cannot_be_written_is_no_failure(
    toy: MakeToy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("DEVMAP_CACHE", str(tmp_path / "file"))
    assert load_spec(str(toy("qwen2"))).class_name == TOYS["qwen2"].class_name


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("DEVMAP_CACHE", "~/mine")
    assert cache_folder() == Path("/home/somebody/mine")
    monkeypatch.delenv("DEVMAP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/devmap")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/home/somebody/.cache/devmap")


def test_nothing_is_left_beside_a_kept_file(own_cache: Path) -> None:
    spec = ModelSpec("m", None, "C", "c", "float32", ModuleSpec("", "C"))
    write_spec("key", spec)
    assert [path.name for path in own_cache.rglob("*") if path.is_file()] == ["key.json"]
    assert read_spec("key") == spec
    assert read_spec("other") is None
