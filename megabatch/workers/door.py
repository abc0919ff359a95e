"""A door before the lighthouse: who does not have the token of the run does not get through.

torchft's lighthouse knows no passwords. Whoever reached its port could send heartbeats of workers that do not exist, or
the old words of one that is gone, and the run would wait for them. So the lighthouse itself listens at the loopback
address. A `Door` listens where other hosts reach it, and on each of them the launcher holds a `Way` to it: local
workers speak to the way, the way to the door, the door to the lighthouse.

Way and door prove to each other that they have the token: each signs a number that the other has just drawn. What
follows passes as it is. Nothing is encrypted.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any

from megabatch.errors import LaunchError
from megabatch.workers.membership import no_answer, start_lighthouse
from megabatch.workers.token import is_signed, sign

_GREETING = "megabatch lighthouse"
_LINE_BYTES = 256
_SECONDS = 5.0  # to greet each other, and until a connection counts as broken
_CONNECT_SECONDS = 10.0  # a lighthouse may be started at the same time as the workers
_POLL_SECONDS = 0.2
_CHUNK_BYTES = 2**16


class GuardedLighthouse:
    """A lighthouse behind a door at `bind` (HOST:PORT, port 0 for any).

    address: of the door. inner: of the lighthouse itself, for workers of this host.

    Raises:
        LaunchError: nothing can listen there, or torchft is not installed.
    """

    def __init__(self, bind: str, token: bytes, min_workers: int = 1) -> None:
        self._lighthouse = start_lighthouse("127.0.0.1:0", min_workers)
        self.inner = f"127.0.0.1:{self._lighthouse.address().rpartition(':')[2]}"
        try:
            self._door = _Relay(bind, self.inner, token, guards=True)
        except BaseException:
            self._lighthouse.shutdown()
            raise
        self.address = self._door.address

    def close(self) -> None:
        self._door.close()
        self._lighthouse.shutdown()


class Way:
    """The way from this host to the door of a lighthouse (HOST:PORT); `address` is where local workers find it.

    Raises:
        LaunchError: nobody answers, or the other side has another token.
    """

    def __init__(self, lighthouse: str, token: bytes) -> None:
        self._relay = _Relay("127.0.0.1:0", lighthouse, token, guards=False)
        self.address = self._relay.address
        try:
            self._relay.run(_try_door(lighthouse, token))
        except BaseException:
            self._relay.close()
            raise

    def close(self) -> None:
        self._relay.close()


class _Relay:
    """Passes every connection to `bind` on to `target`, in a thread of its own.

    guards: whoever connects must know the token. Otherwise the target is a door, and this side shows the token to it.
    """

    def __init__(self, bind: str, target: str, token: bytes, *, guards: bool) -> None:
        self._target, self._token, self._guards = target, token, guards
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="megabatch-door", daemon=True)
        self._thread.start()
        host, _, port = bind.rpartition(":")
        try:
            self._server = self.run(self._listen(host, int(port)))
        except (OSError, ValueError, OverflowError) as error:
            self._stop()
            raise LaunchError(f"no lighthouse can listen at '{bind}' ({error}); give HOST:PORT") from None
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine in the thread of the relay."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Listen no longer, and break what is open."""
        if not self._loop.is_closed():
            self.run(self._end())
            self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self, host: str, port: int) -> asyncio.Server:
        if not host:
            raise ValueError("no host")
        return await asyncio.start_server(self._serve, host, port, limit=_LINE_BYTES)

    async def _end(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, EOFError, ValueError, LaunchError, asyncio.CancelledError), _closing(writer):
            _notice_breaks(writer)
            if self._guards:
                async with asyncio.timeout(_SECONDS):
                    await _admit(reader, writer, self._token)
                    onward = await _connect(self._target)
            else:
                onward = await _through_door(self._target, self._token)
            with _closing(onward[1]):
                await _pass_on((reader, writer), onward)


async def _admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes) -> None:
    """As the door: ValueError unless the other side knows the token; then show that this side does."""
    own = secrets.token_hex(32)
    writer.write(f"{_GREETING} {own}\n".encode())
    theirs, _, signature = (await reader.readline()).decode("ascii").rstrip("\n").partition(" ")
    if not is_signed(token, f"way {own} {theirs}", signature):
        raise ValueError("no token")
    writer.write(f"{sign(token, f'door {own} {theirs}')}\n".encode())
    await writer.drain()


async def _through_door(lighthouse: str, token: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has passed the door.

    Raises:
        LaunchError: the door did not let it through, or is none.
        OSError, ValueError, TimeoutError: nobody answers.
    """
    async with asyncio.timeout(_SECONDS):
        reader, writer = await _connect(lighthouse)
        try:
            greeting, _, theirs = (await reader.readline()).decode("ascii").rstrip("\n").rpartition(" ")
            if greeting != _GREETING:
                raise LaunchError(f"what listens at {lighthouse} is no megabatch lighthouse; check address and port")
            own = secrets.token_hex(32)
            writer.write(f"{own} {sign(token, f'way {theirs} {own}')}\n".encode())
            if not is_signed(token, f"door {theirs} {own}", (await reader.readline()).decode("ascii").rstrip("\n")):
                raise LaunchError(
                    f"the lighthouse at {lighthouse} has another token; give the same MEGABATCH_TOKEN_FILE or "
                    "MEGABATCH_TOKEN to the lighthouse and to all workers of a run"
                )
        except BaseException:
            writer.close()
            raise
    return reader, writer


async def _try_door(lighthouse: str, token: bytes) -> None:
    """Raise LaunchError unless a door is there and opens."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            _, writer = await _through_door(lighthouse, token)
        except (OSError, ValueError, OverflowError) as error:
            if time.monotonic() > deadline:
                raise no_answer(lighthouse, error) from None
            await asyncio.sleep(_POLL_SECONDS)
        else:
            writer.close()
            return


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=_LINE_BYTES)
    _notice_breaks(writer)
    return reader, writer


def _notice_breaks(writer: asyncio.StreamWriter) -> None:
    """Let the kernel end the connection soon when the other host is cut off: a new one is made when it is back."""
    own = writer.get_extra_info("socket")
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = int(_SECONDS)
    for name, value in (("USER_TIMEOUT", 1000 * seconds), ("KEEPIDLE", seconds), ("KEEPINTVL", seconds)):
        if (option := getattr(socket, f"TCP_{name}", None)) is not None:  # as on Linux
            own.setsockopt(socket.IPPROTO_TCP, option, value)


async def _pass_on(*ends: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Bytes both ways, until one side ends."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()

    pumps = [asyncio.create_task(pump(ends[one][0], ends[1 - one][1])) for one in (0, 1)]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


@contextlib.contextmanager
def _closing(writer: asyncio.StreamWriter) -> Iterator[None]:
    try:
        yield
    finally:
        writer.close()
