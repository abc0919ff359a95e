"""`megabatch lighthouse`."""

from __future__ import annotations

import os
import signal
import threading
from typing import Annotated

import typer

from megabatch.cli.options import examples
from megabatch.workers.token import needed_token, open_to_others

app = typer.Typer()


@app.command(
    epilog=examples(
        "megabatch lighthouse --bind 10.0.0.5:29510 --min-workers 8",
    )
)
def lighthouse(
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen on: one that the run's workers reach.")
    ] = "127.0.0.1:29510",
    min_workers: Annotated[int, typer.Option(min=1, help="With fewer workers the run waits.")] = 1,
) -> None:
    """Tell the workers of an elastic run who takes part, until it is stopped by a signal.

    One for each run. It holds no weights and no data. It needs the run's token, in MEGABATCH_TOKEN_FILE or
    MEGABATCH_TOKEN: only who has it gets through to it.
    """
    from megabatch.workers.door import GuardedLighthouse

    token = needed_token(os.environ, "a lighthouse")
    if warning := open_to_others(os.environ):
        print(warning, flush=True)
    server = GuardedLighthouse(bind, token, min_workers)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    address = server.address
    print(f"lighthouse at {address}; workers: megabatch train RECIPE --elastic {address} --output RUN", flush=True)
    while not stopped.wait(timeout=1.0):
        pass
    server.close()
