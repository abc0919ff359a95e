"""Compiles and drives `forwarder.c`, the user-space cable used where the kernel has no netem."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megabatch.errors import LaunchError

from .network import NIC_NAME, Network

__all__ = ["QUEUE_LIMIT_BYTES", "Forwarder", "compile_forwarder", "open_tun"]

# A lossless fabric: more than TCP's default windows of all streams of one NIC. A full queue drops and is counted.
QUEUE_LIMIT_BYTES = 64 * 2**20

_SOURCE = Path(__file__).with_name("forwarder.c")
_FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra")
_ANSWER_SECONDS = 10.0

# linux/if_tun.h
_TUNSETIFF = 0x400454CA
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000


def cache_folder() -> Path:
    """Where compiled forwarders are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "megabatch" / "netlab"


def compile_forwarder(folder: Path | None = None) -> Path:
    """Return the compiled forwarder, building it when this very source has not been built yet."""
    digest = hashlib.sha256(_SOURCE.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()[:16]
    folder = folder or cache_folder()
    program = folder / f"forwarder-{digest}"
    if program.exists():
        return program
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise LaunchError(
            "no C compiler (cc, gcc, clang) and no netem in this kernel; the emulated network needs one of them: "
            "install gcc"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fresh = Path(scratch) / "forwarder"
        command = [compiler, *_FLAGS, "-o", str(fresh), str(_SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            reason = " ".join(done.stderr.split())[:400]
            raise LaunchError(f"{compiler} could not compile {_SOURCE.name}: {reason}; try another compiler")
        fresh.rename(program)
    return program


def open_tun() -> int:
    """Create the TUN device `nic0` in the calling thread's namespace; it vanishes when the descriptor is closed."""
    try:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", NIC_NAME.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError as error:
        raise LaunchError(
            f"/dev/net/tun cannot be used ({error.strerror}) and the kernel has no netem; load the 'tun' module"
        ) from None
    return fd


class Forwarder:
    """The running program; closing its stdin, as our death does, ends it and removes the TUN devices."""

    def __init__(self, network: Network, tun_fds: Sequence[int]) -> None:
        """Start forwarding between the TUN devices of the stations, given in their order."""
        nics = [f"{fd}:{station.address}" for fd, station in zip(tun_fds, network.stations, strict=True)]
        self._process = subprocess.Popen(
            [
                str(compile_forwarder()),
                str(round(network.latency_ms_one_way * 1e6)),
                str(network.rate_mbit_per_second * 1e6 / 8),
                str(QUEUE_LIMIT_BYTES),
                str(network.mtu),
                *nics,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=tuple(tun_fds),
            start_new_session=True,  # Ctrl-C is for the laboratory, which then ends us in order
        )
        self._unread = b""
        self._answer()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def counters(self) -> dict[str, Any]:
        """Counters since the start: `nics` (one entry per station), `cpu_seconds` and lateness of delivery."""
        self._process.send_signal(signal.SIGUSR1)
        return self._answer()

    def cut(self, index: int) -> None:
        """Drop silently everything station `index` sends or should receive."""
        self._tell(f"cut {index}")

    def join(self, index: int) -> None:
        """Undo `cut`."""
        self._tell(f"join {index}")

    def close(self) -> None:
        """End the program."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=5)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([fd], [], [], _ANSWER_SECONDS)
            piece = os.read(fd, 65536) if ready else b""
            if not piece:
                raise LaunchError("the network forwarder stopped answering; the laboratory must be started again")
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer
