from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from devmap_cli.errors import RequestError, SurroundingsError
from devmap_cli.running.offloading import offload_folder
from devmap_cli.running.request import Listener, RunRequest
from devmap_cli.running.run import run_map
from tests.running.conftest import spec_of, spread


@pytest.fixture(autouse=True)
def _temporary_files_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize(
    ("number", "raised", "code"),
    [
        (signal.SIGINT, KeyboardInterrupt, None),
        (signal.SIGTERM, SystemExit, 143),
        (signal.SIGHUP, SystemExit, 129),
    ],
)
@pytest.mark.parametrize("moment", ["loading", "generating"])
def test_a_signal_leaves_no_folder(
    models: dict[str, Path],
    tmp_path: Path,
    number: signal.Signals,
    raised: type[BaseException],
    code: int | None,
    moment: str,
) -> None:
    folders: list[Path] = []

    def strike(_: object) -> None:
        folders.extend(tmp_path.glob("devmap-offload-*"))
        os.kill(os.getpid(), number)

    listener = Listener(on_progress=strike) if moment == "loading" else Listener(on_text=strike)
    before = signal.getsignal(number)
    spec = spec_of(models["llama"])
    with pytest.raises(raised) as caught:
        run_map(spread(spec, "cpu", "disk"), spec, RunRequest("hello"), listener)
    assert getattr(caught.value, "code", None) == code
    assert len(folders) == 1
    assert not folders[0].exists()
    assert signal.getsignal(number) == before


def test_signals_that_someone_handles_stay_theirs() -> None:
    def handler(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with offload_folder(None):
            assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_given_folder_is_made_and_kept(tmp_path: Path) -> None:
    given = tmp_path / "deep" / "offload"
    with offload_folder(given) as folder:
        (folder / "weights").write_bytes(b"x")
    assert [path.name for path in given.iterdir()] == ["weights"]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for given in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RequestError, match="is a file"), offload_folder(given):
            pass


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(SurroundingsError, match="Permission denied"), offload_folder(tmp_path):
        pass


def test_a_reader_that_leaves_is_no_failure_of_the_run(models: dict[str, Path]) -> None:
    def leave(_: str) -> None:
        raise BrokenPipeError

    spec = spec_of(models["llama"])
    with pytest.raises(BrokenPipeError):
        run_map(spread(spec, "cpu"), spec, RunRequest("hello"), Listener(on_text=leave))
