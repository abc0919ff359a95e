"""The live server: this machine only, read-only, new data when there is some."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from megabatch.errors import ConfigError, DataError
from megabatch.report import page
from megabatch.report.live import LiveServer
from tests.report.folders import make_run, row


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "a", finished=False)


@pytest.fixture
def server(folder: Path) -> Iterator[LiveServer]:
    live = LiveServer([folder])
    thread = threading.Thread(target=live.serve_forever)
    thread.start()
    yield live
    live.shutdown()
    live.server_close()
    thread.join(10)
    assert not thread.is_alive()


def ask(
    server: LiveServer, path: str, method: str = "GET", host: str | None = None
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    answer = connection.getresponse()
    result = answer.status, answer.read(), dict(answer.getheaders())
    connection.close()
    return result


def version(server: LiveServer) -> str:
    return server.current()[0].version


def test_the_page_and_its_steps(server: LiveServer, folder: Path) -> None:
    status, body, headers = ask(server, "/")
    assert status == 200
    assert b'"live":true' in body
    assert headers["Cache-Control"] == "no-store"
    old = version(server)
    assert ask(server, f"/latest?version={old}")[:2] == (204, b"")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row(101)) + "\n")
    status, body, _ = ask(server, f"/latest?version={old}")
    assert status == 200
    fresh = json.loads(body)
    assert fresh["data"]["version"] != old
    assert fresh["data"]["figures"][1]["series"][0]["x"][-1] == 101 / 25
    assert set(fresh["parts"]) == {"claim", "conditions", "figures", "repeat"}


def test_an_unchanged_folder_is_not_read_again(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = server.current()[0]
    monkeypatch.setattr("megabatch.report.live.read_runs", None)
    assert server.current()[0] is first


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1"])
def test_a_page_elsewhere_that_points_its_name_here_gets_nothing(server: LiveServer, host: str) -> None:
    status, body, _ = ask(server, "/", host=host)
    assert status == 403
    assert b"resnet8" not in body


def test_nothing_can_be_written_and_no_file_be_read(server: LiveServer) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert ask(server, "/", method)[0] == 501
    for path in ("/metrics.jsonl", "/../config.toml", "/%2e%2e/config.toml", "//etc/passwd"):
        assert ask(server, path)[0] == 404
    status, body, headers = ask(server, "/", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 1000


def test_a_folder_that_vanishes_is_said_and_does_not_end_the_server(server: LiveServer, folder: Path) -> None:
    folder.rename(folder.with_name("gone"))
    assert ask(server, "/")[0] == 503
    folder.with_name("gone").rename(folder)
    assert ask(server, "/")[0] == 200


def test_mistakes_are_told_before_serving(server: LiveServer, folder: Path) -> None:
    with pytest.raises(DataError):
        LiveServer([folder / "none"])
    with pytest.raises(ConfigError, match="give another --port"):
        LiveServer([folder], port=server.server_port)


def test_a_browser_that_leaves_in_the_middle_of_the_page_is_no_error(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page, "_asset", lambda name: f"/*{name}{'x' * 3_000_000}*/")
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as client:
            # Closing with a reset while the page, larger than any buffer, is on its way.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
            assert client.recv(100)
    assert ask(server, "/")[0] == 200
    time.sleep(0.5)
    assert capfd.readouterr().err == ""


def test_the_live_page_is_served_until_ctrl_c(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", finished=False)
    words = [sys.executable, "-u", "-m", "megabatch", "report", "--live", str(folder)]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        said = server.stdout.readline()
        url = said.split()[2]
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert answer.status == 200
        server.send_signal(signal.SIGINT)
        begin = time.monotonic()
        out, err = server.communicate(timeout=20)
        assert time.monotonic() - begin < 20
        assert (server.returncode, out, err) == (0, "stopped\n", "")
    finally:
        server.kill()
        server.communicate()
