"""Nameless Linux namespaces that live exactly as long as something uses them.

A namespace here has no entry under /run/netns: the laboratory holds it by an open file, processes by being inside.
When the last of them is gone - normal end, exception or kill -9 - the kernel removes it with every device, address,
route and queue in it. That is the whole clean-up; there is no list of names to go stale.

A host's name is its first address, because that resolves everywhere without touching /etc/hosts.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megabatch.errors import LaunchError

__all__ = ["Namespace", "create_namespace", "enter_paths", "inside", "processes_inside", "run_batch", "write_sysctl"]

CLONE_NEWUTS = 0x04000000
CLONE_NEWNET = 0x40000000
_COMMAND_TIMEOUT_SECONDS = 30

_libc = ctypes.CDLL(None, use_errno=True)


class Namespace:
    """One network namespace together with the host name seen in it."""

    def __init__(self, net_fd: int, uts_fd: int) -> None:
        """Own both descriptors."""
        self.net_fd = net_fd
        self.uts_fd = uts_fd
        self.net_inode = os.fstat(net_fd).st_ino
        self._owner_pid = os.getpid()

    @property
    def paths(self) -> tuple[str, str]:
        """Files (network, host name) by which another process of this user can enter while we hold it."""
        return f"/proc/{self._owner_pid}/fd/{self.net_fd}", f"/proc/{self._owner_pid}/fd/{self.uts_fd}"

    def close(self) -> None:
        """Let go; the kernel removes the namespace as soon as nobody else is inside."""
        os.close(self.net_fd)
        os.close(self.uts_fd)


def _call(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise LaunchError(f"{name} failed with '{os.strerror(error)}'; network namespaces need root (CAP_SYS_ADMIN)")


def _open_current() -> tuple[int, int]:
    net_fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    return net_fd, os.open("/proc/thread-self/ns/uts", os.O_RDONLY | os.O_CLOEXEC)


def _enter(net_fd: int, uts_fd: int) -> None:
    _call("setns", net_fd, CLONE_NEWNET)
    _call("setns", uts_fd, CLONE_NEWUTS)


@contextmanager
def _excursion() -> Iterator[None]:
    """Bring the calling thread back to where it was, whatever happens inside."""
    home = _open_current()
    try:
        yield
    finally:
        _enter(*home)
        os.close(home[0])
        os.close(home[1])


def create_namespace(host_name: str) -> Namespace:
    """Make a network namespace with a live loopback device and the given host name."""
    with _excursion():
        _call("unshare", CLONE_NEWNET | CLONE_NEWUTS)
        socket.sethostname(host_name)
        namespace = Namespace(*_open_current())
        try:
            run_batch("ip", ["link set lo up"])
        except BaseException:
            namespace.close()
            raise
    return namespace


@contextmanager
def inside(namespace: Namespace) -> Iterator[None]:
    """Run the body in `namespace`: sockets opened and processes started there stay there.

    Only the calling thread moves. Sockets keep their namespace after the body has left it.
    """
    with _excursion():
        _enter(namespace.net_fd, namespace.uts_fd)
        yield


def enter_paths(paths: tuple[str, str]) -> None:
    """Move this process (it must have a single thread) into the namespace behind `Namespace.paths`, for good."""
    fds = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]
    _enter(fds[0], fds[1])
    for fd in fds:
        os.close(fd)


def run_batch(tool: str, commands: Iterable[str]) -> None:
    """Feed `commands` to one `ip -batch` or `tc -batch` in the namespace of the calling thread."""
    text = "\n".join(commands)
    try:
        done = subprocess.run(
            [tool, "-batch", "-"], input=text, text=True, capture_output=True, timeout=_COMMAND_TIMEOUT_SECONDS
        )
    except FileNotFoundError:
        raise LaunchError(f"the command '{tool}' is missing; install iproute2 to build a network") from None
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LaunchError(f"'{tool}' could not set up the network: {reason}; the kernel may lack the feature")


def write_sysctl(name: str, value: str) -> None:
    """Set a network setting of the calling thread's namespace, e.g. `ipv4/tcp_ecn`; a missing one is skipped."""
    path = Path("/proc/sys/net") / name
    if path.exists():
        path.write_text(value)


def processes_inside(namespaces: Iterable[Namespace]) -> list[int]:
    """Ids of all processes whose network is one of `namespaces`."""
    inodes = {namespace.net_inode for namespace in namespaces}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "ns/net").stat().st_ino in inodes:
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended while we looked
    return found
