"""The page of a run that goes on, served on this machine alone; it refreshes itself. Read-only.

It listens on 127.0.0.1 and answers GET and HEAD of two paths, to requests that name this machine as their host: a
web page elsewhere that points its own name at 127.0.0.1 gets nothing. The browser asks every two seconds whether there
is something new; a run folder whose files did not change is not read again.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from megabatch.errors import ConfigError, MegabatchError
from megabatch.report.network import network_times
from megabatch.report.page import Page, build_page, html_of
from megabatch.report.run import FILES, MEMBERSHIP_FILE, METRICS_FILE, Run, read_runs

_WATCHED = (*FILES, METRICS_FILE, MEMBERSHIP_FILE, "calibration.json")
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def serve_report(folders: Sequence[Path], network: Path | None, port: int, say: Callable[[str], None]) -> None:
    """Serve the page of runs that go on, until Ctrl-C."""
    server = LiveServer(folders, network, port)
    say(f"live page      {server.url}   (Ctrl-C stops it)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        say("stopped")


class LiveServer(ThreadingHTTPServer):
    """Serves the page of some run folders; `serve_forever` blocks until `shutdown` is called from another thread."""

    def __init__(self, folders: Sequence[Path], network: Path | None = None, port: int = 0) -> None:
        self._folders = list(folders)
        self._network = network
        self._lock = threading.Lock()
        self._stamp: list[tuple[int, int]] = []
        self._runs: list[Run] = []
        self._page: Page | None = None
        self.current()  # a folder that is no run is refused before anything is served
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"port {port} on 127.0.0.1 cannot be used ({error.strerror}); give another --port"
            ) from None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that leaves in the middle of the page is not worth a traceback; anything else is."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def current(self) -> tuple[Page, list[Run]]:
        """The newest page; read anew only when a file changed."""
        with self._lock:
            stamp = [_stamp(folder / name) for folder in self._folders for name in _WATCHED]
            if self._page is None or stamp != self._stamp:
                self._runs = read_runs(self._folders)
                self._page = build_page(self._runs, network_times(self._runs, self._network), live=True)
                self._stamp = stamp
            return self._page, self._runs

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Status, content type and body for a path."""
        parts = urlsplit(path)
        if parts.path not in ("/", "/latest"):
            return 404, "text/plain; charset=utf-8", b"not here\n"
        page, runs = self.current()
        if parts.path == "/":
            return 200, "text/html; charset=utf-8", html_of(page, runs).encode()
        if parse_qs(parts.query).get("version") == [page.version]:
            return 204, "application/json", b""
        fresh = {"parts": page.parts, "data": page.data, "layout": page.data["layout"]}
        return 200, "application/json", json.dumps(fresh, allow_nan=False).encode()


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_size)


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = 30
    server_version = "megabatch"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        host = self.headers.get("Host", "")
        if host not in (f"127.0.0.1:{self.server.server_port}", f"localhost:{self.server.server_port}"):
            self._send(403, "text/plain; charset=utf-8", b"ask for http://127.0.0.1\n", with_body)
            return
        try:
            self._send(*self.server.answer(self.path), with_body)
        except MegabatchError as error:
            self._send(503, "text/plain; charset=utf-8", f"{error}\n".encode(), with_body)

    def _send(self, status: int, kind: str, body: bytes, with_body: bool) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Requests are not worth a line each."""
