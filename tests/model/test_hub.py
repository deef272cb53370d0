"""Hub ids, against a hub on the loopback interface."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from devmap_cli.model.cache import cache_folder
from devmap_cli.model.load import load_spec
from devmap_cli.model.lookups import KEPT_SECONDS
from tests.support.hub import Hub, Repo, loopback_hub
from tests.support.processes import Outcome, run_devmap, run_python
from tests.support.toys import TOYS

COMMIT, OLDER = "a" * 40, "b" * 40
CONFIG = json.dumps(TOYS["qwen2"].config).encode()


def header_of(tensors: dict[str, dict[str, object]]) -> bytes:
    """A safetensors file of these tensors, without data."""
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


REPOS = {
    "org/toy": Repo(COMMIT, {"config.json": CONFIG}, branches=("main", "v1")),
    "org/weights-only": Repo(COMMIT, {"README.md": b"no config"}),
    "org/gated": Repo(COMMIT, {"config.json": CONFIG}, gated=True),
}


@pytest.fixture(autouse=True)
def _described(toy: Callable[..., Path]) -> None:
    """The description of the one model that is found, kept beforehand: what is tested here needs no torch."""
    load_spec(str(toy("qwen2")))


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with loopback_hub(REPOS) as running:
        yield running


def inspect(*arguments: str, endpoint: str, home: Path, offline: bool = False) -> Outcome:
    env = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1" if offline else ""}
    return run_devmap("inspect", "--json", *arguments, cwd=home, env={**env, "HF_TOKEN": ""})


def test_a_model_is_found_and_its_commit_recorded(hub: Hub, tmp_path: Path) -> None:
    for arguments in (["org/toy"], ["org/toy", "--revision", "v1"], ["org/toy", "--revision", COMMIT]):
        done = inspect(*arguments, endpoint=hub.endpoint, home=tmp_path)
        assert (done.exit_code, done.stderr) == (0, "")
        model = json.loads(done.stdout)["model"]
        assert (model["id"], model["revision"]) == ("org/toy", COMMIT)
    assert not any("safetensors" in request for request in hub.requests)


WEIGHTS: dict[str, dict[str, object]] = {"w": {"dtype": "F16", "shape": [0], "data_offsets": [0, 0]}}
INDEX = {"metadata": {"total_size": 1}, "weight_map": {"w": "model-00001-of-00002.safetensors"}}


@pytest.mark.parametrize(
    ("files", "dtype"),
    [
        ({"model.safetensors": header_of(WEIGHTS)}, "float16"),
        (
            {
                "model.safetensors.index.json": json.dumps(INDEX).encode(),
                "model-00001-of-00002.safetensors": header_of(WEIGHTS),
            },
            "float16",
        ),
        ({"model.safetensors": b"broken"}, "float32"),
        ({"pytorch_model.bin": b""}, "float32"),
    ],
    ids=["one file", "several", "broken", "pickle"],
)
def test_the_weights_there_tell_a_dtype_that_the_config_does_not_state(
    tmp_path: Path, files: dict[str, bytes], dtype: str
) -> None:
    config = json.dumps({**TOYS["qwen2"].config, "dtype": None, "torch_dtype": None}).encode()
    name = f"org/{tmp_path.name}"
    with loopback_hub({name: Repo(COMMIT, {"config.json": config, **files})}) as hub:
        for is_first in (True, False):
            before = len(hub.requests)
            done = inspect(name, endpoint=hub.endpoint, home=tmp_path)
            assert json.loads(done.stdout)["model"]["dtype"] == dtype
            asked = [request for request in hub.requests[before:] if "model" in request.rpartition("/")[2]]
            assert bool(asked) == (is_first or "broken" in str(files))
        assert not any("pytorch_model" in request for request in hub.requests)


def make_lookups_older(seconds: float) -> None:
    for path in (cache_folder() / "lookups").iterdir():
        document = json.loads(path.read_text())
        path.write_text(json.dumps({**document, "found_at": document["found_at"] - seconds}))


def test_the_hub_is_not_asked_again_for_a_while(hub: Hub, tmp_path: Path) -> None:
    def num_requests() -> int:
        before = len(hub.requests)
        assert inspect("org/toy", endpoint=hub.endpoint, home=tmp_path).exit_code == 0
        return len(hub.requests) - before

    assert num_requests() > 0
    assert num_requests() == 0
    make_lookups_older(KEPT_SECONDS)
    assert num_requests() > 0
    assert num_requests() == 0
    make_lookups_older(-3600)  # a clock that was set back
    assert num_requests() > 0
    shutil.rmtree(tmp_path / "hf")
    assert num_requests() > 0


def test_offline_with_the_config_in_the_cache(hub: Hub, tmp_path: Path) -> None:
    assert inspect("org/toy", endpoint=hub.endpoint, home=tmp_path).exit_code == 0
    make_lookups_older(KEPT_SECONDS)
    before = len(hub.requests)
    done = inspect("org/toy", endpoint=hub.endpoint, home=tmp_path, offline=True)
    assert (done.exit_code, done.stderr) == (0, "")
    assert json.loads(done.stdout)["model"]["revision"] == COMMIT
    assert len(hub.requests) == before


def test_offline_without_it(hub: Hub, tmp_path: Path) -> None:
    done = inspect("org/toy", endpoint=hub.endpoint, home=tmp_path, offline=True)
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.error == "HF_HUB_OFFLINE is set, and org/toy is not in the hub's cache"
    assert done.hint == "unset HF_HUB_OFFLINE, or give a folder with config.json"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "error", "hint"),
    [
        (["org/missing"], 2, "no folder and no hub model 'org/missing'", "check the spelling"),
        (["org/toy", "--revision", "v9"], 2, "org/toy has no revision 'v9'", "leave --revision out"),
        (["org/weights-only"], 2, "org/weights-only has no config.json on the hub", "give a Transformers model"),
        (["org/gated"], 3, "org/gated is gated on the hub", "hf auth login"),
    ],
)
def test_what_the_hub_refuses(
    hub: Hub, tmp_path: Path, arguments: list[str], exit_code: int, error: str, hint: str
) -> None:
    done = inspect(*arguments, endpoint=hub.endpoint, home=tmp_path)
    assert (done.exit_code, done.stdout) == (exit_code, "")
    assert done.error == error
    assert hint in done.hint


def test_a_name_that_the_hub_cannot_have(hub: Hub, tmp_path: Path) -> None:
    before = len(hub.requests)
    done = inspect("org/toy..-x", endpoint=hub.endpoint, home=tmp_path)
    assert (done.exit_code, done.error) == (2, "no folder and no hub model 'org/toy..-x'")
    assert len(hub.requests) == before


def test_no_hub_at_all(tmp_path: Path) -> None:
    with loopback_hub({}) as gone:
        pass
    # a pause between its attempts would only make the test slow
    patience = "import huggingface_hub.utils._http as http; http.time.sleep = lambda _: None; "
    script = f"{patience}import sys; from devmap_cli.cli import invoke; sys.exit(invoke(sys.argv[1:]))"
    env = {"HF_ENDPOINT": gone.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": ""}
    done = run_python("-c", script, "inspect", "org/toy", cwd=tmp_path, env=env)
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.error == "the hub cannot be reached, and org/toy is not in the hub's cache"
    assert done.hint == "check the network or HF_ENDPOINT, or give a folder with config.json"
