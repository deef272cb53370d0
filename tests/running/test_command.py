"""`devmap run` as a command: exit codes, streams, and what is left behind."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from devmap_cli.cli import invoke
from devmap_cli.mapfile import MapDevice, MapFile, MapModel, MapWorkload, write_map
from devmap_cli.render.console import err, out
from tests.running.conftest import spec_of, spread


@pytest.fixture(scope="module")
def whole_map(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A map of ours, with parts on cpu and disk."""
    spec = spec_of(models["llama"])
    device_map = spread(spec, "cpu", "disk").device_map
    path = tmp_path_factory.mktemp("maps") / "map.json"
    devices = tuple(MapDevice(device, 10**9, 100_000) for device in dict.fromkeys(device_map.values()))
    model = MapModel(spec.model_id, None, spec.class_name, spec.dtype)
    write_map(MapFile(device_map, model, "balanced", MapWorkload(max_new_tokens=4), devices), path)
    return path


@dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str


class Command:
    """`devmap run` in this process: torch need not be imported again for each test."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, *arguments: object, stdin: bytes = b"") -> Done:
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        for console in (out, err):
            console.cache_clear()  # they hold on to the streams of the test before
        code = invoke(["run", *map(str, arguments)])
        captured = self._capsys.readouterr()
        return Done(code, captured.out, captured.err)


@pytest.fixture
def devmap(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(capsys, monkeypatch)


def test_the_answer_alone_is_on_stdout(devmap: Command, whole_map: Path) -> None:
    done = devmap("--map", whole_map, "--prompt", "hello")
    assert done.code == 0, done.stderr
    assert done.stdout.endswith("\n")
    assert len(done.stdout.strip()) == 4  # one letter a token
    lines = done.stderr.splitlines()
    assert lines[0].split("  ")[0] == "Device"
    assert [line.split()[0] for line in lines[1:3]] == ["cpu", "disk"]
    for words in ("Peak allocated", "Load time", "Time to first token", "Tokens/s"):
        assert words in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_json_is_one_document_and_nothing_else(devmap: Command, whole_map: Path) -> None:
    done = devmap("--map", whole_map, "--json", stdin=b"hello\n")
    document = json.loads(done.stdout)
    assert (done.code, done.stderr) == (0, "")
    assert document["measured"]["num_prompt_tokens"] == 5  # the final newline of standard input is not the prompt's
    assert [device["device"] for device in document["devices"]] == ["cpu", "disk"]


def test_the_map_from_standard_input(devmap: Command, whole_map: Path) -> None:
    assert devmap("--map", "-", "--prompt", "hello", stdin=whole_map.read_bytes()).code == 0
    done = devmap("--map", "-", stdin=whole_map.read_bytes())
    assert (done.code, done.stdout) == (2, "")
    assert "standard input is the map" in done.stderr


def test_a_bare_map_needs_the_model(devmap: Command, models: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text('{"": "cpu"}')
    done = devmap("--map", path, "--prompt", "hello")
    assert done.code == 2
    assert done.stderr.splitlines()[1] == "hint: add --model MODEL: a hub id or a folder"
    (tmp_path / "prompt").write_text("hello")
    done = devmap("--map", path, "--model", models["llama"], "--prompt-file", tmp_path / "prompt")
    assert done.code == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--map", "none.json", "--prompt", "x"], 2),
        (["--map", "MAP", "--prompt", "x", "--prompt-file", "y"], 2),
        (["--map", "MAP", "--prompt-file", "none.txt"], 2),
        (["--map", "MAP", "--prompt-file", "."], 2),
        (["--map", "MAP", "--prompt", ""], 2),
        (["--map", "MAP", "--prompt", "x", "--temperature", "-1"], 2),
        (["--map", "MAP", "--prompt", "x", "--offload-folder", "MAP"], 2),
        (["--map", "MAP", "--prompt", "x", "--offload-folder", "/proc/none"], 3),
    ],
)
def test_bad_requests_end_with_an_error_and_a_hint(
    devmap: Command, whole_map: Path, arguments: list[str], code: int
) -> None:
    done = devmap(*(str(whole_map) if argument == "MAP" else argument for argument in arguments))
    assert (done.code, done.stdout) == (code, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")


def test_remote_code_is_never_asked_about(devmap: Command, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnLM"}})
    )
    (tmp_path / "map.json").write_text('{"": "cpu"}')
    done = devmap("--map", tmp_path / "map.json", "--model", tmp_path / "model", "--prompt", "x", stdin=b"y\n")
    assert (done.code, done.stdout) == (2, "")
    assert "--trust-remote-code" in done.stderr.splitlines()[1]


def test_a_reader_that_leaves_ends_it_quietly(
    whole_map: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ours, theirs = os.pipe()

    def leave() -> None:
        os.read(ours, 1)
        os.close(ours)

    reader = threading.Thread(target=leave)
    reader.start()
    with os.fdopen(theirs, "w", encoding="utf-8") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        out.cache_clear()
        assert invoke(["run", "--map", str(whole_map), "--prompt", "hello", "--max-new-tokens", "100"]) == 0
        reader.join()
    assert capsys.readouterr().err == ""
    assert not list(tmp_path.glob("devmap-offload-*"))


@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_process_quietly(whole_map: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "devmap_cli",
            "run",
            "--map",
            str(whole_map),
            "--prompt",
            "hello",
            "--max-new-tokens",
            "100",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr.read() == b""
    assert not list(tmp_path.glob("devmap-offload-*"))


def test_an_error_leaves_no_offload_folder_and_a_given_one_stays(
    devmap: Command, whole_map: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    given = tmp_path / "deep" / "offload"
    done = devmap("--map", whole_map, "--prompt", "x", "--offload-folder", given)
    assert done.code == 0, done.stderr
    assert given.is_dir()
    assert devmap("--map", whole_map, "--prompt", "x", "--attention", "magic").code == 2
    assert not list(tmp_path.glob("devmap-offload-*"))
