"""A hub on the loopback interface that speaks as much of the protocol as downloading a config.json takes.

And what is left of such a download in the hub's cache.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>[^?]+)")


@dataclass(frozen=True)
class Repo:
    """A model repository with one commit; `branches` are the names that lead to it."""

    commit: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    branches: tuple[str, ...] = ("main",)
    gated: bool = False


@dataclass
class Hub:
    """A running hub: its address, and the requests that reached it."""

    endpoint: str
    requests: list[str] = field(default_factory=list)


@contextmanager
def loopback_hub(repos: Mapping[str, Repo]) -> Iterator[Hub]:
    """Serve `repos` as long as the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, with_body: bool) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            status, headers, body = _find(repos, self.path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def keep_config(cache: Path, model: str, config: bytes, commit: str = "c" * 40) -> None:
    """Put the config.json of hub id `model` in the hub's cache, as a download leaves it."""
    repo = cache / f"models--{model.replace('/', '--')}"
    for path, content in (("refs/main", commit.encode()), (f"snapshots/{commit}/config.json", config)):
        (repo / path).parent.mkdir(parents=True)
        (repo / path).write_bytes(content)


def _find(repos: Mapping[str, Repo], path: str) -> tuple[int, dict[str, str], bytes]:
    match = _FILE.match(path)
    repo = repos.get(match["repo"]) if match else None
    if match is None or repo is None:
        return 404, {"X-Error-Code": "RepoNotFound"}, b""
    if match["revision"] not in (*repo.branches, repo.commit):
        return 404, {"X-Error-Code": "RevisionNotFound"}, b""
    if repo.gated:
        return 403, {"X-Error-Code": "GatedRepo"}, b""
    headers = {"X-Repo-Commit": repo.commit}
    body = repo.files.get(match["file"])
    if body is None:
        return 404, {**headers, "X-Error-Code": "EntryNotFound"}, b""
    return 200, {**headers, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}, body
