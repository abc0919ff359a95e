"""From a request to an elastic run: the lighthouse, the token, local workers, and what each of them does."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megabatch.comm.shape import near_square
from megabatch.errors import ConfigError, LaunchError
from megabatch.train.request import Elastic, TrainRequest
from megabatch.workers.local import LEFT_EXIT_CODE, run_as_worker, start_elastic_workers
from megabatch.workers.meeting import join
from megabatch.workers.token import TOKEN_VARIABLE, needed_token, run_token
from megabatch.workers.world import ALONE, World, choose_device

LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""They take a host away from a run on many: a pod is evicted, a connection broken. The others go on."""


def check_elastic(
    request: TrainRequest, elastic: Elastic, world: World | None, world_size: int, environ: Mapping[str, str]
) -> None:
    """Refuse what cannot become an elastic run, before anything is started. world_size: workers to start here."""
    if elastic.max_workers and elastic.min_workers > elastic.max_workers:
        raise LaunchError(
            f"--min-workers {elastic.min_workers} is more than --max-workers {elastic.max_workers}: such a run never "
            "begins; make the first at most the second"
        )
    if not elastic.lighthouse and elastic.min_workers > world_size:
        raise LaunchError(
            f"--min-workers {elastic.min_workers} is more than the {world_size} local workers to start; add "
            f"--workers {elastic.min_workers}, or ask for fewer"
        )
    if request.config.comm.sums != "exact":
        raise ConfigError("elastic runs need exact sums, comm.sums is 'float'; leave it, with comm.grad_dtype=fp32")
    if request.config.comm.backend == "nccl":
        raise ConfigError("elastic runs speak Gloo, comm.backend is 'nccl'; leave it, or train without --elastic")
    if world is not None and not elastic.lighthouse:
        raise LaunchError(
            f"--elastic alone starts workers of its own, but {world.launcher} started this process as one of "
            f"{world.size}; give --elastic HOST:PORT of a lighthouse, or leave {world.launcher} out"
        )
    if elastic.lighthouse:
        needed_token(environ, "an elastic run over a lighthouse")
    if elastic.lighthouse and request.output is None:
        raise LaunchError("every worker of an elastic run needs the run folder; add --output RUN_FOLDER")


def start_elastic(request: TrainRequest, elastic: Elastic, world_size: int) -> int:
    """Run local workers to their end, with a lighthouse of our own or for one that is there; see `start_workers`."""
    from megabatch.workers.door import GuardedLighthouse, Way
    from megabatch.workers.membership import check_address

    started = time.time()  # a run that ends while the way to it is looked for ends without this host, too
    if run_token(os.environ) is None:
        os.environ[TOKEN_VARIABLE] = secrets.token_hex(32)  # workers inherit it
    token, elastic = needed_token(os.environ, "an elastic run"), replace(elastic, local_workers=world_size)
    opened: GuardedLighthouse | Way
    is_part = bool(elastic.lighthouse)
    if is_part:
        check_address(elastic.lighthouse)
        opened = Way(elastic.lighthouse, token)
        # This host may be taken away; what is local goes with its launcher.
        elastic = replace(elastic, way=opened.address, leave_on=tuple(one.name for one in LEAVE_SIGNALS))
    else:
        opened = GuardedLighthouse("127.0.0.1:0", token, elastic.min_workers)
        elastic = replace(elastic, lighthouse=opened.address, way=opened.inner, founders=world_size)
    request, max_restarts = replace(request, elastic=elastic), request.config.comm.max_restarts
    options: dict[str, Any] = {"max_restarts": max_restarts, "leave_on": LEAVE_SIGNALS if is_part else ()}
    options["started"] = started
    try:
        return start_elastic_workers(world_size, _start_work, request, **options)
    finally:
        opened.close()


def _start_work(request: TrainRequest) -> int:
    """What a local worker does."""
    return run_as_worker(lambda: _work(request), ALONE, os.environ, request.debug)


def _work(request: TrainRequest) -> int:
    """Train on one worker; it builds everything in a world of its own, then meets the others."""
    from megabatch.train.components import set_threads
    from megabatch.train.elastic import ElasticRun, LeftRunError
    from megabatch.train.metrics import say_result
    from megabatch.train.trainer import Trainer
    from megabatch.workers.stop import StopRequest

    config, elastic, folder, token = request.config, request.elastic, request.output, run_token(os.environ)
    assert elastic is not None
    assert folder is not None
    assert token is not None
    set_threads(config, elastic.local_workers)
    device, _ = choose_device("gloo", ALONE)
    here = replace(ALONE, local_size=elastic.local_workers)
    run = ElasticRun(elastic, token, request.grid)
    with StopRequest().listening() as stop:
        with join(ALONE, "gloo", config.comm.timeout_seconds):
            options: dict[str, Any] = {"resume": request.resume, "plan": request.plan, "elastic": run}
            trainer = Trainer(config, here, device, folder, near_square(1), stop, **options)
        try:
            summary = trainer.run()
        except LeftRunError as left:
            print(f"worker {run.name} {left}", flush=True)
            os._exit(LEFT_EXIT_CODE)  # what is under way with the others is not waited for
    if trainer.world.is_main:
        say_result(summary, folder)
    return 0
