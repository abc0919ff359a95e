"""The world of workers this process belongs to, read from what the launcher left in the environment.

    torchrun        RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    megabatch       the same, and MEGABATCH_LAUNCHED
    srun            SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_STEP_NODELIST (the first host is the meeting point)
    mpirun          OMPI_COMM_WORLD_RANK / _SIZE / _LOCAL_RANK / _LOCAL_SIZE, or PMI_RANK / PMI_SIZE (MPICH, Intel)

A launcher that is only half recognised is an error: a process that quietly formed a world of its own would train
alone and overwrite what the others write. Reading is pure and needs no torch; `meeting.join` then meets the others.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from megabatch.errors import LaunchError, MegabatchError
from megabatch.machine import host_name

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

LAUNCHED_VARIABLE = "MEGABATCH_LAUNCHED"
"""Set for workers that `megabatch` itself has started, to the process id of their launcher."""

Launcher = Literal["megabatch", "elastic", "torchrun", "srun", "mpirun", "none"]


@dataclass(frozen=True)
class World:
    """Where this process stands among its peers, and where they meet."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: Launcher
    meeting_host: str
    meeting_port: int
    attempt: int = 0  # how often the launcher has restarted the group; `meeting.join` makes all ranks agree
    store_is_hosted: bool = False  # the launcher already serves the store at the meeting point

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise LaunchError(
                f"rank {self.rank} does not fit a world of {self.size}; ranks run from 0 to the world's size less one: "
                "check the launcher's variables"
            )

    def check_size(self, workers: int | None) -> None:
        """Refuse another number of workers than the launcher has started; None: any will do."""
        if workers not in (None, self.size):
            raise LaunchError(
                f"--workers {workers} was given but {self.launcher} started {self.size}; "
                "leave --workers out, or make them agree"
            )

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_local(self) -> bool:
        """Whether all workers are on this host."""
        return self.local_size == self.size


ALONE = World(rank=0, size=1, local_rank=0, local_size=1, launcher="none", meeting_host="", meeting_port=0)
"""A world of one process, which meets nobody."""


def present_world() -> World | None:
    """The world of torch's default process group, or None when there is no group yet; every rank must call it."""
    import torch.distributed as dist

    from megabatch.comm.messages import gather

    if not dist.is_initialized():
        return None
    hosts, rank = gather(host_name(), str), dist.get_rank()
    local_rank = hosts[:rank].count(hosts[rank])
    return World(rank, len(hosts), local_rank, hosts.count(hosts[rank]), "none", meeting_host="", meeting_port=0)


def read_world(environ: Mapping[str, str], alone: bool = False) -> World | None:
    """The world a launcher has put this process in, or None when no launcher was involved.

    `alone` says that the user wants local workers, also inside an allocation of many tasks.

    Raises:
        LaunchError: when a launcher left traces but not enough to join its world.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_torchrun(environ)
    if "OMPI_COMM_WORLD_SIZE" in environ or "OMPI_COMM_WORLD_RANK" in environ:
        return _from_mpi(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    # mpirun of MPICH and Intel starts its helpers through srun, whose variables the workers inherit; only mpirun sets
    # MPI_LOCALRANKID, whereas `srun --mpi=pmi2` sets PMI_RANK alone.
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ and "MPI_LOCALRANKID" not in environ:
        return _from_slurm(environ)
    if "PMI_RANK" in environ or "PMI_SIZE" in environ:
        return _from_mpi(environ, "PMI_RANK", "PMI_SIZE")
    if not alone and environ.get("SLURM_NTASKS") and _integer(environ, "SLURM_NTASKS", "Slurm") > 1:
        raise LaunchError(
            f"this process stands in a Slurm allocation of {environ['SLURM_NTASKS']} tasks but was not started as one "
            "of them; put `srun` before the command, or say --workers N to start local workers here"
        )
    return None


def _integer(environ: Mapping[str, str], name: str, launcher: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is not None:
            return default
        raise LaunchError(
            f"{launcher} set some of its variables but not {name}; all workers need it: start every worker with "
            f"{launcher}, or unset its variables to train with local workers"
        )
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}='{text}' is not a number; {launcher} must set it to one") from None


def _from_torchrun(environ: Mapping[str, str]) -> World:
    name = "torchrun"
    host = environ.get("MASTER_ADDR")
    if host is None:
        raise LaunchError(
            "RANK and WORLD_SIZE are set but MASTER_ADDR is not; start the workers with torchrun, or set it"
        )
    return World(
        rank=_integer(environ, "RANK", name),
        size=_integer(environ, "WORLD_SIZE", name),
        local_rank=_integer(environ, "LOCAL_RANK", name),
        local_size=_integer(environ, "LOCAL_WORLD_SIZE", name, default=1),
        launcher="megabatch" if LAUNCHED_VARIABLE in environ else "torchrun",
        meeting_host=host,
        meeting_port=_integer(environ, "MASTER_PORT", name),
        attempt=_integer(environ, "TORCHELASTIC_RESTART_COUNT", name, default=0),
        store_is_hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _from_slurm(environ: Mapping[str, str]) -> World:
    name = "srun"
    size = _integer(environ, "SLURM_NTASKS", name)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    if not nodes and "MASTER_ADDR" not in environ:
        raise LaunchError(
            "srun set neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST; set MASTER_ADDR to rank 0's host"
        )
    # srun gives "4(x2),3": tasks on each node; this node's number is at its own position.
    per_node = _expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", str(size))))
    node = _integer(environ, "SLURM_NODEID", name, default=0)
    return World(
        rank=_integer(environ, "SLURM_PROCID", name),
        size=size,
        local_rank=_integer(environ, "SLURM_LOCALID", name),
        local_size=per_node[node] if node < len(per_node) else 1,
        launcher="srun",
        meeting_host=environ.get("MASTER_ADDR") or first_host(nodes),
        meeting_port=_port(environ, f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"),
        attempt=_integer(environ, "SLURM_RESTART_COUNT", name, default=0),
    )


def _from_mpi(environ: Mapping[str, str], rank_name: str, size_name: str) -> World:
    name = "mpirun"
    size = _integer(environ, size_name, name)
    openmpi = rank_name.startswith("OMPI")
    local_size = _integer(environ, "OMPI_COMM_WORLD_LOCAL_SIZE" if openmpi else "MPI_LOCALNRANKS", name)
    local_rank = _integer(environ, "OMPI_COMM_WORLD_LOCAL_RANK" if openmpi else "MPI_LOCALRANKID", name)
    host = environ.get("MASTER_ADDR") or ("127.0.0.1" if local_size == size else None)
    if host is None:
        raise LaunchError(
            f"mpirun started {size} workers on several hosts but the meeting point is unknown; "
            "add `-x MASTER_ADDR=<host of rank 0>` to mpirun"
        )
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or environ.get("PMI_JOBID", "")
    return World(
        rank=_integer(environ, rank_name, name),
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        launcher="mpirun",
        meeting_host=host,
        meeting_port=_port(environ, job),
    )


def _port(environ: Mapping[str, str], job: str) -> int:
    """MASTER_PORT when set, else a port that all tasks of one job derive alike and two jobs rarely share."""
    if "MASTER_PORT" in environ:
        return _integer(environ, "MASTER_PORT", "the launcher")
    return 20_000 + zlib.crc32(job.encode()) % 12_000


def _expand_counts(text: str) -> list[int]:
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeat or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `rack[07-09,12]-gpu` gives `rack07-gpu`."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise LaunchError(f"the Slurm node list '{nodes}' cannot be read; set MASTER_ADDR to rank 0's host")
    return "".join(part for part in match.groups() if part)


def on_main_rank(is_main: bool, work: Callable[[], T]) -> T | None:
    """What `work` returns on the main rank, which alone does it; None on the others. Every rank must call it.

    Raises:
        MegabatchError: on every rank, what `work` has raised, so that nobody waits for the main rank.
    """
    from megabatch.comm.messages import broadcast

    result: T | None = None
    problem: MegabatchError | None = None
    if is_main:
        try:
            result = work()
        except MegabatchError as error:
            problem = error
    kind, text = broadcast([type(problem).__name__, str(problem)] if problem else ["", ""], list[str])
    if problem is not None:
        raise problem
    if kind:
        kinds = {one.__name__: one for one in MegabatchError.__subclasses__()}
        raise kinds.get(kind, MegabatchError)(text)
    return result


def choose_device(backend: str, world: World | None) -> tuple[torch.device, str]:
    """The device of this worker, and the communication backend ('auto', 'gloo' or 'nccl' given) that goes with it."""
    import torch

    num_devices = num_accelerators()
    local_rank = world.local_rank if world else 0
    if backend == "nccl" and not num_devices:
        raise LaunchError("comm.backend 'nccl' needs CUDA devices and this host shows none; use 'auto' or 'gloo'")
    if not num_devices or backend == "gloo":
        return torch.device("cpu"), "gloo"
    # `srun --gpus-per-task=1` and the like show each worker its own device alone; the grid's check finds a shared one.
    number = 0 if num_devices == 1 else local_rank
    if number >= num_devices:
        raise LaunchError(
            f"a worker has local rank {local_rank} on a host that shows {num_devices} CUDA devices; "
            "start at most one worker per device, or set comm.backend=gloo to train on the CPU"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number), "nccl"


def num_accelerators() -> int:
    """How many CUDA devices this process sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
