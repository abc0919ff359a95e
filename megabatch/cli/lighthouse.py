"""`megabatch lighthouse`."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from megabatch.cli.options import examples

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

    One for each run. It holds no weights and no data; workers prove with the run's token that they belong to it.
    """
    from megabatch.train.membership import start_lighthouse

    server = start_lighthouse(bind, min_workers)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    host, port = bind.rpartition(":")[0], server.address().rpartition(":")[2]
    print(
        f"lighthouse at {host}:{port}; workers: megabatch train RECIPE --elastic {host}:{port} --output RUN", flush=True
    )
    while not stopped.wait(timeout=1.0):
        pass
    server.shutdown()
