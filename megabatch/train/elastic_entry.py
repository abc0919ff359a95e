"""From a request to an elastic run: the lighthouse, the token, local workers, and what each of them does."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabatch.comm.shape import near_square
from megabatch.errors import ConfigError, LaunchError
from megabatch.train.local_workers import LEFT_EXIT_CODE, run_as_worker, start_elastic_workers
from megabatch.train.meeting import join
from megabatch.train.token import TOKEN_VARIABLE, run_token
from megabatch.train.world import ALONE, World, choose_device

if TYPE_CHECKING:
    from megabatch.train.entry import TrainRequest


@dataclass(frozen=True)
class Elastic:
    """What an elastic run is asked to do. lighthouse: HOST:PORT; empty: one of our own, for local workers."""

    lighthouse: str = ""
    min_workers: int = 1
    max_workers: int = 0  # 0: any number
    founders: int = 1  # workers that begin together, if they come in time
    local_workers: int = 1  # that share this host


def check_elastic(request: TrainRequest, elastic: Elastic, world: World | None, environ: Mapping[str, str]) -> None:
    """Refuse what cannot become an elastic run, before anything is started."""
    if request.config.comm.sums != "exact":
        raise ConfigError("elastic runs need exact sums, comm.sums is 'float'; leave it, with comm.grad_dtype=fp32")
    if request.config.comm.backend == "nccl":
        raise ConfigError("elastic runs speak Gloo, comm.backend is 'nccl'; leave it, or train without --elastic")
    if world is not None and not elastic.lighthouse:
        raise LaunchError(
            f"--elastic alone starts workers of its own, but {world.launcher} started this process as one of "
            f"{world.size}; give --elastic HOST:PORT of a lighthouse, or leave {world.launcher} out"
        )
    if elastic.lighthouse and run_token(environ) is None:
        raise LaunchError(
            "an elastic run over a lighthouse needs the token of the run; make one with `openssl rand -hex 32` "
            "and give it to every worker in MEGABATCH_TOKEN_FILE or MEGABATCH_TOKEN"
        )
    if elastic.lighthouse and request.output is None:
        raise LaunchError("every worker of an elastic run needs the run folder; add --output RUN_FOLDER")


def start_elastic(request: TrainRequest, elastic: Elastic, world_size: int) -> int:
    """Run local workers to their end, with a lighthouse of our own or for one that is there; see `start_workers`."""
    from megabatch.train.membership import check_lighthouse, start_lighthouse

    if run_token(os.environ) is None:
        os.environ[TOKEN_VARIABLE] = secrets.token_hex(32)  # workers inherit it
    elastic, own = replace(elastic, local_workers=world_size), None
    if elastic.lighthouse:
        check_lighthouse(elastic.lighthouse)
    else:
        own = start_lighthouse("127.0.0.1:0", elastic.min_workers)
        address = f"127.0.0.1:{own.address().rpartition(':')[2]}"
        elastic = replace(elastic, lighthouse=address, founders=world_size)
    request, max_restarts = replace(request, elastic=elastic), request.config.comm.max_restarts
    try:
        return start_elastic_workers(world_size, _start_work, request, max_restarts=max_restarts)
    finally:
        if own is not None:
            own.shutdown()


def _start_work(request: TrainRequest) -> int:
    """What a local worker does."""
    return run_as_worker(lambda: _work(request), ALONE, os.environ, request.debug)


def _work(request: TrainRequest) -> int:
    """Train on one worker; it builds everything in a world of its own, then meets the others."""
    from megabatch.train.components import set_threads
    from megabatch.train.elastic import ElasticRun, LeftRunError
    from megabatch.train.entry import say_result
    from megabatch.train.step import warm_up_pass
    from megabatch.train.stop import StopRequest
    from megabatch.train.trainer import Trainer

    config, elastic, folder, token = request.config, request.elastic, request.output, run_token(os.environ)
    assert elastic is not None
    assert folder is not None
    assert token is not None
    set_threads(config, elastic.local_workers)
    device, _ = choose_device("gloo", ALONE)
    here = replace(ALONE, local_size=elastic.local_workers)
    run = ElasticRun(elastic, token, request.grid)
    options: dict[str, Any] = {"resume": request.resume, "plan": request.plan, "elastic": run}
    with StopRequest().listening() as stop:
        with join(ALONE, "gloo", config.comm.timeout_seconds):
            trainer = Trainer(config, here, device, Path(folder), near_square(1), stop, **options)
            warm_up_pass(trainer.components)
        try:
            summary = trainer.run()
        except LeftRunError as left:
            print(f"worker {run.name} {left}", flush=True)
            os._exit(LEFT_EXIT_CODE)  # what is under way with the others is not waited for
    if trainer.world.is_main:
        say_result(summary, folder)
    return 0
