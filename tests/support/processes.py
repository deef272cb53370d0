"""Run `devmap` as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEVMAP = (sys.executable, "-m", "devmap_cli")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of `devmap` ended, and what it said on each stream."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The text of the one error line; fails unless stderr is one `error:` line and at most one `hint:` line."""
        lines = self.stderr.splitlines()
        assert 1 <= len(lines) <= 2, self.stderr
        assert lines[0].startswith("error: "), self.stderr
        assert all(line.startswith("hint: ") for line in lines[1:]), self.stderr
        return lines[0].removeprefix("error: ")

    @property
    def hint(self) -> str:
        """The text of the one hint line; fails unless stderr is one `error:` and one `hint:` line."""
        assert self.error
        lines = self.stderr.splitlines()
        assert len(lines) == 2, self.stderr
        return lines[1].removeprefix("hint: ")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of the tests with some variables added; an empty text takes one away."""
    merged = {**os.environ, **(extra or {})}
    return {name: value for name, value in merged.items() if value}


def run_devmap(
    *arguments: object, cwd: Path, env: Mapping[str, str] | None = None, stdin: str | None = None
) -> Outcome:
    """Run `devmap` in `cwd` with its streams piped; stdin is closed at once where no text is given."""
    return run_python(*DEVMAP[1:], *arguments, cwd=cwd, env=env, stdin=stdin)


def run_python(
    *arguments: object, cwd: Path, env: Mapping[str, str] | None = None, stdin: str | None = None
) -> Outcome:
    """Run this Python with `arguments` in `cwd`."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment(env),
        input=stdin or "",
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)
