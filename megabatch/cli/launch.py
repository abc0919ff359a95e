"""`megabatch launch slurm | kubernetes | ssh`: writes a script or manifest, starts nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megabatch.cli.options import Debug, Set, examples, request_of

app = typer.Typer(no_args_is_help=True, help="Write a ready script or manifest for a cluster; starts nothing.")

Recipe = Annotated[str, typer.Argument(help="A name from `megabatch recipes`, or a TOML file the cluster can read.")]
Output = Annotated[str, typer.Option(help="The run folder, on a disk that all machines share.")]
Nodes = Annotated[int, typer.Option(min=1, help="Machines.")]
Workers = Annotated[int, typer.Option("--workers", min=1, help="Workers on each machine; one per GPU.")]
Gpus = Annotated[int, typer.Option("--gpus", min=0, help="GPUs of each machine; 0: compute on cores.")]
Cores = Annotated[int, typer.Option("--cores", min=0, help="Cores per worker; 0: four with a GPU, else one.")]
Name = Annotated[str, typer.Option(help="Name of the job.")]
Data = Annotated[str, typer.Option(help="Where the images are, on the machines.")]
Grid = Annotated[str, typer.Option(help="Rows x columns of workers.")]
Grace = Annotated[
    int, typer.Option("--grace", min=10, help="Seconds a step and its checkpoint may take after a signal.")
]
Python = Annotated[str, typer.Option(help="The Python of the machines that has megabatch.")]
Health = Annotated[bool, typer.Option("--health-check/--no-health-check", help="Run `doctor` on the machines first.")]
File = Annotated[Path | None, typer.Option("--file", help="Write here instead of printing.")]

Elastic = Annotated[
    bool, typer.Option("--elastic", help="Workers and machines may come and go: a lighthouse, no torchrun, no doctor.")
]
MinWorkers = Annotated[int, typer.Option(min=1, help="Elastic: with fewer workers the run waits, then stops.")]


@app.command(
    epilog=examples(
        "megabatch launch slurm demo --output runs/a --nodes 4 --workers 8 --gpus 8 --time 02:00:00 "
        "--file a.sbatch && sbatch a.sbatch",
    )
)
def slurm(
    ctx: typer.Context,
    recipe: Recipe,
    output: Output,
    nodes: Nodes = 1,
    workers_per_node: Workers = 1,
    gpus_per_node: Gpus = 0,
    cores_per_worker: Cores = 0,
    name: Name = "megabatch",
    data: Data = "",
    grid: Grid = "",
    overrides: Set = None,
    grace_seconds: Grace = 120,
    python: Python = "python",
    health_check: Health = True,
    time_limit: Annotated[str, typer.Option("--time", help="Time limit, for example 02:00:00.")] = "",
    partition: Annotated[str, typer.Option(help="Partition.")] = "",
    account: Annotated[str, typer.Option(help="Account.")] = "",
    mail: Annotated[str, typer.Option(help="Address for mails about the end, a failure, a requeue.")] = "",
    setup: Annotated[
        str, typer.Option(metavar="FILE", help="Shell file with modules and environments, sourced first.")
    ] = "",
    container: Annotated[
        str, typer.Option(metavar="IMAGE", help="Run inside this image (srun --container-image, the pyxis plugin).")
    ] = "",
    sbatch: Annotated[
        list[str] | None, typer.Option(help="A further option, for example --sbatch=--exclusive.")
    ] = None,
    elastic: Elastic = False,
    min_workers: MinWorkers = 1,
    file: File = None,
    debug: Debug = False,
) -> None:
    """A batch script: health check, torchrun on every node, checkpoint and requeue on signal or preemption."""
    from megabatch.launch.script import LaunchRequest, Site, hand_over, slurm_script

    request = request_of(LaunchRequest, ctx)
    site = Site(partition, account, mail, setup, container, tuple(sbatch or ()))
    hand_over(slurm_script(request, site), file)


@app.command(
    epilog=examples(
        "megabatch launch kubernetes demo --output /runs/a --image registry/megabatch:1 --claim runs "
        "--nodes 4 --workers 8 --gpus 8 --file a.json && kubectl apply -f a.json",
    )
)
def kubernetes(
    ctx: typer.Context,
    recipe: Recipe,
    output: Output,
    image: Annotated[str, typer.Option(help="The container image; --containerfile writes a file to build it from.")],
    claim: Annotated[str, typer.Option(help="PersistentVolumeClaim with run folders and images.")],
    mount: Annotated[str, typer.Option(help="Where the claim is mounted.")] = "/runs",
    kind: Annotated[str, typer.Option(help="pytorchjob or trainjob.")] = "pytorchjob",
    namespace: Annotated[str, typer.Option(help="Namespace.")] = "",
    nodes: Nodes = 1,
    workers_per_node: Workers = 1,
    gpus_per_node: Gpus = 0,
    cores_per_worker: Cores = 0,
    name: Name = "megabatch",
    data: Data = "",
    grid: Grid = "",
    overrides: Set = None,
    grace_seconds: Grace = 120,
    python: Python = "python",
    memory: Annotated[
        str, typer.Option(help="Memory of each pod, for example 64Gi; by default 4Gi a worker, 16Gi with a GPU.")
    ] = "",
    health_check: Health = True,
    containerfile: Annotated[Path | None, typer.Option(help="Also write a container file here.")] = None,
    elastic: Elastic = False,
    min_workers: MinWorkers = 1,
    file: File = None,
    debug: Debug = False,
) -> None:
    """A manifest for Kubeflow: PyTorchJob or TrainJob; and a container file."""
    from megabatch.errors import ConfigError
    from megabatch.launch.kubernetes import container_file, elastic_manifest, kubernetes_manifest, write_secret
    from megabatch.launch.script import LaunchRequest, hand_over

    request = request_of(LaunchRequest, ctx)
    if elastic:
        if file is None:
            raise ConfigError("--elastic writes the token of the run beside the manifest; add --file MANIFEST.json")
        hand_over(elastic_manifest(request, image, claim, mount, namespace, memory), file)
        write_secret(request, file.with_suffix(".secret.json"), namespace)
    else:
        hand_over(kubernetes_manifest(request, image, claim, mount, kind, namespace, memory), file)
    if containerfile is not None:
        hand_over(container_file(cuda=gpus_per_node > 0), containerfile)


@app.command(
    epilog=examples(
        "megabatch launch ssh demo --output /shared/a --host node1 --host node2 --workers 8 --file a.sh",
    )
)
def ssh(
    ctx: typer.Context,
    recipe: Recipe,
    output: Output,
    host: Annotated[list[str], typer.Option(help="A machine, NAME or USER@NAME; once for each.")],
    workers_per_node: Workers = 1,
    gpus_per_node: Gpus = 0,
    port: Annotated[
        int, typer.Option(min=1024, max=65000, help="Two ports from here are used on the first host.")
    ] = 29500,
    directory: Annotated[str, typer.Option(help="Folder to start in on every host.")] = "",
    data: Data = "",
    grid: Grid = "",
    overrides: Set = None,
    grace_seconds: Grace = 120,
    python: Python = "python",
    health_check: Health = True,
    elastic: Elastic = False,
    min_workers: MinWorkers = 1,
    file: File = None,
    debug: Debug = False,
) -> None:
    """A script that starts torchrun on every host over ssh and stops all when one fails."""
    from megabatch.launch.script import LaunchRequest, hand_over, ssh_script

    request = request_of(LaunchRequest, ctx, nodes=len(host))
    hand_over(ssh_script(request, tuple(host), port, directory), file)
