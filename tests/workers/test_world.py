"""Worlds read from every launcher's variables, whole and partial; meeting the others, or being told who is missing."""

from __future__ import annotations

import pytest
import torch

from megabatch.errors import DataError, LaunchError
from megabatch.workers import world as world_module
from megabatch.workers.world import LAUNCHED_VARIABLE, World, choose_device, first_host, on_main_rank, read_world
from tests.ranks import run_ranks

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29400",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "rack[07-09,12]-gpu",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-1",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}


def without(environ: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name}


def complaint(environ: dict[str, str]) -> str:
    with pytest.raises(LaunchError) as caught:
        read_world(environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_launcher_no_world() -> None:
    assert read_world({}) is None
    assert read_world({"MASTER_ADDR": "head", "SLURM_JOB_ID": "3", "SLURM_NTASKS": "1"}) is None
    assert read_world({"SLURM_NTASKS": ""}) is None


def test_torchrun_and_our_own_launcher() -> None:
    found = read_world(TORCHRUN)
    assert found == World(3, 8, 1, 2, "torchrun", "head", 29400)
    assert not found.is_main
    elastic = {**TORCHRUN, "RANK": "0", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    found = read_world(elastic)
    assert found == World(0, 8, 1, 2, "torchrun", "head", 29400, attempt=2, store_is_hosted=True)
    assert found.is_main
    ours = read_world({**TORCHRUN, LAUNCHED_VARIABLE: "77"})
    assert ours == World(3, 8, 1, 2, "megabatch", "head", 29400)
    other_store = read_world({**elastic, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert other_store is not None
    assert not other_store.store_is_hosted


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_torchrun_in_part_is_an_error_that_names_what_is_missing(name: str) -> None:
    assert name in complaint(without(TORCHRUN, name))


def test_srun() -> None:
    found = read_world(SRUN)
    assert found is not None
    assert (found.rank, found.size, found.local_rank, found.local_size) == (9, 11, 1, 3)
    assert (found.launcher, found.meeting_host, found.attempt) == ("srun", "rack07-gpu", 0)
    assert not found.store_is_hosted


def test_srun_tasks_of_one_step_meet_at_one_port_and_other_steps_at_another() -> None:
    def port(**changes: str) -> int:
        found = read_world({**SRUN, **changes})
        assert found is not None
        return found.meeting_port

    assert port() == port(SLURM_PROCID="0", SLURM_NODEID="0", SLURM_LOCALID="3")
    assert len({port(), port(SLURM_STEP_ID="1"), port(SLURM_JOB_ID="78")}) == 3
    # Below the range from which systems hand out ports to outgoing connections (32768 on Linux).
    assert all(20_000 <= port(SLURM_JOB_ID=str(job)) < 32_768 for job in range(200))
    assert port(MASTER_PORT="1234") == 1234


def test_srun_details() -> None:
    def read(**changes: str) -> World:
        found = read_world({**SRUN, **changes})
        assert found is not None
        return found

    assert [read(SLURM_NODEID=node).local_size for node in "012"] == [4, 4, 3]
    assert read(MASTER_ADDR="other").meeting_host == "other"
    assert read(SLURM_RESTART_COUNT="3").attempt == 3
    fallback = without(without(SRUN, "SLURM_STEP_NODELIST"), "SLURM_STEP_TASKS_PER_NODE")
    found = read_world({**fallback, "SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "6(x2)"})
    assert found is not None
    assert (found.meeting_host, found.local_size) == ("a", 1)  # a node beyond the list: nothing is known about it
    assert read_world({**without(SRUN, "SLURM_STEP_TASKS_PER_NODE"), "SLURM_NODEID": "0"}).local_size == 11  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST"])
def test_srun_in_part_is_an_error_that_names_what_is_missing(name: str) -> None:
    assert name in complaint(without(SRUN, name))


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node[01-04]", "node01"),
        ("a,b", "a"),
        ("rack[07-09,12]-gpu", "rack07-gpu"),
        ("single", "single"),
        ("n[3,5-6]", "n3"),
        ("n[003]", "n003"),
        ("gpu-a100-[1-2],cpu[1-9]", "gpu-a100-1"),
        ("x[1-2].cluster.example,y", "x1.cluster.example"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_a_node_list_that_cannot_be_read_says_what_to_set() -> None:
    with pytest.raises(LaunchError, match="MASTER_ADDR"):
        first_host("[1-2]")


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"},
        # The shell of a batch script is task 0 of no step.
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    ],
)
def test_a_slurm_allocation_without_srun_is_an_error(environ: dict[str, str]) -> None:
    said = complaint(environ)
    assert "8 tasks" in said
    assert "`srun`" in said


def test_openmpi() -> None:
    found = read_world(OPENMPI)
    assert found is not None
    assert (found.rank, found.size, found.local_rank, found.local_size) == (2, 4, 2, 4)
    assert (found.launcher, found.meeting_host) == ("mpirun", "127.0.0.1")  # all on one host
    same = read_world({**OPENMPI, "OMPI_COMM_WORLD_RANK": "0"})
    other = read_world({**OPENMPI, "PMIX_NAMESPACE": "prterun-2"})
    assert same is not None
    assert other is not None
    assert found.meeting_port == same.meeting_port != other.meeting_port


@pytest.mark.parametrize("environ", [OPENMPI, MPICH])
def test_mpi_over_several_hosts_needs_a_meeting_point(environ: dict[str, str]) -> None:
    size = "OMPI_COMM_WORLD_SIZE" if "OMPI_COMM_WORLD_SIZE" in environ else "PMI_SIZE"
    several = {**environ, size: "8"}
    assert "-x MASTER_ADDR" in complaint(several)
    found = read_world({**several, "MASTER_ADDR": "head", "MASTER_PORT": "4321"})
    assert found is not None
    assert (found.meeting_host, found.meeting_port, found.local_rank, found.local_size) == ("head", 4321, 2, 4)


def test_mpich_and_intel() -> None:
    found = read_world(MPICH)
    assert found is not None
    assert (found.rank, found.size, found.local_rank, found.local_size) == (2, 4, 2, 4)
    assert (found.launcher, found.meeting_host) == ("mpirun", "127.0.0.1")


@pytest.mark.parametrize(
    ("environ", "name"),
    [(OPENMPI, "OMPI_COMM_WORLD_RANK"), (OPENMPI, "OMPI_COMM_WORLD_SIZE"), (MPICH, "PMI_RANK"), (MPICH, "PMI_SIZE")],
)
def test_mpi_in_part_is_an_error_that_names_what_is_missing(environ: dict[str, str], name: str) -> None:
    assert name in complaint(without(environ, name))


@pytest.mark.parametrize(("environ", "name"), [(OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK"), (MPICH, "MPI_LOCALRANKID")])
def test_mpi_without_a_local_rank_is_an_error(environ: dict[str, str], name: str) -> None:
    """Taken for 0, it would put all workers of a host on its first device."""
    assert name in complaint({**without(environ, name), "MASTER_ADDR": "head"})


def test_mpirun_inside_a_slurm_allocation_goes_by_mpirun() -> None:
    """mpirun starts one helper per node through srun, whose variables every worker then sees, all of them alike."""
    helper = {**SRUN, "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
    found = read_world({**helper, **OPENMPI})
    assert found is not None
    assert (found.rank, found.size) == (2, 4)
    found = read_world({**helper, **MPICH})
    assert found is not None
    assert (found.rank, found.size) == (2, 4)


def test_srun_that_also_speaks_pmi_goes_by_srun() -> None:
    """`srun --mpi=pmi2` sets rank and size for MPI too, but nothing about the place of a worker on its host."""
    assert read_world({**SRUN, "PMI_RANK": "9", "PMI_SIZE": "11"}) == read_world(SRUN)


def test_torchrun_inside_srun_goes_by_torchrun() -> None:
    found = read_world({**SRUN, **TORCHRUN})
    assert found is not None
    assert found.launcher == "torchrun"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**TORCHRUN, "RANK": "three"}, ["RANK='three'", "not a number"]),
        ({**TORCHRUN, "RANK": "8"}, ["rank 8", "world of 8"]),
        ({**TORCHRUN, "RANK": "-1"}, ["rank -1"]),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, ["world of 0"]),
        ({**SRUN, "SLURM_PROCID": "11"}, ["rank 11", "world of 11"]),
        ({**OPENMPI, "MASTER_PORT": "high"}, ["MASTER_PORT='high'"]),
        ({"SLURM_NTASKS": "many"}, ["SLURM_NTASKS='many'"]),
    ],
)
def test_nonsense_in_a_variable_is_one_line(environ: dict[str, str], words: list[str]) -> None:
    said = complaint(environ)
    for word in words:
        assert word in said


def test_without_devices_training_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "num_accelerators", lambda: 0)
    for backend in ("auto", "gloo"):
        assert choose_device(backend, None) == (torch.device("cpu"), "gloo")
    with pytest.raises(LaunchError, match="'nccl' needs CUDA devices"):
        choose_device("nccl", None)


def test_with_devices_each_worker_takes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(world_module, "num_accelerators", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    world = read_world(TORCHRUN)
    for backend in ("auto", "nccl"):
        assert choose_device(backend, world) == (torch.device("cuda", 1), "nccl")
    assert choose_device("auto", None) == (torch.device("cuda", 0), "nccl")
    assert chosen == [1, 1, 0]
    assert choose_device("gloo", world) == (torch.device("cpu"), "gloo")
    with pytest.raises(LaunchError, match="local rank 2 on a host that shows 2 CUDA devices"):
        choose_device("auto", World(2, 3, 2, 3, "torchrun", "head", 1))


def test_a_worker_that_is_shown_one_device_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "num_accelerators", lambda: 1)
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    world = World(3, 8, 3, 4, "srun", "head", 1)  # number 3 of its host, and `--gpus-per-task=1`
    assert choose_device("auto", world) == (torch.device("cuda", 0), "nccl")
    assert chosen == [0]


def test_another_number_of_workers_than_the_launcher_has_started_is_refused() -> None:
    world = World(0, 3, 0, 3, "torchrun", "head", 1)
    world.check_size(3)
    world.check_size(None)
    with pytest.raises(LaunchError, match="--workers 2 was given but torchrun started 3; leave --workers out"):
        world.check_size(2)


def ask_main_rank(rank: int) -> tuple[int | None, str]:
    """What `on_main_rank` gives when the work is done, and the error when it is refused."""

    def refuse() -> int:
        raise DataError("no images; give some")

    done = on_main_rank(rank == 0, lambda: 7)
    with pytest.raises(DataError) as caught:
        on_main_rank(rank == 0, refuse)
    return done, str(caught.value)


def test_an_error_of_the_main_rank_is_raised_on_every_rank() -> None:
    said = "no images; give some"
    assert run_ranks(2, ask_main_rank) == [(7, said), (None, said)]
