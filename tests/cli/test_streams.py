"""What scripts rely on: streams, exit codes, colours, signals, and a quick start."""

from __future__ import annotations

import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from devmap_cli import __version__, cli
from devmap_cli.errors import (
    DevmapError,
    FindingsError,
    OutOfMemoryError,
    RequestError,
    SurroundingsError,
)
from tests.support.processes import DEVMAP, Outcome, environment, run_devmap, run_python

MakeToy = Callable[..., Path]
HEAVY = ("torch", "transformers", "accelerate", "numpy", "huggingface_hub", "safetensors", "psutil")


@pytest.fixture
def described(toy: MakeToy, devmap: Callable[..., Outcome]) -> Path:
    """A toy whose description and profile are kept: a process that inspects or plans it needs no torch."""
    folder = toy("qwen2")
    assert devmap("plan", folder, "--max-memory", "0:99MB", "-o", "-").exit_code == 0
    return folder


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["-h"], ["inspect", "--help"], ["plan", "--help"], ["run", "--help"]]
)
def test_help_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    script = (
        "import sys; from devmap_cli.cli import invoke; code = invoke(sys.argv[1:]); "
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = run_python("-c", script, *arguments, cwd=tmp_path)
    assert (done.exit_code, done.stderr) == (0, "[]\n")
    assert done.stdout


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_a_warm_cache_needs_nothing_heavy(command: str, described: Path) -> None:
    script = (
        "import sys; from devmap_cli.cli import invoke; code = invoke(sys.argv[1:]); "
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    options = ["--max-memory", "0:99MB"] if command == "plan" else []
    done = run_python("-c", script, command, described, *options, "--json", cwd=described)
    assert (done.exit_code, done.stderr) == (0, "[]\n")


def test_version_and_module(tmp_path: Path) -> None:
    assert run_devmap("--version", cwd=tmp_path) == Outcome(0, f"devmap {__version__}\n", "")


def test_no_arguments_show_the_help(tmp_path: Path) -> None:
    assert run_devmap(cwd=tmp_path) == run_devmap("--help", cwd=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["no-such-command"], "no-such-command", "devmap --help"),
        (["--no-such-option"], "--no-such-option", "devmap --help"),
        (["plan"], "MODEL", "devmap plan --help"),
    ],
)
def test_usage_errors(devmap: Callable[..., Outcome], arguments: list[str], error: str, hint: str) -> None:
    done = devmap(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert error in done.error
    assert done.hint == hint


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (FindingsError("no", "try"), 1),
        (RequestError("wrong", "try"), 2),
        (SurroundingsError("gone", "try"), 3),
        (OutOfMemoryError("full", "try"), 4),
        (DevmapError("lost", "try"), 70),
        (ZeroDivisionError("by zero"), 70),
        (KeyboardInterrupt(), 130),
        (OSError(28, "No space left on device", "map.json"), 3),
    ],
)
def test_each_failure_has_its_exit_code(
    devmap: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, error: BaseException, exit_code: int
) -> None:
    def failing(_: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_dispatch", failing)
    done = devmap("inspect", "x")
    assert (done.exit_code, done.stdout) == (exit_code, "")
    assert done.error
    assert "Traceback" not in done.stderr


def test_messages_of_several_lines_become_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.fail(2, "first\n  second", "do\nthis") == 2
    assert capsys.readouterr().err == "error: first second\nhint: do this\n"


def test_a_bug_asks_for_a_report_and_shows_no_traceback(
    devmap: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: list[str]) -> int:
        raise ValueError("something\nodd")

    monkeypatch.setattr(cli, "_dispatch", failing)
    done = devmap("inspect", "x")
    assert done.error == "devmap failed unexpectedly: ValueError: something odd"
    assert "DEVMAP_DEBUG=1" in done.hint


def test_debug_shows_the_traceback(
    devmap: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Traceback" not in devmap("inspect", tmp_path).stderr
    monkeypatch.setenv("DEVMAP_DEBUG", "1")
    done = devmap("inspect", tmp_path)
    assert done.exit_code == 2
    assert "Traceback (most recent call last)" in done.stderr
    assert "RequestError" in done.stderr
    assert "has no config.json" in done.stderr.splitlines()[-2]


def test_no_colours_when_piped(described: Path) -> None:
    for command in (["inspect"], ["plan", "--max-memory", "0:99MB,cpu:1MB"]):
        done = run_devmap(*command, described, cwd=described, env={"TERM": "xterm-256color"})
        assert done.exit_code == 0
        assert "\x1b" not in done.stdout + done.stderr
    assert "\x1b" not in run_devmap("inspect", described / "missing", cwd=described).stderr


def on_a_terminal(arguments: list[object], cwd: Path, **env: str) -> str:
    """What `devmap` writes to a terminal."""
    ours, theirs = pty.openpty()
    merged = environment({"TERM": "xterm-256color", "COLUMNS": "120", **env})
    with subprocess.Popen(
        [*DEVMAP, *map(str, arguments)], stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd, env=merged
    ) as process:
        os.close(theirs)
        written = b""
        try:
            while chunk := os.read(ours, 65536):
                written += chunk
        except OSError:  # Linux's way to say that the other side has closed
            pass
        assert process.wait(timeout=60) == 0
    os.close(ours)
    return written.decode()


def test_colours_on_a_terminal_unless_unwanted(described: Path) -> None:
    assert "\x1b[36m" in on_a_terminal(["inspect", described], described)
    plain = on_a_terminal(["inspect", described], described, NO_COLOR="1")
    assert "Qwen2ForCausalLM" in plain
    assert "\x1b" not in plain


def test_no_line_ends_in_blanks_when_piped(described: Path) -> None:
    for command in (["inspect"], ["plan", "--max-memory", "0:99MB,1:99MB"]):
        lines = run_devmap(*command, described, cwd=described).stdout.splitlines()
        assert lines
        assert [line for line in lines if line != line.rstrip()] == []


def in_a_shell(redirections: str, *arguments: object, cwd: Path, **env: str) -> Outcome:
    """Run `devmap` with its streams redirected by a shell."""
    command = shlex.join([*DEVMAP, *map(str, arguments)])
    done = subprocess.run(
        ["/bin/sh", "-c", f"{command} {redirections}"],
        cwd=cwd,
        env=environment(env),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_streams_that_are_closed(described: Path) -> None:
    plan = ("plan", described, "--max-memory", "0:99MB,1:99MB")
    assert in_a_shell(">&-", *plan, cwd=described) == Outcome(0, "", "wrote map.json\n")
    assert in_a_shell(">&-", *plan, "--json", cwd=described) == Outcome(0, "", "")
    assert in_a_shell("2>&-", *plan, cwd=described).exit_code == 0
    assert in_a_shell("2>&-", "inspect", described / "missing", cwd=described) == Outcome(2, "", "")
    unasked = in_a_shell("<&-", "run", "--map", "map.json", cwd=described)
    assert (unasked.exit_code, unasked.error) == (2, "there is no prompt")
    assert "standard input is empty" in in_a_shell("<&-", "check", "--map", "-", cwd=described).error


@pytest.mark.parametrize("env", [{}, {"PYTHONUNBUFFERED": "1"}])
def test_a_full_stdout_is_named(described: Path, env: dict[str, str]) -> None:
    done = in_a_shell(">/dev/full", "inspect", described, cwd=described, **env)
    assert (done.exit_code, done.error) == (3, "standard output: No space left on device")
    assert done.hint


def test_encodings_without_box_characters(described: Path) -> None:
    plan = ("plan", described, "--max-memory", "0:99MB,1:99MB")
    for env in ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"PYTHONIOENCODING": "ascii"}):
        done = run_devmap(*plan, cwd=described, env=env)
        assert (done.exit_code, done.stderr) == (0, "wrote map.json\n")
        assert "#####" in done.stdout
        assert "1 x (128" in done.stdout
        assert "|-- model" in run_devmap("inspect", described, cwd=described, env=env).stdout


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_end_in_one_error_line(tmp_path: Path, number: signal.Signals, exit_code: int) -> None:
    pipe = tmp_path / "map.json"
    os.mkfifo(pipe)
    with subprocess.Popen(
        [*DEVMAP, "check", "--map", pipe], stderr=subprocess.PIPE, cwd=tmp_path, env=environment(), text=True
    ) as process:
        writer = os.open(pipe, os.O_WRONLY)  # waits until devmap reads the map
        process.send_signal(number)
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
        assert process.wait(timeout=60) == exit_code
        os.close(writer)
    assert lines == [f"error: stopped by {number.name}", f"hint: {cli.STOPPED_HINT}"]


IN_A_DESTRUCTOR = """
import signal, sys, time
from devmap_cli import cli

class Deleted:
    def __del__(self):
        signal.raise_signal(int(sys.argv[1]))

def dispatch(arguments):
    Deleted()
    time.sleep(20)
    return 0

cli._dispatch = dispatch
cli.main()
"""


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_that_come_while_an_object_is_deleted(tmp_path: Path, number: int, exit_code: int) -> None:
    done = run_python("-c", IN_A_DESTRUCTOR, int(number), cwd=tmp_path)
    assert done.exit_code == exit_code
    assert done.hint == cli.STOPPED_HINT


@pytest.mark.parametrize(
    "arguments", [["plan", "{}", "--max-memory", "0:99MB", "-o", ""], ["inspect", ""], ["check", "--map", ""]]
)
def test_empty_names(devmap: Callable[..., Outcome], described: Path, arguments: list[str]) -> None:
    done = devmap(*(argument.format(described) for argument in arguments))
    assert (done.exit_code, done.stdout) == (2, "")
    assert "empty" in done.error
    assert done.hint


def test_a_reader_that_leaves_early(described: Path) -> None:
    for options in (["--expand", "--depth", "9"], ["--json"]):
        with subprocess.Popen(
            [*DEVMAP, "inspect", described, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=described,
            env=environment({"PYTHONUNBUFFERED": ""}),
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == ""
            assert process.wait(timeout=60) == 0


def test_interrupted_while_working(toy: MakeToy, tmp_path: Path) -> None:
    folder = toy("qwen2")
    hook = tmp_path / "hook"
    hook.mkdir()
    # a module that stands where torch would be imported, and says when it is
    (hook / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    started = time.monotonic()
    with subprocess.Popen(
        [*DEVMAP, "inspect", folder, "--dtype", "float16"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=environment({"PYTHONPATH": str(hook), "DEVMAP_CACHE": str(tmp_path / "cache")}),
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read().splitlines() == ["error: interrupted", f"hint: {cli.STOPPED_HINT}"]
        assert process.wait(timeout=60) == 130
    assert time.monotonic() - started < 60  # it did not sleep to the end


def test_python_is_the_one_of_these_tests() -> None:
    assert DEVMAP[0] == sys.executable
